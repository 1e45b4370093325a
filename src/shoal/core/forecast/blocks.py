"""Blocks: the steps of a run in pieces of about equal duration, at most a fixed number of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

CAPACITY = 64
FIRST_BLOCK_S = 1.0


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive steps and the seconds that they took."""

    steps: int
    seconds: float

    @property
    def step_s(self) -> float:
        return self.seconds / self.steps


class BlockLog:
    """The blocks of one world, from observations of its step; when the log is full, its blocks double in length."""

    def __init__(self) -> None:
        self._blocks: list[Block] = []
        self._block_s = FIRST_BLOCK_S
        self._began: tuple[float, int] | None = None

    @property
    def blocks(self) -> Sequence[Block]:
        return self._blocks

    def observe(self, at: float, step: int) -> None:
        """Note that `step` steps were committed at this time; the first observation begins the first block."""
        if self._began is None or step < self._began[1]:
            # Steps are repeated: the time between is no time of a step.
            self._began = (at, step)
            return
        began_at, began_step = self._began
        if step == began_step or at - began_at < self._block_s:
            return
        self._blocks.append(Block(step - began_step, at - began_at))
        self._began = (at, step)
        if len(self._blocks) == CAPACITY:
            pairs = zip(self._blocks[::2], self._blocks[1::2], strict=True)
            self._blocks = [Block(a.steps + b.steps, a.seconds + b.seconds) for a, b in pairs]
            self._block_s *= 2
