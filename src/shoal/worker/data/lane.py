"""One lane of a stream: shards read one after the other, from any position, each sample once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from shoal.core.data.lanes import LaneLayout, locate
from shoal.errors import SampleFailed, ShardChanged, UnusableShard
from shoal.worker.data.fetch import failed, sample_seed
from shoal.worker.data.rng_state import RngState

Open = Callable[[Any], Iterable[Any]]
Lengths = dict[int, int]

# More samples than a shard can have, so that (shard, sample) fits in one number.
SHARD = 1 << 40
NOWHERE = 1 << 62


class Shards:
    """The shards of a stream, each of which can be opened at any sample.

    A shard is a function without arguments that gives an iterator, or something that can be iterated over anew; with
    `open`, it is whatever that takes. A sequence is entered directly, and so is an iterator with a method ``skip(n)``
    that returns how many samples it passed over; of all others the first n are read and thrown away.
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
        """The lengths of those shards that are sequences."""
        if self._open is not None:
            return {}
        return {number: len(shard) for number, shard in enumerate(self._shards) if isinstance(shard, Sequence)}

    def enter(self, number: int, first: int) -> tuple[Iterator[Any], int]:
        """An iterator over this shard, and how many of its first samples it has passed over."""
        shard = self._shards[number]
        if self._open is None and isinstance(shard, Sequence):
            return map(shard.__getitem__, range(first, len(shard))), first
        opened = self._open(shard) if self._open else shard if isinstance(shard, Iterable) else shard()
        found = iter(opened)
        passed = found.skip(first) if first and hasattr(found, "skip") else 0
        if not isinstance(passed, int) or not 0 <= passed <= first:
            raise TypeError(f"skip({first}) of {type(found).__name__} returned {passed!r}, not how many it passed over")
        return found, passed


class Lane:
    """One lane, read forward; the last few steps are kept, because a step that did not commit is taken again."""

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
        self._seed_of_run = layout.seed
        self._numbers = layout.shards_of(number, epoch)
        self._lengths = lengths
        self._window: deque[Any] = deque()
        self._base = 0
        self._place = 0
        self._index = 0
        self._iterator: Iterator[Any] | None = None

    def take(self, position: int, count: int, keep: int) -> tuple[list[Any], bool]:
        """Samples position…position+count, and whether there is one after them; `keep` samples before stay at hand."""
        if not self._base <= position <= self._base + len(self._window):
            self._seek(position)
        self._discard_below(position - keep)
        start = position - self._base
        while len(self._window) <= start + count and self._read():
            pass
        return list(islice(self._window, start, start + count)), len(self._window) > start + count

    def close(self) -> None:
        """Let go of the open shard."""
        if self._iterator is not None and hasattr(self._iterator, "close"):
            self._iterator.close()
        self._iterator = None

    def _seek(self, position: int) -> None:
        """Go back, or over shards that need not be read; within an open shard it is read on."""
        place, rest = locate(self._numbers, position, self._lengths)
        if position > self._base and place <= self._place and self._iterator is not None:
            return
        self.close()
        self._window.clear()
        self._place, self._index, self._base = place, 0, position - rest
        if place < len(self._numbers):
            self._open(rest)
            self._base += self._index

    def _discard_below(self, floor: int) -> None:
        while self._base < floor and (self._window or self._read()):
            self._window.popleft()
            self._base += 1

    def _read(self) -> bool:
        """Bring one more sample into the window; False at the end of the lane."""
        while self._place < len(self._numbers):
            if self._iterator is None:
                self._open(0)
            try:
                self._seed(self._index)
                self._window.append(next(self._iterator))  # type: ignore[arg-type]
            except StopIteration:
                self._learn(ended=True)
                self.close()
                self._place, self._index = self._place + 1, 0
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
        known = self._lengths.get(self._shard)
        if known is None and ended:
            self._lengths[self._shard] = self._index
        elif known is not None and (self._index > known or (ended and self._index != known)):
            raise ShardChanged(
                f"shard {self._shard} now has {self._index if ended else 'more than ' + str(known)} samples",
                where=f"lane {self._number}, epoch {self.epoch}",
                why=f"it had {known} when it was read before",
                do="give every shard the same samples in the same order whenever it is opened",
            )

    @property
    def _shard(self) -> int:
        return self._numbers[self._place]

    def _seed(self, index: int) -> None:
        self._generators.seed(sample_seed(self._seed_of_run, self.epoch, self._shard * SHARD + index))

    def _unreadable(self, which: str, error: Exception) -> SampleFailed:
        # A generator that raised is at its end; whoever tries again must open the shard anew, or samples would be lost.
        self.close()
        self._window.clear()
        self._base = NOWHERE
        what = f"{which} of shard {self._shard} cannot be read: {type(error).__name__}: {error}"
        return failed(what, f"lane {self._number}, epoch {self.epoch}", f"try shard {self._shard} alone", error)


def _unusable(number: int, why: str, do: str) -> UnusableShard:
    return UnusableShard(f"shard {number} of the stream cannot be read", why=why, do=do)
