"""Time left: when a run that trains will have done its last step, revised as it goes."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.core.forecast import step_time
from shoal.core.forecast.blocks import BlockLog
from shoal.core.forecast.estimate import COVERAGE, Estimate
from shoal.core.nouns import counted

# Relative error of a step time that was scaled from another number of members.
SCALED_SD = 0.3


@dataclass(frozen=True, slots=True)
class TimeLeft:
    """A forecast: the seconds left with their interval, or why they are unknown.

    `source` says what it comes from, `changed` why it differs from the one before the last change of world.
    """

    seconds: float | None = None
    low_s: float = 0.0
    high_s: float = 0.0
    coverage: float = COVERAGE
    source: str = ""
    unknown: str = ""
    changed: str = ""


@dataclass(frozen=True, slots=True)
class _WorldBefore:
    members: int
    step_s: Estimate


class ProgressForecast:
    """Foretells the time left of one run from what it did so far."""

    def __init__(self) -> None:
        self._log = BlockLog()
        self._world: int | None = None
        self._members = 0
        self._step = 0
        self._stepped_at = 0.0
        self._total_steps: int | None = None
        self._before: _WorldBefore | None = None
        self._said_before: tuple[int, float] | None = None

    def observe(self, at: float, step: int, total_steps: int | None, world: int | None, members: int) -> None:
        """Note the step of a run, its last step if that is known, and the world that trains (its number and size)."""
        if (world, members) != (self._world, self._members):
            self._change_world(at, world, members)
        if step != self._step:
            self._step, self._stepped_at = step, at
        self._total_steps = total_steps
        self._log.observe(at, step)

    def time_left(self, now: float) -> TimeLeft:
        """Return the forecast at this time."""
        if self._total_steps is None:
            return TimeLeft(unknown="the number of steps is not known: the data are a stream without a length")
        steps = max(0, self._total_steps - self._step)
        change = step_time.trend(self._log.blocks)
        if change:
            slower = f"{abs(change):.0%} {'slower' if change > 0 else 'faster'}"
            return TimeLeft(unknown=f"steps have become steadily {slower}, so the rest cannot be foretold")
        estimate, source = self._step_time(steps)
        if estimate is None:
            return TimeLeft(unknown="no step has been measured yet")
        total = estimate.times(steps)
        passed_s = min(now - self._stepped_at, estimate.value)
        low_s, high_s = (max(0.0, bound - passed_s) for bound in total.interval())
        seconds = max(0.0, total.value - passed_s)
        return TimeLeft(seconds, low_s, high_s, source=source, changed=self._why_changed(now + seconds))

    def _step_time(self, steps: int) -> tuple[Estimate | None, str]:
        blocks, before = self._log.blocks, self._before
        if len(blocks) >= step_time.MIN_BLOCKS or (blocks and before is None):
            return step_time.step_time(
                blocks, steps
            ), f"{counted(sum(block.steps for block in blocks), 'step')} of this run"
        if before is None or not before.members or not self._members:
            return None, ""
        scaled = before.step_s.times(before.members / self._members)
        wide = Estimate(scaled.value, SCALED_SD * scaled.value)
        return wide, f"steps with {counted(before.members, 'member')}, scaled to {self._members}"

    def _change_world(self, at: float, world: int | None, members: int) -> None:
        if self._log.blocks:
            left = self.time_left(at)
            if left.seconds is not None:
                self._said_before = (self._members, at + left.seconds)
            self._before = _WorldBefore(self._members, step_time.step_time(self._log.blocks, 1))
        self._log, self._world, self._members = BlockLog(), world, members

    def _why_changed(self, end_at: float) -> str:
        """Return why the run will end at another time than was said before the last change of world."""
        if self._said_before is None or self._said_before[0] == self._members:
            return ""
        members, said_at = self._said_before
        later_s = end_at - said_at
        shift = f"{abs(later_s):.0f} s {'later' if later_s > 0 else 'earlier'}"
        return f"{members} → {counted(self._members, 'member')}: {shift}"
