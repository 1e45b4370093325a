"""Feed of exact mode: members get whole shards of every global batch, one shard per micro-batch.

The global batch is cut into a fixed number of shards, independent of the members (see `torch.gradients.tree_buckets`
for the reason). Shares are still balanced by speed, but in units of shards.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate, pairwise
from typing import Any

from shoal.core.data.sample_order import SampleOrder
from shoal.core.nouns import counted
from shoal.core.shares import reduction_tree
from shoal.core.shares.balancer import ShareBalancer
from shoal.core.shares.reduction_tree import NO_SHARDS, ShardRange
from shoal.core.world import World
from shoal.errors import UnsupportedInExactMode
from shoal.worker.data.feed import IndexedFeed, MicroBatch
from shoal.worker.data.fetch import ReadKey
from shoal.worker.data.share_loader import ShareLoader, Span


class ShardLoader(ShareLoader):
    """Loader of slices of global batches, in micro-batches of one shard each."""

    def __init__(self, shards: int, order: SampleOrder, *how: Any) -> None:
        super().__init__(order, *how)
        self._shards = shards
        if not 1 <= shards <= order.size:
            raise UnsupportedInExactMode(
                f"invalid exact={shards} for a global batch of {counted(order.size, 'sample')}",
                do=f"pass 1 to {counted(order.size, 'shard')}; 8 to 32 is usual",
            )
        if self.micro_batch_size is not None:
            raise UnsupportedInExactMode(
                "exact and micro exclude each other", do="raise exact= until one shard fits into memory"
            )

    def bounds(self, step: int) -> list[int]:
        """Return the position in the batch where each shard of a step begins, and where the last one ends."""
        sizes = reduction_tree.shard_sizes(self.order.size_of(step), self.order.size, self._shards)
        return list(accumulate(sizes, initial=0))

    def sizes_of(self, step: int, span: Span) -> tuple[int, ...]:
        """Return how many samples of a span each of its shards has."""
        start, stop = span
        shards = pairwise(self.bounds(step))
        return tuple(min(b, stop) - max(a, start) for a, b in shards if a < stop and b > start)

    def _key(self, step: int, span: Span) -> ReadKey:
        return super()._key(step, span)._replace(micro_batch_size=self.sizes_of(step, span))


class ShardFeed(IndexedFeed):
    """Feed that gives each member whole shards; `shard_range` are those of the last step given out."""

    _loader: ShardLoader

    def __init__(self, order: SampleOrder, loader: ShardLoader, balance: ShareBalancer) -> None:
        super().__init__(order, loader, balance)
        self.shard_range = NO_SHARDS

    @property
    def micro_batch_size(self) -> int | None:
        return None

    def halve_micro_batch(self, samples: int) -> bool:  # noqa: ARG002
        """Return False: a shard cannot get smaller, or the result would change."""
        return False

    def micro_batches(self, step: int, world: World, rank: int, catching_up: Collection[int]) -> list[MicroBatch]:
        micro_batches = super().micro_batches(step, world, rank, catching_up)
        self.shard_range = self._assigned(step, tuple(seat.member for seat in world.seats), rank, catching_up)
        self.units = self.shard_range.stop - self.shard_range.start
        return micro_batches

    def _limit_micro_batch(self, member: str) -> None:
        """Do nothing: shards are the micro-batches."""

    def _share_units(self, step: int) -> int:  # noqa: ARG002
        return 0

    def _sizes(self, step: int, span: Span) -> tuple[int, ...]:
        return self._loader.sizes_of(step, span)

    def _assigned(self, step: int, members: Sequence[str], rank: int, catching_up: Collection[int]) -> ShardRange:
        count = len(self._loader.bounds(step)) - 1
        return reduction_tree.assign_shards(self.balancer.shares(step, count, members, catching_up), count)[rank]

    def _span(self, step: int, members: Sequence[str], rank: int, catching_up: Collection[int]) -> Span:
        bounds, shards = self._loader.bounds(step), self._assigned(step, members, rank, catching_up)
        return bounds[shards.start], bounds[shards.stop]
