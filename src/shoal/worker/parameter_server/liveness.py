"""Liveness connection: shows the ledger server that this trainer is alive during long computations."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

from shoal.core.world import Seat
from shoal.worker.transport.exchange_broken import ExchangeBroken
from shoal.worker.transport.sockets import alive, disown

CHECK_S = 0.5
RETRY_S = 0.1


class LivenessConnection:
    """Idle connection to the server that was named last; a thread of its own reopens it when it breaks."""

    def __init__(self, connect: Callable[[Seat], socket.socket]) -> None:
        self._connect = connect
        self._wanted: Seat | None = None
        self._open: tuple[Seat, socket.socket] | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._maintain, name="shoal-liveness", daemon=True)

    def connect_to(self, seat: Seat | None) -> None:
        """Stay connected to this member from now on, or to none."""
        with self._changed:
            self._wanted = seat
            if not self._thread.is_alive() and not self._closed:
                self._thread.start()
            self._changed.notify_all()

    def close(self) -> None:
        """Close the connection for good; the server sees that this trainer has left."""
        with self._changed:
            self._closed, self._wanted = True, None
            self._changed.notify_all()
            self._disconnect()

    # --- the connection's thread

    def _maintain(self) -> None:
        while not self._closed:
            with self._changed:
                seat = self._wanted
                if seat is None:
                    self._disconnect()
                if seat is None or self._is_connected_to(seat):
                    self._changed.wait(CHECK_S)
                    continue
            if not self._try_connect(seat):
                with self._changed:
                    if self._wanted == seat:
                        self._changed.wait(RETRY_S)

    def _is_connected_to(self, seat: Seat) -> bool:
        return self._open is not None and self._open[0] == seat and alive(self._open[1])

    def _try_connect(self, seat: Seat) -> bool:
        """Connect to this member and only then close the old connection; return whether it worked."""
        try:
            sock = self._connect(seat)
        except ExchangeBroken:
            return False
        with self._changed:
            self._disconnect()
            self._open = (seat, sock)
            if self._closed:
                self._disconnect()
        return True

    def _disconnect(self) -> None:
        connection, self._open = self._open, None
        if connection is not None:
            disown(connection[1])
