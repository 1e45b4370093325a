"""Feed of global batches whose size is chosen while training."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from shoal.core.batch.auto_batch import AutoBatch
from shoal.core.batch.gradient_noise import GradientNoise
from shoal.core.data.sample_order import SampleOrder
from shoal.core.shares.balancer import ShareBalancer
from shoal.core.step_report import StepReport
from shoal.core.world import World
from shoal.worker.data.feed import Adjustment, IndexedFeed, MicroBatch
from shoal.worker.data.share_loader import ShareLoader

# With a batch size to choose, the gradient noise is measured more often: it decides.
LOOK_EVERY = 2
SMOOTH = 0.9


class AutoFeed(IndexedFeed):
    """Global batches of a map-style dataset, of the size that makes most progress per second.

    Everything here is state of the run: every member takes the same decision at the same commit.
    """

    def __init__(
        self, order: SampleOrder, loader: ShareLoader, balancer: ShareBalancer, auto: AutoBatch, noise: GradientNoise
    ) -> None:
        super().__init__(order, loader, balancer)
        self.auto, self._noise = auto, noise
        self._exchange_s = 0.0

    def micro_batches(self, step: int, world: World, rank: int, catching_up: Collection[int]) -> list[MicroBatch]:
        """Return this member's share of a step; a lone member gets two micro-batches now and then, to measure noise."""
        limit, half = self._loader.micro_batch_size, -(-self.global_batch_size(step) // 2)
        if world.size > 1 or step % LOOK_EVERY or (limit is not None and limit <= half):
            return super().micro_batches(step, world, rank, catching_up)
        # The noise is measured by comparing gradients: a single micro-batch has nothing to be compared with.
        self._loader.micro_batch_size = half
        try:
            return super().micro_batches(step, world, rank, catching_up)
        finally:
            self._loader.micro_batch_size = limit

    def on_commit(self, step: int, world: World, reports: Sequence[StepReport]) -> list[Adjustment]:
        """Learn from the reports of a committed step; return changes of the shares and of the batch size."""
        if step and self._order.nominal_size(step) != self._order.nominal_size(step - 1):
            self.balancer.reset_shares()
        adjustments = super().on_commit(step, world, reports)
        waits = [report.wait_s for report in reports if report.measured]
        if waits:
            # The slowest member waits for no other: its wait is the exchange itself.
            smooth = SMOOTH if self._exchange_s else 0.0
            self._exchange_s = smooth * self._exchange_s + (1 - smooth) * min(waits)
        resized = self._choose_size(step, tuple(seat.member for seat in world.seats))
        return adjustments + ([resized] if resized is not None else [])

    def _choose_size(self, step: int, members: tuple[str, ...]) -> Adjustment | None:
        def step_seconds(size: int) -> float:
            return self.balancer.step_seconds(size, members) + self._exchange_s

        steps_left = self._order.total_steps - step - 1
        costs_known = self.balancer.knows_fixed_costs(members)
        left_s = steps_left * step_seconds(self._order.nominal_size(step)) if costs_known else 0.0
        samples = self._order.size_of(step)
        change = self.auto.on_commit(step, samples, self._noise, step_seconds, costs_known=costs_known, left_s=left_s)
        if change is None or change.step >= self._order.total_steps:
            return None
        self._use(self._order.change_size(change.step, change.size))
        return Adjustment(change.step, "batch", {"batch": change.size}, change.reason)

    def _use(self, order: SampleOrder) -> None:
        self._order = self._loader.order = order
        self.total = order.total_steps

    def state_dict(self) -> dict[str, Any]:
        """Return what later decisions depend on, and the sizes chosen so far."""
        size_changes = [list(change) for change in self._order.size_changes]
        return {"auto": self.auto.state_dict(), "size_changes": size_changes, "exchange_s": self._exchange_s}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the sizes and measurements of another member."""
        self.auto.load_state_dict(state["auto"])
        self._exchange_s = state["exchange_s"]
        self._use(replace(self._order, size_changes=tuple((step, size) for step, size in state["size_changes"])))
