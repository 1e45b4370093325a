"""Rounds of local training: which samples belong to one, and the batches in which a member trains on its share."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shoal.core.data.sample_order import Last, SampleOrder, permute
from shoal.core.shares.split import split


@dataclass(frozen=True)
class RoundOrder(SampleOrder):
    """The order of a dataset of `drawn` samples, of which each "global batch" is a round of several of `batch` samples.

    A round never crosses the end of an epoch; the last one of an epoch has what is left. `ends` are the first rounds
    after every so many global batches, if rounds are not to cross those either.

    >>> Rounds.of(10, 2, length=3, last="drop", shuffle=False).ids(1, 0, 4)
    array([6, 7, 8, 9])
    """

    batch: int = 1
    drawn: int = 0
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
        """Rounds of `length` global batches each; none crosses a multiple of `every` global batches."""
        plain = SampleOrder(samples, batch, epochs, seed, last, shuffle)
        # A batch that would be dropped is of no round; all other samples are.
        used = samples if plain.last == "keep" else plain.steps_per_epoch * batch
        size = min(length * batch, used)
        cuts, ends = _cut(plain.steps_per_epoch, epochs, length, every) if every else ({}, [])
        sizes = tuple((step, min(batches * batch, size)) for step, batches in cuts.items())
        return RoundOrder(
            used, size, epochs, seed, "keep", shuffle, sizes, batch=batch, drawn=samples, ends=tuple(ends)
        )

    def batches_in(self, step: int) -> int:
        """How many global batches a round is worth."""
        return -(-self.size_of(step) // self.batch)

    def ids_at(self, epoch: int, start: int, stop: int) -> NDArray[np.int64]:
        positions = np.arange(start, stop, dtype=np.int64)
        return permute(positions, self.drawn, self.seed, epoch) if self.shuffle else positions


def _cut(in_epoch: int, epochs: int, length: int, every: int) -> tuple[dict[int, int], list[int]]:
    """From which round on rounds have another length, so that one ends after `every` batches each time; and those ends.

    All in global batches, of which an epoch has `in_epoch`.
    """
    cuts: dict[int, int] = {}
    ends: list[int] = []
    rounds = at = 0
    while at < in_epoch * epochs:
        stop = min((at // every + 1) * every, (at // in_epoch + 1) * in_epoch)
        whole, rest = divmod(stop - at, length)
        rounds, at = rounds + whole, stop
        if rest and at % in_epoch:
            # The end of an epoch makes a round short by itself.
            cuts[rounds], cuts[rounds + 1] = rest, length
        rounds += rest > 0
        if at % every == 0:
            ends.append(rounds)
    return cuts, ends


def local_batches(share: int, batch: int, members: int) -> tuple[int, ...]:
    """The sizes of the batches that a share of a round is trained on: as near to an equal part of `batch` as can be.

    >>> local_batches(52, batch=32, members=2), local_batches(12, batch=32, members=2)
    ((18, 17, 17), (12,))
    """
    if share == 0:
        return ()
    count = max(1, (2 * share * members + batch) // (2 * batch))
    return split(share, [1] * min(count, share))
