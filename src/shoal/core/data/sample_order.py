"""Which samples make up global batch k: a random-access permutation, so nobody ever stores or sends an index."""

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

from shoal.core.validation import checked_int
from shoal.errors import BadSize, DatasetTooSmall, EmptyDataset

Last = Literal["keep", "drop"]

ROUNDS = 8
# A Feistel network mixes poorly over very few values; a sorted table of hashes is exact there and costs 32 KiB.
TABLE_LIMIT = 4096


@dataclass(frozen=True, slots=True)
class Cursor:
    """A data position: the epoch, and the batch within it. It does not depend on the world."""

    epoch: int
    index: int


@dataclass(frozen=True, slots=True)
class BatchPosition:
    """Where a global batch lies: `size` samples from position `first` of an epoch; it is the epoch's batch `index`."""

    epoch: int
    index: int
    first: int
    size: int


@dataclass(frozen=True, slots=True)
class _EqualSizeSteps:
    """The steps from `step` on, of one size, which begin at `place`; `head` of them still belong to its epoch."""

    step: int
    place: BatchPosition
    head: int
    per_epoch: int

    def locate(self, step: int, samples: int) -> BatchPosition:
        place, on = self.place, step - self.step
        if on < self.head:
            first = place.first + on * place.size
            return BatchPosition(place.epoch, place.index + on, first, min(place.size, samples - first))
        epochs, index = divmod(on - self.head, self.per_epoch)
        first = index * place.size
        return BatchPosition(place.epoch + 1 + epochs, index, first, min(place.size, samples - first))

    def end(self, epochs: int) -> int:
        """The first step after the last epoch, if the size does not change again."""
        return self.step + self.head + self.per_epoch * (epochs - self.place.epoch - 1)


