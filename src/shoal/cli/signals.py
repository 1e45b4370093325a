"""Signals as a counter that a polling loop reads, and that wakes the loop from its sleep.

A signal handler may run between any two bytecodes, so it must not stop a run itself: it counts, and writes one byte to
a pipe. The loop sleeps in `select` on that pipe, so it reacts at once, at a place of its own choosing.

A signal that the parent told us to ignore stays ignored: `nohup` ignores SIGHUP, a shell without job control SIGINT for
what it starts with `&`. Signals within `ONE_REQUEST_S` of a counted one are the same request: `timeout` signals its
child and then the whole group, and a terminal that closes sends SIGHUP while the shell sends it too.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable
from types import FrameType

CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ONE_REQUEST_S = 1.0


class SignalCounter:
    """Counts Ctrl-C, SIGTERM and SIGHUP while it is open; for use in the main thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.count = 0
        self.last: signal.Signals | None = None
        self._clock = clock
        self._counted_at = float("-inf")
        self._previous: dict[int, object] = {}
        self._reader, self._writer = -1, -1

    def __enter__(self) -> SignalCounter:
        self._reader, self._writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        for number in CAUGHT:
            if number == signal.SIGTERM or signal.getsignal(number) != signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *raised: object) -> None:
        del raised
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        os.close(self._reader)
        os.close(self._writer)

    @property
    def name(self) -> str:
        """The last signal, as users call it."""
        return "Ctrl-C" if self.last in (None, signal.SIGINT) else str(self.last.name if self.last else "")

    def sleep(self, seconds: float) -> None:
        """Sleep until the time is over or a signal arrives."""
        ready, _, _ = select.select([self._reader], [], [], seconds)
        if ready:
            os.read(self._reader, 4096)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        now = self._clock()
        if now - self._counted_at < ONE_REQUEST_S:
            return
        self._counted_at = now
        self.count += 1
        self.last = signal.Signals(number)
        try:
            os.write(self._writer, b"!")
        except BlockingIOError:
            return
