"""Waiting for a condition in tests: one deadline against hangs, and a message that says what was waited for."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

# Against hangs only, so far above what a loaded machine needs.
TIMEOUT_S = 180.0
POLL_S = 0.02


def until(
    condition: Callable[[], T],
    what: str,
    timeout_s: float = TIMEOUT_S,
    *,
    details: Callable[[], str] = lambda: "",
    poll_s: float = POLL_S,
) -> T:
    """Poll `condition` and return its first true value; raise AssertionError after `timeout_s` seconds.

    The message says `what` was waited for and ends with `details()`, such as the output of a process.
    """
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"timed out after {timeout_s:g} s: {what}\n{details()}".rstrip())
        time.sleep(poll_s)
    return value
