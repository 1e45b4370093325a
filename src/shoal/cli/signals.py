"""Signals as a count that a loop looks at, and that wakes it from its sleep."""

from __future__ import annotations

import os
import select
import signal
from types import FrameType

CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class SignalCounter:
    """Counts Ctrl-C, SIGTERM and SIGHUP while it is open; to be used in the main thread."""

    def __init__(self) -> None:
        self.count = 0
        self.last: signal.Signals | None = None
        self._before: dict[int, object] = {}
        self._reader, self._writer = -1, -1

    def __enter__(self) -> SignalCounter:
        self._reader, self._writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        for number in CAUGHT:
            self._before[number] = signal.signal(number, self._caught)
        return self

    def __exit__(self, *raised: object) -> None:
        del raised
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        os.close(self._reader)
        os.close(self._writer)

    @property
    def name(self) -> str:
        """The last signal, as users call it."""
        return "Ctrl-C" if self.last in (None, signal.SIGINT) else str(self.last.name if self.last else "")

    def sleep(self, seconds: float) -> None:
        """Sleep, but not past a signal."""
        ready, _, _ = select.select([self._reader], [], [], seconds)
        if ready:
            os.read(self._reader, 4096)

    def _caught(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.count += 1
        self.last = signal.Signals(number)
        try:
            os.write(self._writer, b"!")
        except BlockingIOError:
            return
