"""Limits of connections: clients without a token cannot use up the coordinator's descriptors, memory or log.

A connection costs a descriptor and, with TLS, tens of kilobytes before its client has proven anything. It is *pending*
from the moment it is accepted until a request on it has shown a valid token. Whatever the client does meanwhile (no
byte, half a handshake, half a request, wrong tokens), three limits hold:

- a pending connection is closed after `PENDING_S` seconds;
- at most `max_pending` are open: one more closes the oldest, so that a flood of silent connections delays no client
  that speaks at once;
- all connections together leave `RESERVED_FILES` descriptors for the journal, logs and uploads. Beyond that, or when
  the system has none left, a new connection is accepted and closed at once: in the queue of the kernel it would wake
  the event loop again and again.

A summary of what was closed is logged, at most once a minute.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import socket
import time
from collections.abc import Callable
from typing import Any

log = logging.getLogger("shoal.coordinator")

PENDING_S = 10.0
MAX_PENDING = 1024
RESERVED_FILES = 64
LOG_EVERY_S = 60.0
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

Client = tuple[str, int]


class ConnectionLimit:
    """Counts the connections of one coordinator and closes those beyond the limits."""

    def __init__(self, max_files: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if max_files is None else max_files
        self.max_open = max(1, files - RESERVED_FILES)
        self.max_pending = max(1, min(MAX_PENDING, self.max_open // 4))
        self._clock = clock
        self._open = 0
        # By age: the oldest first.
        self._pending: dict[Client, tuple[float, socket.socket]] = {}
        self._closed = {"without a valid token in time": 0, "at the limit of connections": 0}
        self._logged_at = -LOG_EVERY_S

    @property
    def pending(self) -> int:
        return len(self._pending)

    def admit(self, client: Client) -> None:
        """Note that a client has shown a valid token."""
        self._pending.pop(client, None)

    def may_open(self) -> bool:
        """Return whether there is room for one more connection."""
        return self._open < self.max_open

    def opened(self, client: Client, accepted: AcceptedSocket) -> None:
        """Count a new connection; if too many are pending, close the oldest."""
        self._open += 1
        accepted.on_close = lambda: self._on_close(client)
        self._pending[client] = (self._clock(), accepted)
        if len(self._pending) > self.max_pending:
            self._close_pending(next(iter(self._pending)))

    def refused(self) -> None:
        """Count a connection that was closed at once."""
        self._count("at the limit of connections")

    def close_late(self, _now: float) -> None:
        """Close connections that are pending for too long; called on every tick."""
        while self._pending:
            client, (opened_at, _) = next(iter(self._pending.items()))
            if self._clock() - opened_at <= PENDING_S:
                return
            self._close_pending(client)

    def _close_pending(self, client: Client) -> None:
        _, accepted = self._pending.pop(client)
        self._count("without a valid token in time")
        # The event loop owns the descriptor; it reads the end of the connection and closes it.
        with contextlib.suppress(OSError):
            accepted.shutdown(socket.SHUT_RDWR)

    def _on_close(self, client: Client) -> None:
        self._open -= 1
        self._pending.pop(client, None)

    def _count(self, why: str) -> None:
        self._closed[why] += 1
        if self._clock() - self._logged_at >= LOG_EVERY_S:
            self._logged_at = self._clock()
            closed = ", ".join(f"{number} {why}" for why, number in self._closed.items() if number)
            log.warning("connections closed since the start: %s", closed)


class AcceptedSocket(socket.socket):
    """A connection that says when it is closed."""

    on_close: Callable[[], None] | None = None

    def close(self) -> None:
        super().close()
        on_close, self.on_close = self.on_close, None
        if on_close is not None:
            on_close()


class LimitedListener(socket.socket):
    """A listening socket that accepts what its limit allows; `take_over` makes one of a plain socket."""

    limit: ConnectionLimit
    _spare: int | None = None

    @classmethod
    def take_over(cls, listener: socket.socket, limit: ConnectionLimit) -> LimitedListener:
        """Return a limited listener in place of a plain one, which must not be used any more."""
        limited = cls(listener.family, listener.type, listener.proto, listener.detach())
        limited.setblocking(False)
        limited.limit = limit
        limited._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        return limited

    def accept(self) -> tuple[socket.socket, Any]:
        """Return the next connection within the limits; raise BlockingIOError if there is none."""
        while True:
            try:
                plain, address = super().accept()
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    raise
                self._refuse_with_spare()
                continue
            if not self.limit.may_open():
                plain.close()
                self.limit.refused()
                continue
            accepted = AcceptedSocket(plain.family, plain.type, plain.proto, plain.detach())
            self.limit.opened((str(address[0]), int(address[1])), accepted)
            return accepted, address

    def _refuse_with_spare(self) -> None:
        """Close one waiting connection, with a descriptor that is kept for this; raise BlockingIOError without one."""
        if self._spare is None:
            with contextlib.suppress(OSError):
                self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
            raise BlockingIOError(errno.EAGAIN, "no descriptor is left")
        os.close(self._spare)
        self._spare = None
        try:
            super().accept()[0].close()
            self.limit.refused()
        finally:
            with contextlib.suppress(OSError):
                self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        super().close()
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None