@dataclass(frozen=True)
class SampleOrder:
    """The order in which `epochs` passes over `samples` samples are cut into global batches of `size`.

    `size_changes` are pairs (step, size): from that step on, batches have that size, and go on from the sample reached.
    With a `limit` there are so many steps at most.

    >>> Order(samples=10, size=4, shuffle=False).ids(2, 0, 2)
    array([8, 9])
    >>> Order(samples=10, size=4, shuffle=False).change_size(1, 6).ids(1, 0, 6)
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
            raise BadSize(f"last={self.last!r}", why="unknown policy", do='pass last="keep" or last="drop"')
        if self.samples < 1:
            raise EmptyDataset("the dataset has no samples", do="check the path or the filter that it is read with")
        # Pairs that were read from JSON are lists.
        object.__setattr__(self, "size_changes", tuple((int(step), int(size)) for step, size in self.size_changes))
        for size in (self.size, *(size for _, size in self.size_changes)):
            self._check_size(size)
        steps = [step for step, _ in self.size_changes]
        if any(step < 0 for step in steps) or any(a >= b for a, b in pairwise(steps)):
            raise ValueError(f"size changes at steps {steps} do not follow one another")

    def change_size(self, from_step: int, size: int) -> SampleOrder:
        """The same order with global batches of `size` from that step on; a later step's decision must not be known."""
        before = tuple(one for one in self.size_changes if one[0] < from_step)
        later = self.size_changes[len(before) :]
        if from_step < 0 or len(later) > 1 or any(step > from_step for step, _ in later):
            raise ValueError(f"step {from_step} is not after the size changes {list(self.size_changes)}")
        self._check_size(size)
        unchanged = size == (before[-1][1] if before else self.size)
        return replace(self, size_changes=before if unchanged else (*before, (from_step, size)))

    @cached_property
    def steps_per_epoch(self) -> int:
        """How many steps a whole epoch has at the first size."""
        return self._steps_in(self.samples, self.size)

    @cached_property
    def total_steps(self) -> int:
        """How many steps there are if no further decision is made."""
        end = self._stretches[-1].end(self.epochs)
        return end if self.limit is None else min(end, self.limit)

    def cursor(self, step: int) -> Cursor:
        """Where `step` is; the step after the last one is (epochs, 0)."""
        if not 0 <= step <= self.total_steps:
            raise ValueError(f"step {step} is not within 0…{self.total_steps}")
        if not self.size_changes:
            return Cursor(*divmod(step, self.steps_per_epoch))
        place = self._locate(step)
        return Cursor(place.epoch, place.index)

    def position(self, step: int) -> BatchPosition:
        """Where global batch `step` lies; with `ids_at` it is all that a reader needs, whatever is decided later."""
        if not 0 <= step < self.total_steps:
            raise ValueError(f"step {step} is not within 0…{self.total_steps - 1}")
        return self._locate(step)

    def size_of(self, step: int) -> int:
        """How many samples global batch `step` has: the size then, but for a kept short last batch."""
        if not self.size_changes:
            return min(self.size, self.samples - self.cursor(step).index * self.size)
        if not 0 <= step <= self.total_steps:
            raise ValueError(f"step {step} is not within 0…{self.total_steps}")
        return self._locate(step).size

    def nominal_size(self, step: int) -> int:
        """The size that was decided for `step`, however many samples are left in its epoch."""
        number = bisect_right(self.size_changes, step, key=itemgetter(0))
        return self.size_changes[number - 1][1] if number else self.size

    def steps_within(self, samples: int) -> int:
        """How many whole global batches are made of the first so many samples of the run."""
        in_epoch = self.samples if self.last == "keep" else self.size * self.steps_per_epoch
        epochs, rest = divmod(samples, in_epoch)
        return min(self.total_steps, epochs * self.steps_per_epoch + rest // self.size)

    def ids(self, step: int, start: int, stop: int) -> NDArray[np.int64]:
        """Samples start…stop of global batch `step`, in O(stop - start)."""
        if step >= self.total_steps or not 0 <= start <= stop <= self.size_of(step):
            raise ValueError(f"samples {start}…{stop} are not within global batch {step}")
        place = self._locate(step)
        return self.ids_at(place.epoch, place.first + start, place.first + stop)

    def ids_at(self, epoch: int, start: int, stop: int) -> NDArray[np.int64]:
        """The samples at positions start…stop of an epoch."""
        positions = np.arange(start, stop, dtype=np.int64)
        return permute(positions, self.samples, self.seed, epoch) if self.shuffle else positions

    @cached_property
    def _stretches(self) -> tuple[_EqualSizeSteps, ...]:
        found = [self._stretch(0, BatchPosition(0, 0, 0, self.size))]
        for step, size in self.size_changes:
            # What is decided for a time after the end never happens.
            if step >= found[-1].end(self.epochs):
                break
            found.append(self._stretch(step, replace(found[-1].locate(step, self.samples), size=size)))
        return tuple(found)

    def _stretch(self, step: int, place: BatchPosition) -> _EqualSizeSteps:
        head = self._steps_in(self.samples - place.first, place.size)
        return _EqualSizeSteps(step, place, head, self._steps_in(self.samples, place.size))

    def _locate(self, step: int) -> BatchPosition:
        stretches = self._stretches
        number = bisect_right(stretches, step, key=attrgetter("step")) if len(stretches) > 1 else 1
        return stretches[number - 1].locate(step, self.samples)

    def _steps_in(self, samples: int, size: int) -> int:
        full, rest = divmod(samples, size)
        return full + (1 if rest and self.last == "keep" else 0)

    def _check_size(self, size: int) -> None:
        checked_int("size", size)
        if self.samples < size:
            raise DatasetTooSmall(
                f"the dataset has {self.samples} samples, the global batch is {size}",
                why="not one whole step can be made of it",
                do=f"pass size={self.samples} or less",
            )


def permute(positions: NDArray[np.int64], samples: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The samples at these positions of the permutation of 0…samples-1 that belongs to (seed, epoch)."""
    if samples <= TABLE_LIMIT:
        return _table(samples, seed, epoch)[positions]
    keys = _keys(seed, epoch)
    # A domain of rows by columns hardly larger than `samples`: walking out of it is rare, and ends at once.
    rows = _root(samples)
    columns = -(-samples // rows)
    values = _mix(positions.astype(np.uint64), rows, columns, keys)
    outside = np.flatnonzero(values >= samples)
    while outside.size:
        values[outside] = _mix(values[outside], rows, columns, keys)
        outside = outside[values[outside] >= samples]
    return values.astype(np.int64)


def _root(value: int) -> int:
    """The smallest integer whose square is not below `value`, without floating point."""
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
    """The finaliser of MurmurHash3, keyed."""
    mixed = (values + key) * np.uint64(0xFF51AFD7ED558CCD)
    mixed ^= mixed >> np.uint64(33)
    mixed *= np.uint64(0xC4CEB9FE1A85EC53)
    mixed ^= mixed >> np.uint64(33)
    return mixed


def _mix(values: NDArray[np.uint64], rows: int, columns: int, keys: tuple[np.uint64, ...]) -> NDArray[np.uint64]:
    """A Feistel network with modular addition: a bijection of 0…rows·columns-1 onto itself."""
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
