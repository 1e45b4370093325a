"""Global batches whose size is chosen while training."""

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

# With a batch to choose, the noise is looked at more often: it decides.
LOOK_EVERY = 2
SMOOTH = 0.9


class AutoFeed(IndexedFeed):
    """Global batches of a map-style dataset, of the size that makes most progress per second.

    All of it is state of the run: every member finds the same decision at the same commit.
    """

    def __init__(
        self, order: SampleOrder, loader: ShareLoader, balance: ShareBalancer, auto: AutoBatch, noise: GradientNoise
    ) -> None:
        super().__init__(order, loader, balance)
        self.auto, self._noise = auto, noise
        self._exchange_s = 0.0

    def micro_batches(self, step: int, world: World, rank: int, ghosts: Collection[int]) -> list[MicroBatch]:
        if world.size > 1 or step % LOOK_EVERY or self._loader.micro_batch_size is not None:
            return super().micro_batches(step, world, rank, ghosts)
        # Alone, and with the batch in one piece, there would be nothing to compare.
        self._loader.micro_batch_size = -(-self.global_batch_size(step) // 2)
        try:
            return super().micro_batches(step, world, rank, ghosts)
        finally:
            self._loader.micro_batch_size = None

    def on_commit(self, step: int, world: World, everybody: Sequence[StepReport]) -> list[Adjustment]:
        if step and self._order.nominal_size(step) != self._order.nominal_size(step - 1):
            self.balancer.reset_shares()
        decisions = super().on_commit(step, world, everybody)
        waits = [pulse.wait_s for pulse in everybody if pulse.measured]
        if waits:
            # Whoever is last waits for nobody: what it waits for is the exchange itself.
            smooth = SMOOTH if self._exchange_s else 0.0
            self._exchange_s = smooth * self._exchange_s + (1 - smooth) * min(waits)
        decided = self._choose(step, tuple(seat.member for seat in world.seats))
        return decisions + ([decided] if decided is not None else [])

    def _choose(self, step: int, members: tuple[str, ...]) -> Adjustment | None:
        def step_seconds(size: int) -> float:
            return self.balancer.step_seconds(size, members) + self._exchange_s

        left = self._order.total_steps - step - 1
        sure = self.balancer.knows_fixed_costs(members)
        left_s = left * step_seconds(self._order.nominal_size(step)) if sure else 0.0
        found = self.auto.on_commit(step, self._noise, step_seconds, costs_known=sure, left_s=left_s)
        if found is None or found.step >= self._order.total_steps:
            return None
        self._use(self._order.change_size(found.step, found.size))
        return Adjustment(found.step, "batch", {"batch": found.size}, found.reason)

    def _use(self, order: SampleOrder) -> None:
        self._order = self._loader.order = order
        self.total = order.total_steps

    def state_dict(self) -> dict[str, Any]:
        decisions = [list(decision) for decision in self._order.size_changes]
        return {"auto": self.auto.state_dict(), "decisions": decisions, "exchange_s": self._exchange_s}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.auto.load_state_dict(state["auto"])
        self._exchange_s = state["exchange_s"]
        self._use(replace(self._order, size_changes=tuple((step, size) for step, size in state["decisions"])))
