"""Where the coordinator listens, and the URLs at which it may be reached."""

from __future__ import annotations

import errno
import socket
import time
from dataclasses import dataclass

from shoal.core import addresses
from shoal.errors import PortInUse
from shoal.wire import interfaces

PORT_WITHIN_S = 3.0
LOOPBACK = "127.0.0.1"
EVERYWHERE = "::"
EVERYWHERE_V4 = "0.0.0.0"
BACKLOG = 512
PAIRS = 20
_NO_V6 = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.EPROTONOSUPPORT)


@dataclass(frozen=True, slots=True)
class Urls:
    """`here` is for whoever is on this machine; `elsewhere` are those that others try, in this order."""

    here: str
    elsewhere: tuple[str, ...]


def urls(host: str, port: int, secure: bool, named: tuple[str, ...] = ()) -> Urls:
    """The URLs of a coordinator that listens there; `named` are addresses, with a port or without, that come first."""
    scheme = "https" if secure else "http"
    given = tuple(_with_port(scheme, one, port) for one in named)
    if host not in (EVERYWHERE, EVERYWHERE_V4):
        here = addresses.url(scheme, host, port)
        return Urls(here, tuple(dict.fromkeys((*given, here))))
    known = interfaces.interfaces()
    hosts = (*addresses.candidates(known, interfaces.outward()), *interfaces.good_names())
    found = [one for one in hosts if host == EVERYWHERE or ":" not in one]
    here = addresses.url(scheme, LOOPBACK, port)
    elsewhere = (*given, *(addresses.url(scheme, one, port) for one in found))
    return Urls(here, tuple(dict.fromkeys(elsewhere)) or (here,))


def _with_port(scheme: str, address: str, port: int) -> str:
    if "://" in address:
        return address.rstrip("/")
    host, colon, given = address.rpartition(":")
    if address.startswith("[") or (colon and ":" not in host and given.isdecimal()):
        return f"{scheme}://{address}" if not address.endswith("]") else f"{scheme}://{address}:{port}"
    return addresses.url(scheme, address, port)


def listen(host: str, port: int) -> list[socket.socket]:
    """Bind, with a little patience for a predecessor that is just going."""
    deadline = time.monotonic() + (PORT_WITHIN_S if port else 0.0)
    while True:
        try:
            return _both(port) if host == EVERYWHERE else [_bind(host, port)]
        except OSError as error:
            if time.monotonic() < deadline:
                time.sleep(0.1)
                continue
            raise PortInUse(
                f"the coordinator cannot listen on {addresses.host_port(host, port)}",
                why=error.strerror or str(error),
                do="end the other process, or choose another address with --host and --port",
            ) from error


def _both(port: int) -> list[socket.socket]:
    """Two sockets on one port, so that peers of either family are seen under their own addresses."""
    for attempt in range(1, PAIRS + 1):
        first = _bind(EVERYWHERE_V4, port)
        try:
            return [first, _bind(EVERYWHERE, first.getsockname()[1])]
        except OSError as error:
            if error.errno in _NO_V6:
                return [first]
            first.close()
            # The port that the system picked for one family may be taken in the other.
            if port or error.errno != errno.EADDRINUSE or attempt == PAIRS:
                raise
    raise AssertionError("unreachable")


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener
