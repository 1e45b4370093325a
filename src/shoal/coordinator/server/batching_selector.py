"""Event loop that batches wake-ups when there are many connections.

With two thousand connections something arrives every third of a millisecond, and waking up for it takes longer than
handling it. So a loop with many connections polls a little later and finds several things to do at once. The delay is
about a millisecond with a hundred members and ten with a thousand, which no lease notices; with few connections there
is none.
"""

from __future__ import annotations

import asyncio
import selectors
import time

MANY = 256
DELAY_S_PER_CONNECTION = 5e-6


class BatchingSelector(selectors.DefaultSelector):
    """Polls at once while there are few connections, and otherwise after a short delay."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        connections = len(self.get_map())
        delay_s = connections * DELAY_S_PER_CONNECTION
        if connections > MANY and (timeout is None or timeout > delay_s):
            time.sleep(delay_s)
            timeout = None if timeout is None else timeout - delay_s
        return super().select(timeout)


def new_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop that a coordinator runs in."""
    return asyncio.SelectorEventLoop(BatchingSelector())
