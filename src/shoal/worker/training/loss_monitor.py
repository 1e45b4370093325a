"""Monitor of the loss: says at once, with a code, when it is no longer a finite number.

NaN and infinity have no place in JSON, so the loss vanishes from the status of a run that computes them, and the run
ends as if all were well. The warning goes to standard error and, as an adjustment, into the story and the summary.
"""

from __future__ import annotations

import math
import sys
from typing import Protocol

from shoal.errors import LossNotFinite


class AdjustmentReporter(Protocol):
    """The part of a session that takes reports."""

    def report_adjustment(
        self, step: int, what: str, values: dict[str, int], reason: str, *, send: bool = True
    ) -> None: ...


class LossMonitor:
    """Warns in the first step whose loss is not finite, and again only after it was finite in between, a few times."""

    MOST_WARNINGS = 3

    def __init__(self, session: AdjustmentReporter) -> None:
        self._session = session
        self._finite = True
        self._warnings = 0

    def observe(self, step: int, loss: float | None, *, send: bool = True) -> None:
        """Check the loss of a step; `send` says whether this member prints and reports what it finds."""
        if loss is None:
            return
        was_finite, self._finite = self._finite, math.isfinite(loss)
        if self._finite or not was_finite or self._warnings == self.MOST_WARNINGS:
            return
        self._warnings += 1
        warning = LossNotFinite(
            f"the loss of step {step} is {loss}",
            why="the learning rate is too high, or a logarithm, root or division met a value outside its domain",
            do="stop the run, and resume from a checkpoint before this step with a lower rate or clipped gradients",
        )
        if send:
            sys.stderr.write(f"{warning.as_warning()}\n")
        reason = f"{warning.what} [{warning.code}]"
        self._session.report_adjustment(step, "loss", {}, reason, send=send)
