"""Network interfaces and addresses of this machine, as the operating system reports them."""

from __future__ import annotations

import socket

from shoal.core import addresses
from shoal.core.addresses import Interface

# Documentation addresses (RFC 5737, RFC 3849): the system routes them like any other, and no packet is sent.
ROUTED_EXAMPLES = (("192.0.2.1", 9), ("2001:db8::1", 9))


def active_interfaces() -> tuple[Interface, ...]:
    """Return the interfaces that are up, with their IPv4 and IPv6 addresses."""
    import psutil

    states = psutil.net_if_stats()
    families = (socket.AF_INET, socket.AF_INET6)
    return tuple(
        Interface(
            name,
            tuple(entry.address for entry in entries if entry.family in families and "%" not in entry.address),
            max(0, states[name].speed),
        )
        for name, entries in psutil.net_if_addrs().items()
        if name in states and states[name].isup
    )


def default_addresses() -> tuple[str, ...]:
    """Return this machine's addresses on the default routes, at most one for IPv4 and one for IPv6."""
    candidates = (source_address(*example) for example in ROUTED_EXAMPLES)
    return tuple(address for address in candidates if address and addresses.is_shareable(address))


def source_address(host: str, port: int) -> str:
    """Return the local address that the system would use to reach a host; "" if there is no route."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def shareable_names() -> tuple[str, ...]:
    """Return this machine's host name if other machines can use it: not if it resolves to a loopback address."""
    name = socket.gethostname()
    try:
        resolved = {str(info[4][0]) for info in socket.getaddrinfo(name, None)}
    except OSError:
        return ()
    return (name,) if addresses.is_shareable_name(resolved) else ()
