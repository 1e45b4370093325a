"""The network interfaces of this machine, as the system knows them."""

from __future__ import annotations

import socket

from shoal.core import addresses
from shoal.core.addresses import Interface

# It is routed like any other; nothing is sent to it.
ANYWHERE = (("192.0.2.1", 9), ("2001:db8::1", 9))


def interfaces() -> tuple[Interface, ...]:
    """Those that are up, with their addresses of both families."""
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


def outward() -> tuple[str, ...]:
    """Our addresses on the default routes, of both families."""
    found = (towards(*where) for where in ANYWHERE)
    return tuple(address for address in found if address and addresses.is_shareable(address))


def towards(host: str, port: int) -> str:
    """Our address on the way to a host, as the system would choose it; empty if there is no way."""
    try:
        family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(where)
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def good_names() -> tuple[str, ...]:
    """The name of this machine, if others may be told it."""
    name = socket.gethostname()
    try:
        resolved = {str(info[4][0]) for info in socket.getaddrinfo(name, None)}
    except OSError:
        return ()
    return (name,) if addresses.is_shareable_name(resolved) else ()
