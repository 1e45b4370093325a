"""What feeds local training: this member's share of a round, as batches that are read when they are due."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.core.data.rounds import RoundOrder, local_batches
from shoal.core.shares.balancer import ShareBalancer
from shoal.core.world import World
from shoal.worker.data.feed import IndexedFeed, MicroBatch, told
from shoal.worker.data.fetch import Batch, ReadKey, cut
from shoal.worker.data.share_loader import Foresight, ShareLoader, Span

# A round is many steps long: one of them tells as much of the members' speeds as several steps do.
FIRST_ROUNDS = (1, 2, 4)


class BatchLoader(ShareLoader):
    """Reads one batch after the other, not all of a round at once."""

    def batch(self, key: ReadKey, foresee: Foresight) -> list[Batch]:
        """The pieces of one batch; `foresee` names those that follow, by their number."""
        if self._ahead:
            pieces: list[Batch] = self._ahead.get(key, foresee)
            return pieces
        return self._get(key, lambda _: None)

    def look_ahead(self, number: int, foresee: Foresight) -> None:
        """Read what follows batch `number`, without waiting for anything."""
        if self._ahead:
            self._ahead.look_ahead(number, foresee)


@dataclass(frozen=True, slots=True)
class LocalBatch:
    """One batch of a round: how many samples it has, and which of the round's pieces make it up."""

    samples: int
    first: int
    last: int


class _LazyMicroBatch(MicroBatch):
    """A piece that is read when it is given out."""

    def take(self) -> Any:
        return self.batch()


class RoundFeed(IndexedFeed):
    """Rounds of a map-style dataset; `lots` are the batches of this member's share, `read_s` what reading them took."""

    _order: RoundOrder
    _loader: BatchLoader

    def __init__(self, order: RoundOrder, loader: BatchLoader, balance: ShareBalancer) -> None:
        super().__init__(order, loader, balance)
        self.local_batches: list[LocalBatch] = []
        self.read_s = 0.0
        self._members = 1
        # Batches are numbered through, so that those of the next round can be read ahead.
        self._step, self._first, self._count = 0, 0, 0

    @property
    def micro_batch_size(self) -> int | None:
        """The largest piece that this member computes at once."""
        local = -(-self._order.batch // self._members)
        return min(local, self._loader.micro_batch_size or local)

    def global_batches_in(self, step: int) -> int:
        """How many global batches a round is worth."""
        return self._order.batches_in(step)

    def global_batches_due(self, step: int, batches: int) -> int:
        """How many of those have passed after so many batches of this member's own, of its share of this round."""
        return batches * self._order.batches_in(step) // len(self.local_batches)

    def micro_batches(self, step: int, world: World, rank: int, ghosts: Collection[int]) -> list[MicroBatch]:
        members = told(self.balancer, world)
        start, stop = self._span(step, members, rank, ghosts)
        self._first += self._count if step != self._step else 0
        sizes = local_batches(stop - start, self._order.batch, world.size)
        self._step, self._members, self._count = step, world.size, len(sizes)
        self.units, self.read_s, self.local_batches = stop - start, 0.0, []
        foresee = self._foresight(step, (start, stop), members, rank)
        found: list[MicroBatch] = []
        for number, samples in enumerate(sizes, self._first):
            parts = cut(samples, self._loader.micro_batch_size)
            self.local_batches.append(LocalBatch(samples, len(found), len(found) + len(parts) - 1))
            read = _LazyBatch(lambda number=number: self._read(number, foresee))  # type: ignore[misc]
            found += [_LazyMicroBatch(read.next, part) for part in parts]
        if not found:
            # The workers read ahead for the rounds in which the share is not empty.
            self.local_batches = [LocalBatch(0, 0, 0)]
            found = [MicroBatch(self._loader.placeholder_batch(step), 0)]
            self._loader.look_ahead(self._first - 1, foresee)
        return found

    def _read(self, number: int, foresee: Foresight) -> list[Batch]:
        began = time.perf_counter()
        key = foresee(number)
        assert key is not None
        pieces = self._loader.batch(key, foresee)
        self.read_s += time.perf_counter() - began
        return pieces

    def _foresight(self, step: int, span: Span, members: Sequence[str], rank: int) -> Foresight:
        first, micro = self._first, self._loader.micro_batch_size
        known: dict[int, list[ReadKey]] = {}

        def keys_of(later: int) -> list[ReadKey]:
            if later not in known:
                start, stop = span if later == step else self._span(later, members, rank, ())
                place, at, known[later] = self._order.position(later), start, []
                for samples in local_batches(stop - start, self._order.batch, len(members)):
                    begin = place.first + at
                    known[later].append(ReadKey(0, begin, begin + samples, micro, epoch=place.epoch))
                    at += samples
            return known[later]

        def foresee(number: int) -> ReadKey | None:
            later, on = step, number - first
            while not self.ended(later):
                keys = keys_of(later)
                if on < len(keys):
                    return keys[on]._replace(step=number)
                if not keys and later > step:
                    return None
                later, on = later + 1, on - len(keys)
            return None

        return foresee


class _LazyBatch:
    """The pieces of one batch, which are read together when the first of them is asked for."""

    def __init__(self, read: Callable[[], list[Batch]]) -> None:
        self._read = read
        self._left: list[Batch] = []

    def next(self) -> Batch:
        self._left = self._left or self._read()
        return self._left.pop(0)
