"""Rounds of local training: their samples, and the batches in which a member trains on its share.

With `local:H` members train on their own for a round of H global batches, then average. To the order of samples a
round is one large global batch: it is divided into shares like any other, and counted as one step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shoal.core.data.sample_order import Last, SampleOrder, permute
from shoal.core.shares.split import split


@dataclass(frozen=True)
class RoundOrder(SampleOrder):
    """Order of a dataset of `dataset_size` samples whose steps are rounds of several global batches of `batch` samples.

    A round never crosses the end of an epoch; the last one of an epoch may be shorter. `ends` are the rounds that
    begin right after a multiple of `every` global batches, if rounds must not cross those either.

    >>> RoundOrder.of(10, 2, length=3, last="drop", shuffle=False).ids(1, 0, 4)
    array([6, 7, 8, 9])
    """

    batch: int = 1
    dataset_size: int = 0
    ends: tuple[int, ...] = ()

    @staticmethod
    def of(
        samples: int,
        batch: int,
        length: int,
        epochs: int = 1,
        seed: int = 0,
        last: Last = "keep",
        shuffle: bool = True,
        every: int | None = None,
    ) -> RoundOrder:
        """Return rounds of `length` global batches each; none crosses a multiple of `every` global batches."""
        plain = SampleOrder(samples, batch, epochs, seed, last, shuffle)
        # A short last batch that is dropped belongs to no round.
        used = samples if plain.last == "keep" else plain.steps_per_epoch * batch
        size = min(length * batch, used)
        cuts, ends = _cut(plain.steps_per_epoch, epochs, length, every) if every else ({}, [])
        sizes = tuple((step, min(batches * batch, size)) for step, batches in cuts.items())
        return RoundOrder(
            used, size, epochs, seed, "keep", shuffle, sizes, batch=batch, dataset_size=samples, ends=tuple(ends)
        )

    def batches_in(self, step: int) -> int:
        """Return how many global batches a round stands for."""
        return -(-self.size_of(step) // self.batch)

    def ids_at(self, epoch: int, start: int, stop: int) -> NDArray[np.int64]:
        """Return the samples at positions start…stop of an epoch, among all of the dataset."""
        positions = np.arange(start, stop, dtype=np.int64)
        return permute(positions, self.dataset_size, self.seed, epoch) if self.shuffle else positions


def _cut(in_epoch: int, epochs: int, length: int, every: int) -> tuple[dict[int, int], list[int]]:
    """Return the rounds from which lengths change, so that a round ends after every `every` batches, and those ends.

    Lengths are in global batches, of which an epoch has `in_epoch`.
    """
    cuts: dict[int, int] = {}
    ends: list[int] = []
    rounds = position = 0
    while position < in_epoch * epochs:
        stop = min((position // every + 1) * every, (position // in_epoch + 1) * in_epoch)
        whole, rest = divmod(stop - position, length)
        rounds, position = rounds + whole, stop
        if rest and position % in_epoch:
            # The end of an epoch shortens its last round anyway.
            cuts[rounds], cuts[rounds + 1] = rest, length
        rounds += rest > 0
        if position % every == 0:
            ends.append(rounds)
    return cuts, ends


def local_batches(share: int, batch: int, members: int) -> tuple[int, ...]:
    """Return the sizes of the batches in which a member trains on its share, each close to `batch` / `members`.

    >>> local_batches(52, batch=32, members=2), local_batches(12, batch=32, members=2)
    ((18, 17, 17), (12,))
    """
    if share == 0:
        return ()
    count = max(1, (2 * share * members + batch) // (2 * batch))
    return split(share, [1] * min(count, share))
