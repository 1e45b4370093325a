"""Lanes: the global batches of a stream, which cannot be indexed.

A stream consists of shards (files, for example) that can only be read from their beginning. They are distributed over
a fixed number of lanes, and every step takes a fixed quota of samples from each lane. So batch k is the same samples
whichever member reads which lane; members share lanes instead of samples.
"""

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
    """The lanes of a stream of `shards` shards, independent of the world.

    Lane v reads shards v, v + lanes, v + 2·lanes, … one after the other. Step k of an epoch takes the samples
    k·quota…(k+1)·quota of every lane.
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
        """Return a layout with as many lanes as are useful, unless `lanes` says how many."""
        if shards < 1:
            raise EmptyDataset("the stream has no shards", do="check the path or pattern that selects them")
        best = max(1, min(shards, checked_int("size", size), MAX_LANES))
        return LaneLayout(shards, size, best if lanes is None else lanes, epochs, seed, shuffle)

    def __post_init__(self) -> None:
        for name in ("size", "epochs", "lanes"):
            checked_int(name, getattr(self, name))
        most = min(self.shards, self.size)
        if self.lanes > most:
            raise BadSize(
                f"invalid lanes={self.lanes} — expected at most {most}",
                why=f"with {self.shards} shards and a global batch of {self.size}, some lanes would have no samples",
                do=f"pass lanes={most} or less",
            )

    @cached_property
    def quotas(self) -> tuple[int, ...]:
        """The number of samples that a step takes from each lane."""
        return split(self.size, [1] * self.lanes)

    def shards_of(self, number: int, epoch: int) -> list[int]:
        """Return the shards of a lane in an epoch, in reading order."""
        positions = np.arange(number, self.shards, self.lanes, dtype=np.int64)
        shards = permute(positions, self.shards, self.seed, epoch) if self.shuffle else positions
        return [int(shard) for shard in shards]

    def lanes_of(self, shares: Sequence[int], rank: int) -> tuple[int, int]:
        """Return the lanes (start, stop) of a rank, in proportion to the shares; none for a share of 0."""
        return span(split(self.lanes, shares), rank)


def locate(shards: Sequence[int], position: int, lengths: Mapping[int, int]) -> tuple[int, int]:
    """Return the index of the shard in which a position of a lane lies, and how many samples to skip there.

    Shards of known length that end before the position need not be opened.
    """
    for index, shard in enumerate(shards):
        length = lengths.get(shard)
        if length is None or position < length:
            return index, position
        position -= length
    return len(shards), position


def advance(cursor: Cursor, more: bool) -> Cursor:
    """Return the cursor after a step; `more` says whether any lane has another sample in this epoch."""
    return Cursor(cursor.epoch, cursor.index + 1) if more else Cursor(cursor.epoch + 1, 0)
