"""Record of one step on one member, from its first micro-batch to the commit."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from shoal.core.shares.reduction_tree import ShardRange
from shoal.core.state_check import StateDigest
from shoal.core.step_report import StepReport
from shoal.core.world import World
from shoal.worker.collectives.exchange import Exchange
from shoal.worker.data.feed import MicroBatch


class GradientNorms(Protocol):
    """Squared norms of one step's gradients: one per local group of samples, and one of the whole batch."""

    @property
    def total(self) -> float: ...

    def weighted(self, weight: float, global_batch_size: float) -> tuple[float, int]:
        """Return the sum over groups of weight times squared mean gradient, and the number of groups."""
        ...


@dataclass(slots=True)
class Step:
    """One step in progress: this member's share of it, and how far the member has come.

    `weight` sums the weights of the micro-batches whose backward pass is done, `micro_batch_weight` is that of the last
    one, and `loss` sums weight times loss, so that members with unequal shares can be averaged. `common_seed` is
    the same on all members. A `discarded` step ran out of memory: nothing of it was exchanged, and it is repeated with
    smaller micro-batches.
    """

    number: int
    epoch: int
    micro_batches: list[MicroBatch]
    global_batch_size: int
    exchange: Exchange
    world: World
    units: int = 0
    catching_up: tuple[int, ...] = ()
    first: bool = False
    shard_range: ShardRange | None = None
    common_seed: int = 0
    index: int = 0
    backwards: int = 0
    weight: float = 0.0
    micro_batch_weight: float = 0.0
    loss: Any = 0.0
    sending: bool = False
    reduced: bool = False
    committed: bool = False
    discarded: bool = False
    progress: int = 1
    gradient_norms: GradientNorms | None = None
    stepped: set[int] = field(default_factory=set)
    metrics: dict[str, Any] = field(default_factory=dict)
    reports: tuple[StepReport, ...] = ()
    digest: StateDigest | None = None
    data_s: float = 0.0
    compute_s: float = 0.0
    wait_s: float = 0.0
    started_at: float = 0.0

    @property
    def shard(self) -> int | None:
        """In exact mode, the shard that the current micro-batch holds; None in other modes."""
        return None if self.shard_range is None else self.shard_range.start + self.index

    @property
    def counts(self) -> bool:
        """Whether the last backward pass contributes to the gradient."""
        return self.micro_batch_weight != 0.0

    @property
    def samples(self) -> int:
        """This member's share of the global batch."""
        return sum(micro_batch.samples for micro_batch in self.micro_batches)

    @property
    def measured_units(self) -> int:
        """Units of work that `compute_s` measured; 0 for the first step, which includes one-time set-up."""
        return self.units if self.reduced and not self.first else 0

    @property
    def empty(self) -> bool:
        return self.samples == 0

    @property
    def on_last_micro_batch(self) -> bool:
        return self.index == len(self.micro_batches) - 1
