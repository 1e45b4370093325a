"""The pace of a script under test: slow enough to be hurt, and not at its end before the test is done with it."""

from __future__ import annotations

import time
from pathlib import Path

HOLD = "hold"
HELD_S = 1.0
LOOK_S = 0.02


def is_held(records: Path) -> bool:
    """Whether the test that reads these records holds its run back."""
    return (records / HOLD).exists()


def tarry(records: Path, step: int, of: int) -> None:
    """Stay with a step of so many, in the second half, for as long as the run is held back; a second at most.

    So a test has time for what it wants to do, on however slow a machine, and worlds change all the same.
    """
    until = time.monotonic() + HELD_S if 2 * step >= of else 0.0
    while time.monotonic() < until and is_held(records):
        time.sleep(LOOK_S)
