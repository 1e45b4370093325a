"""A connection that says only that we are there, to whoever keeps the ledger, even while we compute for long."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

from shoal.core.world import Seat
from shoal.worker.transport.exchange_broken import ExchangeBroken
from shoal.worker.transport.sockets import alive, disown

LOOK_S = 0.5
AGAIN_S = 0.1


class LivenessConnection:
    """Connected, as soon and as long as it can be, to whoever was named last."""

    def __init__(self, call: Callable[[Seat], socket.socket]) -> None:
        self._call = call
        self._wanted: Seat | None = None
        self._held: tuple[Seat, socket.socket] | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._keep, name="shoal-presence", daemon=True)

    def show(self, seat: Seat | None) -> None:
        """From now on be connected to this member, or to nobody."""
        with self._changed:
            self._wanted = seat
            if not self._thread.is_alive() and not self._closed:
                self._thread.start()
            self._changed.notify_all()

    def close(self) -> None:
        """Be gone; whoever kept count of us hears it."""
        with self._changed:
            self._closed, self._wanted = True, None
            self._changed.notify_all()
            self._leave()

    # --- the thread of the presence

    def _keep(self) -> None:
        while not self._closed:
            with self._changed:
                seat = self._wanted
                if seat is None:
                    self._leave()
                if seat is None or self._is_shown(seat):
                    self._changed.wait(LOOK_S)
                    continue
            if not self._enter(seat):
                with self._changed:
                    if self._wanted == seat:
                        self._changed.wait(AGAIN_S)

    def _is_shown(self, seat: Seat) -> bool:
        held = self._held
        return held is not None and held[0] == seat and alive(held[1])

    def _enter(self, seat: Seat) -> bool:
        """Be connected to this member, and only then to no other."""
        try:
            sock = self._call(seat)
        except ExchangeBroken:
            return False
        with self._changed:
            self._leave()
            self._held = (seat, sock)
            if self._closed:
                self._leave()
        return True

    def _leave(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            disown(held[1])
