"""Rounds of local training: which samples belong to one, and the batches in which a member trains on its share."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shoal.core.order import Last, Order, permute
from shoal.core.plan import split


@dataclass(frozen=True)
class Rounds(Order):
    """The order of a dataset of `drawn` samples, of which each "global batch" is a round of several of `batch` samples.

    A round never crosses the end of an epoch; the last one of an epoch has what is left.

    >>> Rounds.of(10, 2, length=3, last="drop", shuffle=False).ids(1, 0, 4)
    array([6, 7, 8, 9])
    """

    batch: int = 1
    drawn: int = 0

    @staticmethod
    def of(
        samples: int,
        batch: int,
        length: int,
        epochs: int = 1,
        seed: int = 0,
        last: Last = "keep",
        shuffle: bool = True,
    ) -> Rounds:
        """Rounds of `length` global batches each."""
        plain = Order(samples, batch, epochs, seed, last, shuffle)
        # A batch that would be dropped is of no round; all other samples are.
        used = samples if plain.last == "keep" else plain.steps_per_epoch * batch
        return Rounds(used, min(length * batch, used), epochs, seed, "keep", shuffle, batch=batch, drawn=samples)

    def batches_in(self, step: int) -> int:
        """How many global batches a round is worth."""
        return -(-self.size_of(step) // self.batch)

    def ids_at(self, epoch: int, start: int, stop: int) -> NDArray[np.int64]:
        positions = np.arange(start, stop, dtype=np.int64)
        return permute(positions, self.drawn, self.seed, epoch) if self.shuffle else positions


def local_batches(share: int, batch: int, members: int) -> tuple[int, ...]:
    """The sizes of the batches that a share of a round is trained on: as near to an equal part of `batch` as can be.

    >>> local_batches(52, batch=32, members=2), local_batches(12, batch=32, members=2)
    ((18, 17, 17), (12,))
    """
    if share == 0:
        return ()
    count = max(1, (2 * share * members + batch) // (2 * batch))
    return split(share, [1] * min(count, share))
