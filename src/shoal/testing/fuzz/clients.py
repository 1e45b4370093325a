"""Clients without threads: a WebSocket and a pipeline of HTTP requests on a plain socket, whose replies come later.

A reply costs its round trip only if a client waits for it. So a connection is written to its end at once, kept open
beside many others, and read when its turn comes; by then the coordinator has answered and closed it.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import struct
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

CHUNK_BYTES = 1 << 16
CLOSE_FRAME = b"\x88\x82\0\0\0\0\x03\xe8"


@dataclass(frozen=True, slots=True)
class Coordinator:
    """Where a coordinator listens, and the TLS context for it."""

    url: str
    context: ssl.SSLContext | None

    def connect(self, timeout_s: float) -> socket.socket:
        place = urlsplit(self.url)
        sock = socket.create_connection((place.hostname or "", place.port or 0), timeout_s)
        return sock if self.context is None else self.context.wrap_socket(sock, server_hostname=place.hostname)

    @property
    def host(self) -> str:
        return urlsplit(self.url).netloc


def request(method: str, path: str, host: str, token: str | None, body: bytes, last: bool) -> bytes:
    """Return one request; after the last one the server closes the connection."""
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", f"Content-Length: {len(body)}"]
    lines += [f"Authorization: Bearer {token}"] if token is not None else []
    lines += ["Connection: close"] if last else []
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def upgrade(path: str, host: str, token: str) -> bytes:
    """Return the request that opens a WebSocket."""
    return (
        f"GET {path} HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {token}\r\nConnection: Upgrade\r\n"
        "Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
    ).encode()


def frame(payload: bytes, kind: int = 0x82) -> bytes:
    """Return a frame of a client; its mask of zeros leaves the payload as it is."""
    size = len(payload)
    if size < 126:
        return bytes((kind, 0x80 | size)) + bytes(4) + payload
    head = bytes((kind, 0xFE)) + struct.pack("!H", size) if size < 1 << 16 else b""
    return (head or bytes((kind, 0xFF)) + struct.pack("!Q", size)) + bytes(4) + payload


class OpenConnections:
    """Connections that the other side is going to close; at most `most` are open, and none for more than `limit_s`."""

    def __init__(self, most: int, limit_s: float) -> None:
        self._most, self._limit_s = most, limit_s
        self._open: list[tuple[str, float, socket.socket]] = []

    def add(self, kind: str, sock: socket.socket) -> list[str]:
        """Keep a connection to which all is written; return the kinds of those that were not closed in time."""
        sock.setblocking(False)
        self._open.append((kind, time.monotonic() + self._limit_s, sock))
        return self._reduce(self._most)

    def drain(self) -> list[str]:
        """Read every connection to its end; return the kinds of those that were not closed in time."""
        return self._reduce(0)

    def _reduce(self, most: int) -> list[str]:
        late = []
        while len(self._open) > most:
            self._open = [entry for entry in self._open if not _has_ended(entry[2])]
            late += [kind for kind, deadline, _ in self._open if deadline < time.monotonic()]
            self._open = [entry for entry in self._open if entry[1] >= time.monotonic()]
            if len(self._open) > most:
                select.select([sock for _, _, sock in self._open], (), (), 1.0)
        return late

    def close(self) -> None:
        for _, _, sock in self._open:
            with contextlib.suppress(OSError):
                sock.close()


def _has_ended(sock: socket.socket) -> bool:
    """Read what has arrived; close the connection and return True if that was its end."""
    try:
        while sock.recv(CHUNK_BYTES):
            pass
    except (BlockingIOError, ssl.SSLWantReadError):
        return False
    except OSError:
        pass  # reset by the peer: closed as well
    sock.close()
    return True
