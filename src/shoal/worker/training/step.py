"""One step of the loop, from the first batch that is given out to the commit."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from shoal.core.shares.reduction_tree import ShardRange
from shoal.core.step_report import StepReport
from shoal.core.world import World
from shoal.worker.collectives.exchange import Exchange
from shoal.worker.data.feed import MicroBatch


class GradientNorms(Protocol):
    """The squared norms of one step's gradients: those of groups of samples here, and that of the whole batch."""

    @property
    def total(self) -> float: ...

    def weighted(self, weight: float, nominal: float) -> tuple[float, int]:
        """The sum over groups of weight times squared mean gradient, and the number of groups."""
        ...


@dataclass(slots=True)
class Step:
    """What this member does in one step, and how far it has come."""

    step: int
    epoch: int
    pieces: list[MicroBatch]
    nominal: int
    exchange: Exchange
    world: World
    units: int = 0
    ghosts: tuple[int, ...] = ()
    first: bool = False
    held: ShardRange | None = None
    piece: int = 0
    backwards: int = 0
    weight: float = 0.0
    own: float = 0.0
    loss: Any = 0.0
    sending: bool = False
    reduced: bool = False
    committed: bool = False
    spoiled: bool = False
    progress: int = 1
    squares: GradientNorms | None = None
    stepped: set[int] = field(default_factory=set)
    logged: dict[str, Any] = field(default_factory=dict)
    everybody: tuple[StepReport, ...] = ()
    data_s: float = 0.0
    compute_s: float = 0.0
    wait_s: float = 0.0
    given_at: float = 0.0

    @property
    def shard(self) -> int | None:
        """In exact mode, the shard of the batch that was given out last."""
        return None if self.held is None else self.held.start + self.piece

    @property
    def counts(self) -> bool:
        """Whether a backward pass of the batch that was given out last adds anything."""
        return self.own != 0.0

    @property
    def samples(self) -> int:
        return sum(piece.samples for piece in self.pieces)

    @property
    def measured(self) -> int:
        """The units whose seconds tell of this member's speed: none of the first step, in which all is set up."""
        return self.units if self.reduced and not self.first else 0

    @property
    def empty(self) -> bool:
        return self.samples == 0

    @property
    def last_piece(self) -> bool:
        return self.piece == len(self.pieces) - 1
