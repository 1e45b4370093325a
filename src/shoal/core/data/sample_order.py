"""Sample order: which samples make up global batch k, by a random-access permutation.

*The problem.* Members join, leave and change their shares at any step, yet every epoch must contain each sample exactly
once, and the result must not depend on the members. So the order of samples is a pure function: batch k of an epoch
consists of positions k·B … (k+1)·B of a permutation of the dataset that depends only on (seed, epoch). A member that
knows its slice of batch k computes the ids of its samples by itself; no index is stored, shuffled in memory or sent,
and a step that is repeated after a failure reads the same samples.

*Random access.* `permute` maps positions to sample ids in O(1) each, for datasets of any size: a Feistel network over
a domain of rows x columns slightly larger than the dataset, with round keys hashed from (seed, epoch). It is a
bijection of the domain; values outside of the dataset are mapped again until they fall inside (cycle walking), which
keeps it a bijection of the dataset and is rarely needed. Datasets of up to 4096 samples are sorted by a keyed hash
instead, because a Feistel network mixes poorly over few values. Only integer arithmetic is used: every machine computes
the same order.

*Cursor.* The position of a run in its data is (epoch, index of the batch): two numbers, independent of the world. It is
part of every snapshot and checkpoint.

*Changing sizes.* The global batch may change while training (see `core/batch`). `size_changes` lists pairs (step,
size), in order: from that step on batches have that size, and continue from the sample reached, so an epoch is still
complete. Steps between two changes form a segment of equal sizes, in which any step is located by division.

*The last batch* of an epoch is short if the size does not divide the dataset; `last` says whether it is kept or
dropped. With `drop`, the permutation decides which samples an epoch leaves out: others each time.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from operator import attrgetter, itemgetter
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from shoal.core.nouns import counted
from shoal.core.validation import checked_int
from shoal.errors import BadSize, DatasetTooSmall, EmptyDataset

Last = Literal["keep", "drop"]

ROUNDS = 8
# Up to this many samples, a sorted table of hashes is used; it costs at most 32 KiB.
TABLE_LIMIT = 4096


@dataclass(frozen=True, slots=True)
class Cursor:
    """Position in the data, independent of the world: the epoch, and the batch within it."""

    epoch: int
    index: int


@dataclass(frozen=True, slots=True)
class BatchPosition:
    """Position of a global batch: `size` samples from position `first` of an epoch, whose batch `index` it is."""

    epoch: int
    index: int
    first: int
    size: int


@dataclass(frozen=True, slots=True)
class _EqualSizeSteps:
    """Segment of steps of one size, from `step` on, beginning at `start`; `head` of them belong to its epoch."""

    step: int
    start: BatchPosition
    head: int
    per_epoch: int

    def locate(self, step: int, samples: int) -> BatchPosition:
        """Return the position of a step of the segment."""
        start, offset = self.start, step - self.step
        if offset < self.head:
            first = start.first + offset * start.size
            return BatchPosition(start.epoch, start.index + offset, first, min(start.size, samples - first))
        epochs, index = divmod(offset - self.head, self.per_epoch)
        first = index * start.size
        return BatchPosition(start.epoch + 1 + epochs, index, first, min(start.size, samples - first))

    def end(self, epochs: int) -> int:
        """Return the first step after the last epoch, if the size does not change again."""
        return self.step + self.head + self.per_epoch * (epochs - self.start.epoch - 1)


@dataclass(frozen=True)
class SampleOrder:
    """Order of `epochs` passes over `samples` samples, divided into global batches of `size`.

    `size_changes` are pairs (step, size), see above. `limit` bounds the number of steps.

    >>> SampleOrder(samples=10, size=4, shuffle=False).ids(2, 0, 2)
    array([8, 9])
    >>> SampleOrder(samples=10, size=4, shuffle=False).change_size(1, 6).ids(1, 0, 6)
    array([4, 5, 6, 7, 8, 9])
    """

    samples: int
    size: int
    epochs: int = 1
    seed: int = 0
    last: Last = "keep"
    shuffle: bool = True
    size_changes: tuple[tuple[int, int], ...] = ()
    limit: int | None = None

    def __post_init__(self) -> None:
        for name in ("size", "epochs", "limit"):
            value = getattr(self, name)
            if value is not None:
                checked_int(name, value)
        if self.last not in ("keep", "drop"):
            raise BadSize(
                f"invalid value for last: {self.last!r}",
                why="expected keep or drop",
                do='pass last="keep" or last="drop"',
            )
        if self.samples < 1:
            raise EmptyDataset("the dataset has no samples", do="check the path or the filter that selects it")
        # Pairs that were read from JSON are lists.
        object.__setattr__(self, "size_changes", tuple((int(step), int(size)) for step, size in self.size_changes))
        for size in (self.size, *(size for _, size in self.size_changes)):
            self._check_size(size)
        steps = [step for step, _ in self.size_changes]
        if any(step < 0 for step in steps) or any(a >= b for a, b in pairwise(steps)):
            raise ValueError(f"size changes at steps {steps} are not in increasing order")

    def change_size(self, from_step: int, size: int) -> SampleOrder:
        """Return the order with global batches of `size` from a step on, replacing a change at that very step.

        Raises ValueError if a change at a later step is known.
        """
        before = tuple(change for change in self.size_changes if change[0] < from_step)
        later = self.size_changes[len(before) :]
        if from_step < 0 or len(later) > 1 or any(step > from_step for step, _ in later):
            raise ValueError(f"step {from_step} is not after the size changes {list(self.size_changes)}")
        self._check_size(size)
        unchanged = size == (before[-1][1] if before else self.size)
        return replace(self, size_changes=before if unchanged else (*before, (from_step, size)))

    @cached_property
    def steps_per_epoch(self) -> int:
        """Number of steps in an epoch at the first size."""
        return self._steps_in(self.samples, self.size)

    @cached_property
    def total_steps(self) -> int:
        """Number of steps if the size does not change again."""
        end = self._segments[-1].end(self.epochs)
        return end if self.limit is None else min(end, self.limit)

    def cursor(self, step: int) -> Cursor:
        """Return the cursor of a step; for the step after the last it is (epochs, 0)."""
        if not 0 <= step <= self.total_steps:
            raise ValueError(f"step {step} is not within 0…{self.total_steps}")
        if not self.size_changes:
            return Cursor(*divmod(step, self.steps_per_epoch))
        position = self._locate(step)
        return Cursor(position.epoch, position.index)

    def position(self, step: int) -> BatchPosition:
        """Return the position of global batch `step`; later changes of the size do not affect it."""
        if not 0 <= step < self.total_steps:
            raise ValueError(f"step {step} is not within 0…{self.total_steps - 1}")
        return self._locate(step)

    def size_of(self, step: int) -> int:
        """Return the number of samples in global batch `step`; the last of an epoch may be short."""
        if not self.size_changes:
            return min(self.size, self.samples - self.cursor(step).index * self.size)
        if not 0 <= step <= self.total_steps:
            raise ValueError(f"step {step} is not within 0…{self.total_steps}")
        return self._locate(step).size

    def nominal_size(self, step: int) -> int:
        """Return the size in force at `step`, even if fewer samples are left in its epoch."""
        count = bisect_right(self.size_changes, step, key=itemgetter(0))
        return self.size_changes[count - 1][1] if count else self.size

    def steps_within(self, samples: int) -> int:
        """Return how many whole global batches the first so many samples of the run make."""
        in_epoch = self.samples if self.last == "keep" else self.size * self.steps_per_epoch
        epochs, rest = divmod(samples, in_epoch)
        return min(self.total_steps, epochs * self.steps_per_epoch + rest // self.size)

    def ids(self, step: int, start: int, stop: int) -> NDArray[np.int64]:
        """Return the ids of samples start…stop of global batch `step`, in O(stop - start)."""
        if step >= self.total_steps or not 0 <= start <= stop <= self.size_of(step):
            raise ValueError(f"samples {start}…{stop} are not within global batch {step}")
        position = self._locate(step)
        return self.ids_at(position.epoch, position.first + start, position.first + stop)

    def ids_at(self, epoch: int, start: int, stop: int) -> NDArray[np.int64]:
        """Return the ids of the samples at positions start…stop of an epoch."""
        positions = np.arange(start, stop, dtype=np.int64)
        return permute(positions, self.samples, self.seed, epoch) if self.shuffle else positions

    @cached_property
    def _segments(self) -> tuple[_EqualSizeSteps, ...]:
        segments = [self._segment(0, BatchPosition(0, 0, 0, self.size))]
        for step, size in self.size_changes:
            # A change after the end has no effect.
            if step >= segments[-1].end(self.epochs):
                break
            segments.append(self._segment(step, replace(segments[-1].locate(step, self.samples), size=size)))
        return tuple(segments)

    def _segment(self, step: int, start: BatchPosition) -> _EqualSizeSteps:
        head = self._steps_in(self.samples - start.first, start.size)
        return _EqualSizeSteps(step, start, head, self._steps_in(self.samples, start.size))

    def _locate(self, step: int) -> BatchPosition:
        segments = self._segments
        number = bisect_right(segments, step, key=attrgetter("step")) if len(segments) > 1 else 1
        return segments[number - 1].locate(step, self.samples)

    def _steps_in(self, samples: int, size: int) -> int:
        full, rest = divmod(samples, size)
        return full + (1 if rest and self.last == "keep" else 0)

    def _check_size(self, size: int) -> None:
        checked_int("size", size)
        if self.samples < size:
            raise DatasetTooSmall(
                f"the dataset has {counted(self.samples, 'sample')}, the global batch is {size}",
                why="it is too small for a single step",
                do=f"pass size={self.samples} or less",
            )


def permute(positions: NDArray[np.int64], samples: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the ids at these positions of the permutation of 0…samples-1 that belongs to (seed, epoch)."""
    if samples <= TABLE_LIMIT:
        return _table(samples, seed, epoch)[positions]
    keys = _keys(seed, epoch)
    # A domain of rows x columns hardly larger than `samples`: few values fall outside.
    rows = _root(samples)
    columns = -(-samples // rows)
    values = _mix(positions.astype(np.uint64), rows, columns, keys)
    outside = np.flatnonzero(values >= samples)
    while outside.size:
        values[outside] = _mix(values[outside], rows, columns, keys)
        outside = outside[values[outside] >= samples]
    return values.astype(np.int64)


def _root(value: int) -> int:
    """Return the smallest integer whose square is at least `value`, without floating point."""
    low, high = 1, 1 << (value.bit_length() // 2 + 1)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if middle * middle >= value else (middle + 1, high)
    return low


@lru_cache(maxsize=64)
def _keys(seed: int, epoch: int) -> tuple[np.uint64, ...]:
    digest = hashlib.blake2b(f"shoal order {seed} {epoch}".encode(), digest_size=8 * ROUNDS).digest()
    return tuple(np.frombuffer(digest, dtype="<u8").astype(np.uint64))


@lru_cache(maxsize=8)
def _table(samples: int, seed: int, epoch: int) -> NDArray[np.int64]:
    keys = _keys(seed, epoch)
    hashes = np.arange(samples, dtype=np.uint64)
    for key in keys[:2]:
        hashes = _hash(hashes, key)
    return np.argsort(hashes, kind="stable").astype(np.int64)


def _hash(values: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    """Return a keyed hash: the finaliser of MurmurHash3."""
    mixed = (values + key) * np.uint64(0xFF51AFD7ED558CCD)
    mixed ^= mixed >> np.uint64(33)
    mixed *= np.uint64(0xC4CEB9FE1A85EC53)
    mixed ^= mixed >> np.uint64(33)
    return mixed


def _mix(values: NDArray[np.uint64], rows: int, columns: int, keys: tuple[np.uint64, ...]) -> NDArray[np.uint64]:
    """Apply a Feistel network with modular addition, a bijection of 0…rows·columns-1 onto itself."""
    sides = np.uint64(rows), np.uint64(columns)
    halves = list(np.divmod(values, sides[1]))
    for number, key in enumerate(keys):
        side = number % 2
        # The upper 32 bits times the side, shifted back: a range reduction without a division.
        offset = ((_hash(halves[1 - side], key) >> np.uint64(32)) * sides[side]) >> np.uint64(32)
        halves[side] = halves[side] + offset
        halves[side] -= np.where(halves[side] >= sides[side], sides[side], np.uint64(0))
    mixed: NDArray[np.uint64] = halves[0] * sides[1] + halves[1]
    return mixed
