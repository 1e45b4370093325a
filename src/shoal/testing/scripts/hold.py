"""Hold on a script under test: it runs slowly, and does not finish, until its test lets it."""

from __future__ import annotations

import time
from pathlib import Path

HOLD = "hold"
HELD_S = 1.0
POLL_S = 0.02


def is_held(records: Path) -> bool:
    """Return whether the test that reads these records holds its run."""
    return (records / HOLD).exists()


def pause_while_held(records: Path, step: int, of: int) -> None:
    """Pause for up to a second in each step of the second half, while the run is held; `of` is the number of steps.

    So a test has time to act on however slow a machine, and worlds can still change meanwhile.
    """
    until = time.monotonic() + HELD_S if 2 * step >= of else 0.0
    while time.monotonic() < until and is_held(records):
        time.sleep(POLL_S)
