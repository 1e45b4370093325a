"""The address at which machines of other pools reach this one."""

from __future__ import annotations

import socket
from collections.abc import Iterable

LOOPBACK = "127.0.0.1"
# An address that is routed like any other; nothing is sent to it.
ANYWHERE = ("192.0.2.1", 9)


def of_coordinator(engines: Iterable[str]) -> str:
    """Loopback if nobody comes from elsewhere; otherwise the address of the interface that leads out of here."""
    if all(engine == "local" for engine in engines):
        return LOOPBACK
    return towards(*ANYWHERE)


def towards(host: str, port: int) -> str:
    """Our address on the way to a host, as the system would choose it; loopback if there is no way."""
    try:
        family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(where)
            return str(probe.getsockname()[0])
    except OSError:
        return LOOPBACK
