"""Where the time of a member's steps goes, and the figures of the run that its beats carry."""

from __future__ import annotations

from math import isfinite
from typing import Any

from shoal.core.batch.gradient_noise import GradientNoise
from shoal.core.shares.balancer import ShareBalancer
from shoal.core.step_report import StepReport
from shoal.wire.member_messages import StepTimes
from shoal.worker.training.step import Step

KEPT = 0.9
LOOK_S = 0.5
MANY = 8
# The pulses of the first step of a process tell of none, those of the second of one in which all is set up.
SETTING_UP = 2


class StepTimer:
    """Measures committed steps in the main thread; beats only read what it holds."""

    def __init__(self, noise: GradientNoise) -> None:
        self._committed_at_s = 0.0
        self._usual_step_s = 0.0
        self._samples_per_s = 0.0
        self._spent = StepTimes()
        self._noise_of = noise
        self._noise: float | None = None
        self._idle: tuple[float | None, float] | None = None
        self._batch = self._nominal = 0
        self.commits = 0
        self._looked_at_s = 0.0
        self._usual = _TypicalStep()

    def commit(self, turn: Step, rank: int, balance: ShareBalancer, now_s: float) -> None:
        """A step was committed; its pulses tell where the time of the one before went."""
        if self.commits:
            self._count(turn, now_s - self._committed_at_s)
        # With many members not in every step: the pulses of all would take longer to look at than they are worth.
        if self.commits >= SETTING_UP and self.commits % (1 + turn.world.size // MANY) == 0:
            self._usual.add(turn.everybody, rank)
        self.commits += 1
        self._committed_at_s = now_s
        # The last batch of an epoch may be short, and is no change of the batch.
        self._batch, self._nominal = max(turn.nominal, self._nominal), turn.nominal
        if now_s - self._looked_at_s >= LOOK_S:
            self._looked_at_s = now_s
            self._look(turn.world.size, balance)

    def status(self) -> dict[str, Any]:
        """The fields of a beat."""
        return {
            "usual_step_s": self._usual_step_s,
            "samples_per_s": self._samples_per_s,
            "spent": self._spent,
            "batch": self._batch,
            "noise": self._noise,
            "idle": self._idle,
        }

    def _count(self, turn: Step, took_s: float) -> None:
        kept = KEPT if self._usual_step_s else 0.0
        self._usual_step_s = kept * self._usual_step_s + (1 - kept) * took_s
        rate = sum(p.samples for p in turn.everybody) / max(took_s, 1e-9)
        self._samples_per_s = kept * self._samples_per_s + (1 - kept) * rate

    def _look(self, members: int, balance: ShareBalancer) -> None:
        """What costs more than a few sums is looked at as often as beats are sent."""
        self._spent = self._usual.spent()
        scale = self._noise_of.scale
        self._noise = scale if scale is not None and isfinite(scale) else None
        figures = balance.stats()
        if members == 1:
            self._idle = None
        elif figures.sample_s:
            self._idle = (figures.idle_if_equal, figures.idle)
        elif self._usual.slowest_s > 0:
            # Shares that never change are not modelled: what is measured has to do.
            idle = 1 - self._usual.busy_s / self._usual.slowest_s
            self._idle = (idle if balance.settings.policy == "equal" else None, idle)


class _TypicalStep:
    """The seconds of a usual step: this member's, the mean member's and the slowest one's."""

    __slots__ = ("busy_s", "compute_s", "data_s", "exchange_s", "slowest_s", "wait_s")

    def __init__(self) -> None:
        self.data_s = self.compute_s = self.wait_s = self.exchange_s = 0.0
        self.busy_s = self.slowest_s = 0.0

    def add(self, everybody: tuple[StepReport, ...], rank: int) -> None:
        mine, slowest_s, busy_s = everybody[rank], 0.0, 0.0
        for one in everybody:
            own_s = one.data_s + one.compute_s
            busy_s += own_s
            slowest_s = max(slowest_s, own_s)
        # All begin a step together, so what the slowest works longer is waited for; the rest of the waiting exchanges.
        wait_s = min(mine.wait_s, slowest_s - mine.data_s - mine.compute_s)
        kept = KEPT if self.slowest_s else 0.0
        new = 1 - kept
        self.data_s = kept * self.data_s + new * mine.data_s
        self.compute_s = kept * self.compute_s + new * mine.compute_s
        self.wait_s = kept * self.wait_s + new * wait_s
        self.exchange_s = kept * self.exchange_s + new * (mine.wait_s - wait_s)
        self.busy_s = kept * self.busy_s + new * busy_s / len(everybody)
        self.slowest_s = kept * self.slowest_s + new * slowest_s

    def spent(self) -> StepTimes:
        return StepTimes(self.data_s, self.compute_s, self.wait_s, self.exchange_s)
