"""Under which addresses a machine may be reached from others, the likeliest first; pure."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MOST = 6
FASTER = 2
# Bridges and pairs that container engines and hypervisors make: they have the same addresses on every machine.
INNER = re.compile(r"^(docker|br-|veth|virbr|vnet|vmnet|vboxnet|cni|flannel|cali|podman|lxc|lxdbr|kube|nerdctl)")


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface that is up, with its addresses; `speed_mbit` is 0 if nobody knows it."""

    name: str
    addresses: tuple[str, ...]
    speed_mbit: int = 0

    @property
    def is_inner(self) -> bool:
        """Whether it most likely leads nowhere but to containers or guests on this machine."""
        return INNER.match(self.name) is not None


def candidates(interfaces: Iterable[Interface], first: Sequence[str] = (), most: int = MOST) -> tuple[str, ...]:
    """Addresses at which others may reach this machine, in the order in which they should be tried.

    `first` are those that are known to lead somewhere, such as the one towards the coordinator. An interface that is
    much faster comes before them: whoever cannot use it finds out by trying.
    """
    known = tuple(interfaces)
    usable = [(one, address) for one in known for address in one.addresses if is_shareable(address)]
    speeds = [one.speed_mbit for one, address in usable if address in first and one.speed_mbit]
    usual_mbit = max(speeds, default=0)
    named = [address for address in first if is_shareable(address)]
    ranked = [(_rank(one, address, first, usual_mbit), at, address) for at, (one, address) in enumerate(usable)]
    # An address that no interface has is that of whoever passes on to us.
    ranked += [((1, False, False), -1, address) for address in named if address not in [a for _, a in usable]]
    return tuple(dict.fromkeys(address for _, _, address in sorted(ranked)))[:most]


def is_shareable(address: str) -> bool:
    """Whether an address means the same machine to others: neither loopback nor one that needs an interface's name."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    scoped = found.version == 6 and found.is_link_local
    return not (found.is_loopback or found.is_unspecified or found.is_multicast or scoped)


def is_loopback(address: str) -> bool:
    """Whether an address leads nowhere but back here."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address == "localhost"
    return found.is_loopback


def is_shareable_name(resolved: Iterable[str]) -> bool:
    """Whether a host name may be given to others: here it has addresses, and none of them is loopback."""
    found = tuple(resolved)
    return bool(found) and all(is_shareable(address) for address in found)


def url(scheme: str, host: str, port: int) -> str:
    return f"{scheme}://{host_port(host, port)}"


def host_port(host: str, port: int) -> str:
    """A host and a port as people and URLs write them."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_list(text: str) -> tuple[str, ...]:
    """What a text with commas lists, without what is said twice."""
    return tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def port_range(text: str) -> range | None:
    """The ports of a setting such as ``29400-29499``, None for any."""
    if not text:
        return None
    low, _, high = text.partition("-")
    return range(int(low), int(high) + 1)


def _rank(one: Interface, address: str, first: Sequence[str], usual_mbit: int) -> tuple[int, bool, bool]:
    if address in first:
        return (1, False, False)
    inner = one.is_inner or ipaddress.ip_address(address).is_link_local
    faster = bool(usual_mbit) and one.speed_mbit >= FASTER * usual_mbit
    return (3 if inner else 0 if faster else 2, ":" in address, False)
