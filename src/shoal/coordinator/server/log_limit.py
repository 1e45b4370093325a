"""Limit of the log: the same kind of message is written a few times a minute, however often a client provokes it.

The log of a coordinator is on the disk of its journal. A broken or hostile client must not be able to fill it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

PER_WINDOW = 10
WINDOW_S = 60.0
MAX_KINDS = 1000


class LogLimit(logging.Filter):
    """Passes the first messages of each kind within a minute; the next one after that says how many were left out."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        # Start of the window, messages in it.
        self._kinds: dict[tuple[str, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        now, kind = self._clock(), (record.name, str(record.msg)[:200])
        if kind not in self._kinds and len(self._kinds) >= MAX_KINDS:
            self._kinds.clear()
        began, count = self._kinds.get(kind, (now, 0))
        if now - began >= WINDOW_S:
            if count > PER_WINDOW:
                record.msg = f"{record.msg} ({count - PER_WINDOW} more like this were left out)"
            began, count = now, 0
        self._kinds[kind] = (began, count + 1)
        return count < PER_WINDOW


def limit_logs(*names: str) -> None:
    """Limit what the handlers of the root logger and of these loggers write."""
    limit = LogLimit()
    for logger in (logging.getLogger(), *map(logging.getLogger, names)):
        for handler in logger.handlers:
            handler.addFilter(limit)
