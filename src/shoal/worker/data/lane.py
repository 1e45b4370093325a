"""One lane of a stream: shards read one after another, from any position, each sample once.

A shard can only be read forward, from its start or after skipping. A lane therefore keeps a window of recent samples
(an uncommitted step is taken again) and the lengths of the shards it has read to their end (a shard before the wanted
position need not be opened at all).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from shoal.core.data.lanes import LaneLayout, locate
from shoal.errors import SampleFailed, ShardChanged, UnusableShard
from shoal.worker.data.fetch import sample_failure, sample_seed
from shoal.worker.data.rng_state import RngState

Open = Callable[[Any], Iterable[Any]]
Lengths = dict[int, int]

# More samples than a shard can have, so that (shard, sample) fits in one number.
SHARD = 1 << 40
NOWHERE = 1 << 62


class Shards:
    """The shards of a stream, each of which can be opened at any sample.

    A shard is a function without arguments that returns an iterator, or an iterable that can be iterated repeatedly;
    with `open`, it is any argument of that function. A sequence is entered directly, and so is an iterator with a
    method ``skip(n)`` that returns how many samples it skipped; of all others the first n are read and dropped.
    """

    def __init__(self, shards: Sequence[Any], open: Open | None = None) -> None:
        self._shards = shards
        self._open = open
        for number, shard in enumerate(shards):
            usable = callable(shard) or isinstance(shard, Iterable)
            if open is None and (isinstance(shard, str | bytes) or not usable):
                raise _unusable(
                    number, f"it is a {type(shard).__name__}", "pass open=, a function that opens one shard"
                )
            if open is None and isinstance(shard, Iterator):
                raise _unusable(number, "an iterator can be read only once", "pass a function that makes it")

    def __len__(self) -> int:
        return len(self._shards)

    def known_lengths(self) -> Lengths:
        """Return the lengths of the shards that are sequences."""
        if self._open is not None:
            return {}
        return {number: len(shard) for number, shard in enumerate(self._shards) if isinstance(shard, Sequence)}

    def enter(self, number: int, first: int) -> tuple[Iterator[Any], int]:
        """Return an iterator over a shard, and how many of its first samples were skipped, at most `first`."""
        shard = self._shards[number]
        if self._open is None and isinstance(shard, Sequence):
            return map(shard.__getitem__, range(first, len(shard))), first
        opened = self._open(shard) if self._open else shard if isinstance(shard, Iterable) else shard()
        iterator = iter(opened)
        skipped = iterator.skip(first) if first and hasattr(iterator, "skip") else 0
        if not isinstance(skipped, int) or not 0 <= skipped <= first:
            name = type(iterator).__name__
            raise TypeError(f"skip({first}) of {name} returned {skipped!r}, not how many samples it skipped")
        return iterator, skipped


class Lane:
    """One lane of one epoch, read forward; the last few steps are kept, because an uncommitted step is taken again.

    `_window` holds the samples from position `_base` on; `_shard_index` and `_index` are the next sample to read.
    """

    def __init__(
        self,
        shards: Shards,
        layout: LaneLayout,
        number: int,
        epoch: int,
        lengths: Lengths,
        generators: RngState,
    ) -> None:
        self.epoch = epoch
        self._shards, self._generators = shards, generators
        self._number = number
        self._run_seed = layout.seed
        self._shard_numbers = layout.shards_of(number, epoch)
        self._lengths = lengths
        self._window: deque[Any] = deque()
        self._base = 0
        self._shard_index = 0
        self._index = 0
        self._iterator: Iterator[Any] | None = None

    def take(self, position: int, count: int, keep: int) -> tuple[list[Any], bool]:
        """Return samples position…position+count and whether another one follows; keep `keep` samples before them."""
        if not self._base <= position <= self._base + len(self._window):
            self._seek(position)
        self._discard_below(position - keep)
        start = position - self._base
        while len(self._window) <= start + count and self._read():
            pass
        return list(islice(self._window, start, start + count)), len(self._window) > start + count

    def close(self) -> None:
        """Close the open shard."""
        if self._iterator is not None and hasattr(self._iterator, "close"):
            self._iterator.close()
        self._iterator = None

    def _seek(self, position: int) -> None:
        """Move to a position backwards, or forwards across shards; within the open shard, reading on is enough."""
        shard_index, offset = locate(self._shard_numbers, position, self._lengths)
        if position > self._base and shard_index <= self._shard_index and self._iterator is not None:
            return
        self.close()
        self._window.clear()
        self._shard_index, self._index, self._base = shard_index, 0, position - offset
        if shard_index < len(self._shard_numbers):
            self._open(offset)
            self._base += self._index

    def _discard_below(self, floor: int) -> None:
        while self._base < floor and (self._window or self._read()):
            self._window.popleft()
            self._base += 1

    def _read(self) -> bool:
        """Read one more sample into the window; return False at the end of the lane."""
        while self._shard_index < len(self._shard_numbers):
            if self._iterator is None:
                self._open(0)
            try:
                self._seed(self._index)
                self._window.append(next(self._iterator))  # type: ignore[arg-type]
            except StopIteration:
                self._learn(ended=True)
                self.close()
                self._shard_index, self._index = self._shard_index + 1, 0
                continue
            except Exception as error:
                raise self._unreadable(f"sample {self._index}", error) from error
            self._index += 1
            self._learn(ended=False)
            return True
        return False

    def _open(self, first: int) -> None:
        self._seed(SHARD - 1)
        try:
            self._iterator, self._index = self._shards.enter(self._shard, first)
        except Exception as error:
            raise self._unreadable("the beginning", error) from error

    def _learn(self, ended: bool) -> None:
        length = self._lengths.get(self._shard)
        if length is None and ended:
            self._lengths[self._shard] = self._index
        elif length is not None and (self._index > length or (ended and self._index != length)):
            raise ShardChanged(
                f"shard {self._shard} now has {self._index if ended else 'more than ' + str(length)} samples",
                where=f"lane {self._number}, epoch {self.epoch}",
                why=f"it had {length} when it was read before",
                do="return the same samples in the same order whenever a shard is opened",
            )

    @property
    def _shard(self) -> int:
        return self._shard_numbers[self._shard_index]

    def _seed(self, index: int) -> None:
        self._generators.seed(sample_seed(self._run_seed, self.epoch, self._shard * SHARD + index))

    def _unreadable(self, which: str, error: Exception) -> SampleFailed:
        # A generator that raised is exhausted: the next attempt must open the shard again, or samples would be lost.
        self.close()
        self._window.clear()
        self._base = NOWHERE
        what = f"{which} of shard {self._shard} cannot be read: {type(error).__name__}: {error}"
        return sample_failure(what, f"lane {self._number}, epoch {self.epoch}", f"try shard {self._shard} alone", error)


def _unusable(number: int, why: str, do: str) -> UnusableShard:
    return UnusableShard(f"shard {number} of the stream cannot be read", why=why, do=do)
