"""An event loop that does not get up for each of very many.

With two thousand connections something comes every third of a millisecond, and to wake up for it takes longer than to
deal with it. So a loop that has many connections looks a little later, and finds several things to do at once. Nobody
notices four milliseconds in a world of hundreds; with few connections everything is dealt with as it comes.
"""

from __future__ import annotations

import asyncio
import selectors
import time

MANY = 256
LATER_S = 0.004


class PatientSelector(selectors.DefaultSelector):
    """Looks at once while there are few connections, and else a moment later."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if len(self.get_map()) > MANY and (timeout is None or timeout > LATER_S):
            time.sleep(LATER_S)
            timeout = None if timeout is None else timeout - LATER_S
        return super().select(timeout)


def new_loop() -> asyncio.AbstractEventLoop:
    """The loop that a coordinator runs in."""
    return asyncio.SelectorEventLoop(PatientSelector())
