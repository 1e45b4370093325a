"""Measurement window: the steps that are measured before shares may change.

The first windows have 2, 4 and 8 steps, because early corrections gain most; later ones have `shares.window` steps,
because small corrections need certainty. Steps count if they were computed with the shares in force; after four times
as many steps of any kind (short batches, probes) the window is closed all the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.core.shares.settings import ShareSettings

FIRST_WINDOWS = (2, 4, 8)
SETTLED = len(FIRST_WINDOWS)
MAX_WAIT_FACTOR = 4


@dataclass(slots=True)
class MeasurementWindow:
    """Progress of the current window: `number` windows were closed before; `matched` and `waited` count steps."""

    number: int = 0
    matched: int = 0
    waited: int = 0

    @property
    def settled(self) -> bool:
        """Whether the first windows are over."""
        return self.number >= SETTLED

    def count(self, *, matched: bool) -> None:
        """Count a step; `matched` means that it was computed with the shares in force."""
        self.matched += matched
        self.waited += 1

    def restart(self) -> None:
        """Start the current window again."""
        self.matched = self.waited = 0

    def close(self) -> None:
        """Go on to the next window."""
        self.number += 1
        self.restart()

    def is_full(self, settings: ShareSettings, first_windows: tuple[int, ...], *, epoch_started: bool) -> bool:
        """Return whether enough steps were measured; in mode `epoch`, once settled, whether an epoch started."""
        if settings.mode == "epoch" and self.settled:
            return epoch_started
        steps = settings.window if self.settled else first_windows[self.number]
        return self.matched >= steps or self.waited >= MAX_WAIT_FACTOR * steps
