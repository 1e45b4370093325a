"""One step of the loop, from the first batch that is given out to the commit."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from shoal.core.pulse import Pulse
from shoal.torch.feed import Piece
from shoal.worker.exchange import Exchange


@dataclass(slots=True)
class Turn:
    """What this member does in one step, and how far it has come."""

    step: int
    epoch: int
    pieces: list[Piece]
    nominal: int
    exchange: Exchange
    piece: int = 0
    backwards: int = 0
    weight: float = 0.0
    loss: torch.Tensor | float = 0.0
    reduced: bool = False
    committed: bool = False
    stepped: set[int] = field(default_factory=set)
    everybody: tuple[Pulse, ...] = ()
    data_s: float = 0.0
    compute_s: float = 0.0
    wait_s: float = 0.0
    given_at: float = 0.0

    @property
    def samples(self) -> int:
        return sum(piece.samples for piece in self.pieces)

    @property
    def empty(self) -> bool:
        return self.samples == 0

    @property
    def last_piece(self) -> bool:
        return self.piece == len(self.pieces) - 1
