"""Listening sockets of the coordinator, and the URLs at which it may be reached."""

from __future__ import annotations

import errno
import socket
import time
from dataclasses import dataclass

from shoal.core import addresses
from shoal.errors import PortInUse
from shoal.wire import interfaces

PORT_RETRY_S = 3.0
LOOPBACK = "127.0.0.1"
EVERYWHERE = "::"
EVERYWHERE_V4 = "0.0.0.0"
BACKLOG = 512
PORT_ATTEMPTS = 20
_NO_V6 = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.EPROTONOSUPPORT)


@dataclass(frozen=True, slots=True)
class Urls:
    """`local` is for processes on this machine; `remote` are those that other machines try, in this order."""

    local: str
    remote: tuple[str, ...]


def urls(host: str, port: int, secure: bool, named: tuple[str, ...] = ()) -> Urls:
    """Return the URLs of a coordinator that listens on `host`.

    `named` are addresses, with or without a port, that other machines should try first.
    """
    scheme = "https" if secure else "http"
    given = tuple(_with_port(scheme, address, port) for address in named)
    if host not in (EVERYWHERE, EVERYWHERE_V4):
        local = addresses.url(scheme, host, port)
        return Urls(local, tuple(dict.fromkeys((*given, local))))
    candidates = addresses.candidates(interfaces.active_interfaces(), interfaces.default_addresses())
    hosts = [name for name in (*candidates, *interfaces.shareable_names()) if host == EVERYWHERE or ":" not in name]
    local = addresses.url(scheme, LOOPBACK, port)
    remote = (*given, *(addresses.url(scheme, name, port) for name in hosts))
    return Urls(local, tuple(dict.fromkeys(remote)) or (local,))


def _with_port(scheme: str, address: str, port: int) -> str:
    if "://" in address:
        return address.rstrip("/")
    host, colon, given = address.rpartition(":")
    if address.startswith("[") or (colon and ":" not in host and given.isdecimal()):
        return f"{scheme}://{address}" if not address.endswith("]") else f"{scheme}://{address}:{port}"
    return addresses.url(scheme, address, port)


def listen(host: str, port: int) -> list[socket.socket]:
    """Return listening sockets; retry a given port for three seconds, while a predecessor may still be closing it."""
    deadline = time.monotonic() + (PORT_RETRY_S if port else 0.0)
    while True:
        try:
            return _bind_both(port) if host == EVERYWHERE else [_bind(host, port)]
        except OSError as error:
            if time.monotonic() < deadline:
                time.sleep(0.1)
                continue
            raise PortInUse(
                f"cannot listen on {addresses.host_port(host, port)}",
                why=error.strerror or str(error),
                do="stop the other process, or choose another address with --host and --port",
            ) from error


def _bind_both(port: int) -> list[socket.socket]:
    """Return an IPv4 and an IPv6 socket on one port, so that peers of either family have their own addresses."""
    for attempt in range(1, PORT_ATTEMPTS + 1):
        first = _bind(EVERYWHERE_V4, port)
        try:
            return [first, _bind(EVERYWHERE, first.getsockname()[1])]
        except OSError as error:
            if error.errno in _NO_V6:
                return [first]
            first.close()
            # The port that the system chose for IPv4 may be taken for IPv6.
            if port or error.errno != errno.EADDRINUSE or attempt == PORT_ATTEMPTS:
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
