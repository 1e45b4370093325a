"""Exact mode: gradients are summed shard by shard in one fixed tree, so that no bit depends on who computed what.

A member takes each shard's gradients away from the parameters as the backward pass gives them, and adds them to the
largest nodes of the tree that its own shards make up: a few buffers, however many shards it has. The nodes of a bucket
are on their way to the others as soon as the last shard's gradients are in it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch

from shoal.core.data.sample_order import SampleOrder
from shoal.core.shares import reduction_tree
from shoal.core.shares.balancer import ShareBalancer
from shoal.core.shares.reduction_tree import NO_SHARDS, ShardRange
from shoal.core.world import World
from shoal.errors import UnsupportedInExactMode
from shoal.torch.gradients.buckets import Bucket, Buckets, operand
from shoal.worker.collectives.catch_up import ZeroBuffer
from shoal.worker.collectives.exchange import Exchange, TreePartials
from shoal.worker.data.feed import IndexedFeed, MicroBatch
from shoal.worker.data.fetch import ReadKey
from shoal.worker.data.share_loader import ShareLoader, Span

# Sums of multiples of it, up to 2³³ in all, are exact in any order.
WEIGHT_STEP = 2.0**-20


def exact_weight(weight: float) -> float:
    """The nearest weight whose sums are the same in any order; whole numbers stay as they are."""
    return round(weight / WEIGHT_STEP) * WEIGHT_STEP


def make_alike(model: torch.nn.Module, synchronised: bool, threads: int) -> dict[str, Any]:
    """Fix what else the bits depend on, and tell it: members that differ in it must not train together."""
    if synchronised:
        raise UnsupportedInExactMode(
            "exact mode cannot be used with run.sync_batchnorm",
            why="its statistics are those of all members at once, but shards are computed one by one",
            do="leave BatchNorm as it is: it normalises each shard, which is the same for any membership",
        )
    if any(p.device.type != "cpu" for p in model.parameters()):
        raise UnsupportedInExactMode(
            "exact mode is for CPUs", why="the model is on another device", do="train without exact="
        )
    torch.set_num_threads(threads or 1)
    capability = torch.backends.cpu.get_cpu_capability()
    return {"threads": torch.get_num_threads(), "cpu": capability, "torch": torch.__version__}


class ShardLoader(ShareLoader):
    """Reads slices of global batches that begin and end with shards, in pieces of one shard each."""

    def __init__(self, shards: int, order: SampleOrder, *how: Any) -> None:
        super().__init__(order, *how)
        self._shards = shards
        if not 1 <= shards <= order.size:
            raise UnsupportedInExactMode(
                f"a global batch of {order.size} samples cannot be cut into {shards} shards",
                do=f"pass exact=1 to {order.size}; 8 to 32 is usual",
            )
        if self.micro_batch_size is not None:
            raise UnsupportedInExactMode(
                "exact and micro exclude each other", do="raise exact= until one shard fits into memory"
            )

    def bounds(self, step: int) -> list[int]:
        """Where the shards of a step begin, and where the last one ends."""
        sizes = reduction_tree.shard_sizes(self.order.size_of(step), self.order.size, self._shards)
        return list(accumulate(sizes, initial=0))

    def sizes_of(self, step: int, span: Span) -> tuple[int, ...]:
        """How many samples of a span each of its shards has."""
        start, stop = span
        shards = pairwise(self.bounds(step))
        return tuple(min(b, stop) - max(a, start) for a, b in shards if a < stop and b > start)

    def _key(self, step: int, span: Span) -> ReadKey:
        return super()._key(step, span)._replace(micro_batch_size=self.sizes_of(step, span))


class ShardFeed(IndexedFeed):
    """Global batches of which each member gets whole shards, one by one."""

    _loader: ShardLoader

    def __init__(self, order: SampleOrder, loader: ShardLoader, balance: ShareBalancer) -> None:
        super().__init__(order, loader, balance)
        self.shard_range = NO_SHARDS

    @property
    def micro_batch_size(self) -> int | None:
        return None

    def halve_micro_batch(self, samples: int) -> bool:  # noqa: ARG002
        """Shards are what they are."""
        return False

    def micro_batches(self, step: int, world: World, rank: int, ghosts: Collection[int]) -> list[MicroBatch]:
        found = super().micro_batches(step, world, rank, ghosts)
        self.shard_range = self._dealt(step, tuple(seat.member for seat in world.seats), rank, ghosts)
        self.units = self.shard_range.stop - self.shard_range.start
        return found

    def _sizes(self, step: int, span: Span) -> tuple[int, ...]:
        return self._loader.sizes_of(step, span)

    def _dealt(self, step: int, members: Sequence[str], rank: int, ghosts: Collection[int]) -> ShardRange:
        count = len(self._loader.bounds(step)) - 1
        return reduction_tree.assign_shards(self.balancer.shares(step, count, members, ghosts), count)[rank]

    def _span(self, step: int, members: Sequence[str], rank: int, ghosts: Collection[int]) -> Span:
        ends, held = self._loader.bounds(step), self._dealt(step, members, rank, ghosts)
        return ends[held.start], ends[held.stop]


class TreeBuckets(Buckets):
    """The gradients of a model, shard by shard; afterwards those of the whole global batch.

    `open` before the backward pass of a shard, `shut` after it; for the member's last shard `arm` and `finish`.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], statistics: int) -> None:
        super().__init__(parameters, statistics)
        # Level 0 is the bucket itself; further ones are made when a member's shards need them.
        self._levels: list[list[Bucket]] = [[bucket] for bucket in self._buckets]
        self._index = {id(bucket): number for number, bucket in enumerate(self._buckets)}
        tail = torch.zeros_like(self._buckets[-1].tail)
        self._tail = tail
        self._used, self.statistics = tail[: len(self.parameters)], tail[len(self.parameters) :]
        self._held = NO_SHARDS
        self._shard = -1
        self._depth = self._merges = 0
        self._keeps: dict[torch.nn.Parameter, torch.Tensor] = {}
        self._keep_this = False
        self._is_open = False

    def begin(self, held: ShardRange) -> None:
        """A step begins, or begins anew: forget what was summed before."""
        self._held, self._shard = held, held.start - 1
        self._depth = self._merges = 0
        self._keeps.clear()
        self._is_open = False

    def open(self) -> None:
        """The gradients of the next shard follow."""
        held = self._held
        self._shard += 1
        self._depth += 1 - self._merges if self._shard > held.start else 0
        self._merges = reduction_tree.completed_nodes(held.shards, held.start, self._shard)
        follows = (
            self._shard + 1 < held.stop and reduction_tree.completed_nodes(held.shards, held.start, self._shard + 1) > 0
        )
        # A gradient that is added to the next shard's need not be copied in between.
        self._keep_this = self._merges == 0 and follows
        self._is_open = True
        self._seen.clear()
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)
        for parameter in self.parameters:
            parameter.grad = None

    def shut(self) -> None:
        """The shard's gradients are complete; whoever has none here has zero."""
        for bucket in self._buckets:
            self._complete(bucket)
        self._is_open = False

    def arm(self, exchange: Exchange) -> None:
        super().arm(exchange)
        if not self._held.empty:
            self.open()

    def disarm(self) -> None:
        super().disarm()
        self._is_open = False

    def zero_buffers(self) -> list[ZeroBuffer]:
        return [(*operand(torch.zeros_like(bucket.flat)), TreePartials()) for bucket in self._buckets]

    def finish(self, divisor: float, empty: bool) -> None:
        assert self._exchange is not None
        for bucket in self._buckets[self._next :]:
            if not empty:
                self._complete(bucket)
            self._launch()
        for ticket in self._tickets:
            ticket.wait()
        self._exchange, self._is_open = None, False
        self._tail.copy_(self._buckets[-1].tail)
        if divisor != 1.0:
            self.statistics.div_(divisor)
            for bucket in self._buckets:
                for view in bucket.views:
                    view.div_(divisor)
        self._hand_out()

    def _arrived(self, parameter: torch.nn.Parameter) -> None:
        if not self._is_open:
            return
        self._check_arrival(parameter)
        gradient = parameter.grad
        assert gradient is not None
        parameter.grad = None
        self._seen.add(parameter)
        bucket, index = self._place[parameter]
        self._add(bucket, index, gradient.to_dense() if gradient.is_sparse else gradient)
        bucket.missing -= 1
        if self._exchange is not None:
            while self._next < len(self._buckets) - 1 and self._buckets[self._next].missing == 0:
                self._complete(self._buckets[self._next])
                self._launch()

    def _add(self, bucket: Bucket, index: int, gradient: torch.Tensor) -> None:
        """Put one parameter's gradient where the tree wants it."""
        parameter = bucket.parameters[index]
        if self._keep_this:
            self._keeps[parameter] = gradient
            return
        if self._merges == 0:
            self._level(bucket, self._depth).views[index].copy_(gradient)
            return
        view = self._level(bucket, self._depth - 1).views[index]
        kept = self._keeps.pop(parameter, None)
        if kept is None:
            view.add_(gradient)
        else:
            torch.add(kept, gradient, out=view)

    def _complete(self, bucket: Bucket) -> None:
        """All of one shard is in this bucket: add up the nodes that it completes."""
        if bucket.missing:
            for index, parameter in enumerate(bucket.parameters):
                if parameter not in self._seen:
                    self._add(bucket, index, torch.zeros_like(parameter, requires_grad=False))
        if bucket is self._buckets[-1]:
            self._add_tail(bucket)
        for level in range(self._depth - 1, self._depth - self._merges, -1):
            self._level(bucket, level - 1).flat.add_(self._level(bucket, level).flat)

    def _add_tail(self, bucket: Bucket) -> None:
        if len(self._seen) == len(self.parameters):
            self._used.fill_(1.0)
        else:
            self._used.zero_()
            self._used[[self._number[parameter] for parameter in self._seen]] = 1.0
        if self._merges == 0:
            self._level(bucket, self._depth).tail.copy_(self._tail)
        else:
            self._level(bucket, self._depth - 1).tail.add_(self._tail)

    def _level(self, bucket: Bucket, level: int) -> Bucket:
        levels = self._levels[self._index[id(bucket)]]
        while len(levels) <= level:
            levels.append(Bucket(bucket.parameters, bucket.tail.numel(), like=bucket.flat))
        return levels[level]

    def _launch(self) -> None:
        assert self._exchange is not None
        levels = self._levels[self._next]
        count = 0 if self._held.empty else self._depth + 1 - self._merges
        held = [operand(level.flat)[0] for level in levels[:count]]
        self._next += 1
        self._tickets.append(self._exchange.reduce(*operand(levels[0].flat), TreePartials(self._held, held)))
