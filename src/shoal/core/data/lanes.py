"""How data that cannot be indexed is cut into global batches: fixed lanes, of which every step takes a fixed quota."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from shoal.core.data.sample_order import Cursor, permute
from shoal.core.shares.split import span, split
from shoal.core.validation import checked_int
from shoal.errors import BadSize, EmptyDataset

MAX_LANES = 64


@dataclass(frozen=True)
class LaneLayout:
    """The lanes of a stream of `shards` shards; they do not depend on the world.

    Lane v reads shards v, v + lanes, v + 2·lanes, … one after the other. Step k of an epoch takes the samples
    k·quota…(k+1)·quota of every lane, so it is the same for everyone, whoever reads it.
    """

    shards: int
    size: int
    lanes: int
    epochs: int = 1
    seed: int = 0
    shuffle: bool = False

    @staticmethod
    def of(
        shards: int, size: int, lanes: int | None = None, epochs: int = 1, seed: int = 0, shuffle: bool = False
    ) -> LaneLayout:
        """A layout with as many lanes as are useful."""
        if shards < 1:
            raise EmptyDataset("the stream has no shards", do="check the path or the pattern that they are found with")
        best = max(1, min(shards, checked_int("size", size), MAX_LANES))
        return LaneLayout(shards, size, best if lanes is None else lanes, epochs, seed, shuffle)

    def __post_init__(self) -> None:
        for name in ("size", "epochs", "lanes"):
            checked_int(name, getattr(self, name))
        most = min(self.shards, self.size)
        if self.lanes > most:
            raise BadSize(
                f"lanes={self.lanes}",
                why=f"{self.shards} shards and a global batch of {self.size} leave some lanes without samples",
                do=f"pass lanes={most} or less",
            )

    @cached_property
    def quotas(self) -> tuple[int, ...]:
        """How many samples a step takes of each lane."""
        return split(self.size, [1] * self.lanes)

    def shards_of(self, number: int, epoch: int) -> list[int]:
        """The shards of a lane, in the order in which it reads them."""
        positions = np.arange(number, self.shards, self.lanes, dtype=np.int64)
        shards = permute(positions, self.shards, self.seed, epoch) if self.shuffle else positions
        return [int(shard) for shard in shards]

    def lanes_of(self, shares: Sequence[int], rank: int) -> tuple[int, int]:
        """The lanes (start, stop) of a rank, in proportion to the shares; none for a share of 0."""
        return span(split(self.lanes, shares), rank)


def locate(shards: Sequence[int], position: int, lengths: Mapping[int, int]) -> tuple[int, int]:
    """The place in a lane from which to read, and how many samples to pass over there.

    Shards of known length that end before `position` are not even opened.
    """
    for place, shard in enumerate(shards):
        known = lengths.get(shard)
        if known is None or position < known:
            return place, position
        position -= known
    return len(shards), position


def advance(cursor: Cursor, more: bool) -> Cursor:
    """Where a stream goes on after a step; `more` says whether anybody has another sample in this epoch."""
    return Cursor(cursor.epoch, cursor.index + 1) if more else Cursor(cursor.epoch + 1, 0)
