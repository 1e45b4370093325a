"""Which samples make up global batch k: a random-access permutation, so nobody ever stores or sends an index."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

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


@dataclass(frozen=True)
class Order:
    """The order in which `epochs` passes over `samples` samples are cut into global batches of `size`.

    >>> Order(samples=10, size=4, shuffle=False).ids(2, 0, 2)
    array([8, 9])
    """

    samples: int
    size: int
    epochs: int = 1
    seed: int = 0
    last: Last = "keep"
    shuffle: bool = True

    def __post_init__(self) -> None:
        for name in ("size", "epochs"):
            value = getattr(self, name)
            if value < 1:
                raise BadSize(f"{name}={value}", why=f"{name} must be at least 1", do=f"pass a positive {name}")
        if self.last not in ("keep", "drop"):
            raise BadSize(f"last={self.last!r}", why="unknown policy", do='pass last="keep" or last="drop"')
        if self.samples < 1:
            raise EmptyDataset("the dataset has no samples", do="check the path or the filter that it is read with")
        if self.samples < self.size:
            raise DatasetTooSmall(
                f"the dataset has {self.samples} samples, the global batch is {self.size}",
                why="not one whole step can be made of it",
                do=f"pass size={self.samples} or less",
            )

    @cached_property
    def steps_per_epoch(self) -> int:
        whole, rest = divmod(self.samples, self.size)
        return whole + (1 if rest and self.last == "keep" else 0)

    @cached_property
    def total_steps(self) -> int:
        return self.steps_per_epoch * self.epochs

    def cursor(self, step: int) -> Cursor:
        """Where `step` is; the step after the last one is (epochs, 0)."""
        if not 0 <= step <= self.total_steps:
            raise ValueError(f"step {step} is not within 0…{self.total_steps}")
        return Cursor(*divmod(step, self.steps_per_epoch))

    def size_of(self, step: int) -> int:
        """How many samples global batch `step` has: `size`, but for a kept short last batch."""
        return min(self.size, self.samples - self.cursor(step).index * self.size)

    def steps_within(self, samples: int) -> int:
        """How many whole global batches are made of the first so many samples of the run."""
        in_epoch = self.samples if self.last == "keep" else self.size * self.steps_per_epoch
        epochs, rest = divmod(samples, in_epoch)
        return min(self.total_steps, epochs * self.steps_per_epoch + rest // self.size)

    def ids(self, step: int, start: int, stop: int) -> NDArray[np.int64]:
        """Samples start…stop of global batch `step`, in O(stop - start)."""
        if step >= self.total_steps or not 0 <= start <= stop <= self.size_of(step):
            raise ValueError(f"samples {start}…{stop} are not within global batch {step}")
        at = self.cursor(step)
        first = at.index * self.size
        positions = np.arange(first + start, first + stop, dtype=np.int64)
        return permute(positions, self.samples, self.seed, at.epoch) if self.shuffle else positions


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
