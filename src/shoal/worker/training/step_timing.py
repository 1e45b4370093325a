"""Timing of committed steps: where their time goes, and the figures that heartbeats carry to `shoal status`."""

from __future__ import annotations

from math import isfinite
from typing import Any

from shoal.core.batch.gradient_noise import GradientNoise
from shoal.core.shares.balancer import ShareBalancer
from shoal.core.step_report import StepReport
from shoal.wire.member_messages import StepTimes
from shoal.worker.training.step import Step

# Weight of the past in the moving averages.
SMOOTHING = 0.9
REFRESH_S = 0.5
LARGE_WORLD = 8
# Reports describe the step before: those of a process's first step are empty, those of its second measure set-up.
WARM_UP_STEPS = 2


class StepTimer:
    """Moving averages over committed steps, updated by the main thread; the heartbeat thread only reads them."""

    def __init__(self, noise: GradientNoise) -> None:
        self._committed_at_s = 0.0
        self._usual_step_s = 0.0
        self._samples_per_s = 0.0
        self._spent = StepTimes()
        self._gradient_noise = noise
        self._noise: float | None = None
        self._idle: tuple[float | None, float] | None = None
        self._batch = self._last_batch = 0
        self.commits = 0
        self._refreshed_at_s = 0.0
        self._typical = _TypicalStep()

    def commit(self, current: Step, rank: int, balance: ShareBalancer, now_s: float) -> None:
        """Record a committed step; its reports hold the times of the step before."""
        if self.commits:
            self._count(current, now_s - self._committed_at_s)
        # Sampled in large worlds: to read every member's report in every step would cost more than it tells.
        if self.commits >= WARM_UP_STEPS and self.commits % (1 + current.world.size // LARGE_WORLD) == 0:
            self._typical.add(current.reports, rank)
        self.commits += 1
        self._committed_at_s = now_s
        # The last batch of an epoch may be short without the batch size having changed.
        self._batch = max(current.global_batch_size, self._last_batch)
        self._last_batch = current.global_batch_size
        if now_s - self._refreshed_at_s >= REFRESH_S:
            self._refreshed_at_s = now_s
            self._refresh(current.world.size, balance)

    def status(self) -> dict[str, Any]:
        """Return the timing fields of a heartbeat."""
        return {
            "usual_step_s": self._usual_step_s,
            "samples_per_s": self._samples_per_s,
            "spent": self._spent,
            "batch": self._batch,
            "noise": self._noise,
            "idle": self._idle,
        }

    def _count(self, current: Step, took_s: float) -> None:
        kept = SMOOTHING if self._usual_step_s else 0.0
        self._usual_step_s = kept * self._usual_step_s + (1 - kept) * took_s
        rate = sum(report.samples for report in current.reports) / max(took_s, 1e-9)
        self._samples_per_s = kept * self._samples_per_s + (1 - kept) * rate

    def _refresh(self, members: int, balance: ShareBalancer) -> None:
        """Update the figures that are too expensive for every step, about as often as heartbeats are sent."""
        self._spent = self._typical.spent()
        scale = self._gradient_noise.scale
        self._noise = scale if scale is not None and isfinite(scale) else None
        stats = balance.stats()
        if members == 1:
            self._idle = None
        elif stats.sample_s:
            self._idle = (stats.idle_if_equal, stats.idle)
        elif self._typical.slowest_s > 0:
            # Fixed shares have no cost model, so only the measured idle time is known.
            idle = 1 - self._typical.busy_s / self._typical.slowest_s
            self._idle = (idle if balance.settings.policy == "equal" else None, idle)


class _TypicalStep:
    """Moving averages of one step's seconds: this member's own, the mean member's and the slowest member's."""

    __slots__ = ("busy_s", "compute_s", "data_s", "exchange_s", "slowest_s", "wait_s")

    def __init__(self) -> None:
        self.data_s = self.compute_s = self.wait_s = self.exchange_s = 0.0
        self.busy_s = self.slowest_s = 0.0

    def add(self, reports: tuple[StepReport, ...], rank: int) -> None:
        own, slowest_s, busy_s = reports[rank], 0.0, 0.0
        for report in reports:
            work_s = report.data_s + report.compute_s
            busy_s += work_s
            slowest_s = max(slowest_s, work_s)
        # All members begin a step together: what the slowest works longer is waiting, the rest of `wait_s` exchanging.
        wait_s = min(own.wait_s, slowest_s - own.data_s - own.compute_s)
        kept = SMOOTHING if self.slowest_s else 0.0
        new = 1 - kept
        self.data_s = kept * self.data_s + new * own.data_s
        self.compute_s = kept * self.compute_s + new * own.compute_s
        self.wait_s = kept * self.wait_s + new * wait_s
        self.exchange_s = kept * self.exchange_s + new * (own.wait_s - wait_s)
        self.busy_s = kept * self.busy_s + new * busy_s / len(reports)
        self.slowest_s = kept * self.slowest_s + new * slowest_s

    def spent(self) -> StepTimes:
        return StepTimes(self.data_s, self.compute_s, self.wait_s, self.exchange_s)
