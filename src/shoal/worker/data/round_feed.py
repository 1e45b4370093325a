"""Feed of local SGD: a member's share of a round, as local batches that are read when they are due."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.core.data.rounds import RoundOrder, local_batches
from shoal.core.shares.balancer import ShareBalancer
from shoal.core.world import World
from shoal.worker.data.feed import IndexedFeed, MicroBatch, register_members
from shoal.worker.data.fetch import Batch, ReadKey, micro_batch_sizes
from shoal.worker.data.share_loader import PredictRead, ShareLoader, Span

# A round is many steps long: one round shows as much of the members' speeds as several steps do.
FIRST_ROUNDS = (1, 2, 4)


class BatchLoader(ShareLoader):
    """Loader of one local batch at a time instead of a whole round."""

    def batch(self, key: ReadKey, predict: PredictRead) -> list[Batch]:
        """Return the micro-batches of one local batch; `predict` names later ones by their number."""
        if self._ahead:
            batches: list[Batch] = self._ahead.get(key, predict)
            return batches
        return self._get(key, lambda _: None)

    def look_ahead(self, number: int, predict: PredictRead) -> None:
        """Start reading what follows batch `number`; return at once."""
        if self._ahead:
            self._ahead.look_ahead(number, predict)


@dataclass(frozen=True, slots=True)
class LocalBatch:
    """One batch of a round: how many samples it has, and the first and last of the round's micro-batches in it."""

    samples: int
    first: int
    last: int


class _LazyMicroBatch(MicroBatch):
    """A micro-batch that is read when it is given to the loop body; `batch` is the function that reads it."""

    def take(self) -> Any:
        return self.batch()


class RoundFeed(IndexedFeed):
    """Rounds of a map-style dataset; a step of this feed is a round.

    `local_batches` are the batches of this member's share, and `read_s` is how long reading them took.
    """

    _order: RoundOrder
    _loader: BatchLoader

    def __init__(self, order: RoundOrder, loader: BatchLoader, balancer: ShareBalancer) -> None:
        super().__init__(order, loader, balancer)
        self.local_batches: list[LocalBatch] = []
        self.read_s = 0.0
        self._members = 1
        # Batches are numbered across rounds, so that those of the next round can be read ahead.
        self._step, self._first, self._count = 0, 0, 0

    @property
    def micro_batch_size(self) -> int | None:
        """The largest number of samples that this member computes at once."""
        local = -(-self._order.batch // self._members)
        return min(local, self._loader.micro_batch_size or local)

    def global_batches_in(self, step: int) -> int:
        """Return how many global batches a round corresponds to."""
        return self._order.batches_in(step)

    def global_batches_due(self, step: int, batches: int) -> int:
        """Return how many global batches of a round have passed after so many of this member's local batches."""
        return batches * self._order.batches_in(step) // len(self.local_batches)

    def micro_batches(self, step: int, world: World, rank: int, catching_up: Collection[int]) -> list[MicroBatch]:
        """Return this member's share of a round; each local batch is read when its first micro-batch is taken."""
        members = register_members(self.balancer, world)
        self._limit_micro_batch(members[rank])
        start, stop = self._span(step, members, rank, catching_up)
        self._first += self._count if step != self._step else 0
        sizes = local_batches(stop - start, self._order.batch, world.size)
        self._step, self._members, self._count = step, world.size, len(sizes)
        self.units, self.read_s, self.local_batches = stop - start, 0.0, []
        predict = self._predict_batches(step, (start, stop), members, rank)
        batches: list[MicroBatch] = []
        for number, samples in enumerate(sizes, self._first):
            parts = micro_batch_sizes(samples, self._loader.micro_batch_size)
            self.local_batches.append(LocalBatch(samples, len(batches), len(batches) + len(parts) - 1))
            lazy = _LazyBatch(lambda number=number: self._read(number, predict))  # type: ignore[misc]
            batches += [_LazyMicroBatch(lazy.next, part) for part in parts]
        if not batches:
            # Workers then read ahead for the rounds in which the share is not empty.
            self.local_batches = [LocalBatch(0, 0, 0)]
            batches = [MicroBatch(self._loader.placeholder_batch(step), 0)]
            self._loader.look_ahead(self._first - 1, predict)
        return batches

    def _limit_micro_batch(self, member: str) -> None:
        """Compute no more samples at once than this member's maximum; what it reported are local batches, no limit."""
        limit = self.balancer.settings.most_at_once(member)
        if limit is not None:
            self.limit_micro_batch(limit)

    def _share_units(self, step: int) -> int:  # noqa: ARG002
        return 0

    def _read(self, number: int, predict: PredictRead) -> list[Batch]:
        began = time.perf_counter()
        key = predict(number)
        assert key is not None
        batches = self._loader.batch(key, predict)
        self.read_s += time.perf_counter() - began
        return batches

    def _predict_batches(self, step: int, span: Span, members: Sequence[str], rank: int) -> PredictRead:
        """Return the prediction for batch numbers from this round on, across the following rounds."""
        first, micro_batch_size = self._first, self._loader.micro_batch_size
        keys_by_round: dict[int, list[ReadKey]] = {}

        def keys_of(later: int) -> list[ReadKey]:
            if later not in keys_by_round:
                start, stop = span if later == step else self._span(later, members, rank, ())
                position, at, keys = self._order.position(later), start, []
                for samples in local_batches(stop - start, self._order.batch, len(members)):
                    begin = position.first + at
                    keys.append(ReadKey(0, begin, begin + samples, micro_batch_size, epoch=position.epoch))
                    at += samples
                keys_by_round[later] = keys
            return keys_by_round[later]

        def predict(number: int) -> ReadKey | None:
            later, index = step, number - first
            while not self.ended(later):
                keys = keys_of(later)
                if index < len(keys):
                    return keys[index]._replace(step=number)
                if not keys and later > step:
                    return None
                later, index = later + 1, index - len(keys)
            return None

        return predict


class _LazyBatch:
    """The micro-batches of one local batch, read together when the first of them is requested."""

    def __init__(self, read: Callable[[], list[Batch]]) -> None:
        self._read = read
        self._remaining: list[Batch] = []

    def next(self) -> Batch:
        self._remaining = self._remaining or self._read()
        return self._remaining.pop(0)
