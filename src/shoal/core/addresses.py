"""Addresses: under which addresses others can reach this machine, the most likely first."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MAX_CANDIDATES = 6
MAX_PORT = 65535
MAX_RANGE = len("00001-65535")
# An interface so many times as fast as the usual one is tried first.
FASTER = 2
# Bridges and pairs of container engines and hypervisors: they have the same addresses on every machine.
INNER = re.compile(r"^(docker|br-|veth|virbr|vnet|vmnet|vboxnet|cni|flannel|cali|podman|lxc|lxdbr|kube|nerdctl)")


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface that is up, with its addresses; `speed_mbit` is 0 if unknown."""

    name: str
    addresses: tuple[str, ...]
    speed_mbit: int = 0

    @property
    def is_inner(self) -> bool:
        """Whether it most likely leads only to containers or virtual machines on this machine."""
        return INNER.match(self.name) is not None


def candidates(
    interfaces: Iterable[Interface], first: Sequence[str] = (), most: int = MAX_CANDIDATES
) -> tuple[str, ...]:
    """Return the addresses at which others may reach this machine, in the order in which they should try them.

    `first` are addresses that are known to work, such as the one towards the coordinator. A much faster interface comes
    before them: a peer that cannot use it finds out by trying.
    """
    usable = [(interface, a) for interface in interfaces for a in interface.addresses if is_shareable(a)]
    speeds = [interface.speed_mbit for interface, a in usable if a in first and interface.speed_mbit]
    usual_mbit = max(speeds, default=0)
    ranked = [(_rank(interface, a, first, usual_mbit), at, a) for at, (interface, a) in enumerate(usable)]
    # An address of `first` that no interface has belongs to something that forwards to this machine.
    owned = [a for _, a in usable]
    ranked += [((1, False, False), -1, a) for a in first if is_shareable(a) and a not in owned]
    ordered = tuple(dict.fromkeys(address for _, _, address in sorted(ranked)))
    # Faster interfaces may fill the list, but never push out the addresses that are known to work.
    kept = sum(address in first for address in ordered[most:])
    return ordered[:most] if not kept else (*ordered[: most - kept], *(a for a in ordered[most:] if a in first))


def is_shareable(address: str) -> bool:
    """Return whether an address means the same machine to others: neither loopback nor scoped to an interface."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return False
    scoped = ip.version == 6 and ip.is_link_local
    return not (ip.is_loopback or ip.is_unspecified or ip.is_multicast or scoped)


def is_loopback(address: str) -> bool:
    """Return whether an address leads only to the machine itself."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return address == "localhost"
    return ip.is_loopback


def is_shareable_name(resolved: Iterable[str]) -> bool:
    """Return whether a host name may be given to others: it has addresses, and all of them are shareable."""
    addresses = tuple(resolved)
    return bool(addresses) and all(is_shareable(address) for address in addresses)


def url(scheme: str, host: str, port: int) -> str:
    return f"{scheme}://{host_port(host, port)}"


def host_port(host: str, port: int) -> str:
    """Return host and port as URLs write them, with brackets around IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_list(text: str) -> tuple[str, ...]:
    """Return the parts of a comma-separated list, without blanks and repetitions."""
    return tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def port_range(text: str) -> range | None:
    """Return the ports of a setting such as ``29400-29499``, None for any; raise ValueError if they are none."""
    if not text:
        return None
    low, _, high = text.partition("-")
    digits = low.isascii() and low.isdigit() and high.isascii() and high.isdigit()
    if not digits or len(text) > MAX_RANGE or not 1 <= int(low) <= int(high) <= MAX_PORT:
        raise ValueError(f"{text[:80]!r} is no range of ports from 1 to {MAX_PORT}")
    return range(int(low), int(high) + 1)


def _rank(interface: Interface, address: str, first: Sequence[str], usual_mbit: int) -> tuple[int, bool, bool]:
    if address in first:
        return (1, False, False)
    inner = interface.is_inner or ipaddress.ip_address(address).is_link_local
    faster = bool(usual_mbit) and interface.speed_mbit >= FASTER * usual_mbit
    return (3 if inner else 0 if faster else 2, ":" in address, False)
