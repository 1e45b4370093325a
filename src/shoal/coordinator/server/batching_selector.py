"""An event loop that does not get up for each of very many.

With two thousand connections something comes every third of a millisecond, and to wake up for it takes longer than to
deal with it. So a loop that has many connections looks a little later, and finds several things to do at once. Nobody
notices a millisecond in a world of a hundred, nor ten in one of a thousand; with few connections everything is dealt
with as it comes.
"""

from __future__ import annotations

import asyncio
import selectors
import time

MANY = 256
LATER_S = 5e-6


class BatchingSelector(selectors.DefaultSelector):
    """Looks at once while there are few connections, and else a moment later."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        many = len(self.get_map())
        if many > MANY and (timeout is None or timeout > many * LATER_S):
            time.sleep(many * LATER_S)
            timeout = None if timeout is None else timeout - many * LATER_S
        return super().select(timeout)


def new_loop() -> asyncio.AbstractEventLoop:
    """The loop that a coordinator runs in."""
    return asyncio.SelectorEventLoop(BatchingSelector())
