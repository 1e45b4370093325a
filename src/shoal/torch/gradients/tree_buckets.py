"""Gradient buckets of exact mode: shards are summed in one fixed tree, whichever member computes them.

Floating-point addition is not associative, so a sum over members depends on how the batch was shared out. Exact mode
cuts the global batch into a fixed number of shards and adds their gradients as a binary tree over shard numbers
prescribes (`core.shares.reduction_tree`). A member has a contiguous range of shards; it adds those that form complete
subtrees by itself, and the exchange adds the remaining nodes, in the tree's order.

While the shards are computed from left to right, the nodes that are complete but cannot be merged yet form a stack.
Each bucket has one buffer per level of that stack: at most about 2 log₂(shards) of them, however many shards the member
has. `_depth` is the level of the shard in progress, and `_merges` how many nodes it completes. Example, a member with
shards 0 to 3 (capital letters are sums):

    shard  stack before  merges  stack after
    0      -             0       a
    1      a             1       A = a+b
    2      A             0       A, c
    3      A, c          2       A + (c+d)

With the member's last shard, each bucket is sent as soon as its gradients are complete, as in `buckets`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shoal.core.shares import reduction_tree
from shoal.core.shares.reduction_tree import NO_SHARDS, ShardRange
from shoal.errors import UnsupportedInExactMode
from shoal.torch.gradients.buckets import Bucket, Buckets, operand
from shoal.worker.collectives.catch_up import ZeroBuffer
from shoal.worker.collectives.exchange import Exchange, TreePartials

# Sums of multiples of this, up to 2³³ in all, are exact in any order.
WEIGHT_STEP = 2.0**-20


def exact_weight(weight: float) -> float:
    """Return the nearest weight whose sums are exact in any order; whole numbers are unchanged."""
    return round(weight / WEIGHT_STEP) * WEIGHT_STEP


def fix_numerics(model: torch.nn.Module, synchronised: bool, threads: int) -> dict[str, Any]:
    """Set the number of threads and return all that the bits of a sum depend on; members must agree on it.

    Raises UnsupportedInExactMode for synchronised BatchNorm and for models that are not on the CPU.
    """
    if synchronised:
        raise UnsupportedInExactMode(
            "exact mode cannot be used with run.sync_batchnorm",
            why="it needs the samples of all members at once, but shards are computed one by one",
            do="remove run.sync_batchnorm: BatchNorm then normalises each shard, which is the same for any members",
        )
    if any(p.device.type != "cpu" for p in model.parameters()):
        raise UnsupportedInExactMode(
            "exact mode runs on CPUs only", why="the model is on another device", do="train without exact="
        )
    torch.set_num_threads(threads or 1)
    capability = torch.backends.cpu.get_cpu_capability()
    return {"threads": torch.get_num_threads(), "cpu": capability, "torch": torch.__version__}


class TreeBuckets(Buckets):
    """Buckets that sum gradients shard by shard in a fixed tree.

    Call `begin_step`, then `begin_shard` and `end_shard` around the backward pass of each shard; for the member's last
    shard `arm` and `finish` instead.
    """

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], statistics: int, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__(parameters, statistics, dtype)
        # Level 0 is the bucket itself; further levels are allocated when the stack grows.
        self._levels: list[list[Bucket]] = [[bucket] for bucket in self._buckets]
        self._index = {id(bucket): number for number, bucket in enumerate(self._buckets)}
        tail = torch.zeros_like(self._buckets[-1].tail)
        self._tail = tail
        self._used, self.statistics = tail[: len(self.parameters)], tail[len(self.parameters) :]
        self._range = NO_SHARDS
        self._shard = -1
        self._depth = self._merges = 0
        self._kept: dict[torch.nn.Parameter, torch.Tensor] = {}
        self._keep_shard = False
        self._in_shard = False

    def begin_step(self, shard_range: ShardRange) -> None:
        """Drop all sums and prepare for the gradients of these shards."""
        self._range, self._shard = shard_range, shard_range.start - 1
        self._depth = self._merges = 0
        self._kept.clear()
        self._in_shard = False

    def begin_shard(self) -> None:
        """Collect the gradients of the next shard from now on."""
        shards, first = self._range.shards, self._range.start
        self._shard += 1
        self._depth += 1 - self._merges if self._shard > first else 0
        self._merges = reduction_tree.completed_nodes(shards, first, self._shard)
        merged_next = (
            self._shard + 1 < self._range.stop and reduction_tree.completed_nodes(shards, first, self._shard + 1) > 0
        )
        # A gradient that the next shard's is added to need not be copied in between.
        self._keep_shard = self._merges == 0 and merged_next
        self._in_shard = True
        self._seen.clear()
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)
        for parameter in self.parameters:
            parameter.grad = None

    def end_shard(self) -> None:
        """Add the shard to the tree; parameters that it did not use count as zero."""
        for bucket in self._buckets:
            self._complete(bucket)
        self._in_shard = False

    def arm(self, exchange: Exchange) -> None:
        super().arm(exchange)
        if not self._range.empty:
            self.begin_shard()

    def disarm(self) -> None:
        super().disarm()
        self._in_shard = False

    def zero_buffers(self) -> list[ZeroBuffer]:
        return [(*operand(torch.zeros_like(bucket.flat)), TreePartials()) for bucket in self._buckets]

    def finish(self, divisor: float, empty: bool) -> None:
        assert self._exchange is not None
        for bucket in self._buckets[self._next :]:
            if not empty:
                self._complete(bucket)
            self._launch()
        for work in self._works:
            work.wait()
        self._exchange, self._in_shard = None, False
        self._tail.copy_(self._buckets[-1].tail)
        if divisor != 1.0:
            self.statistics.div_(divisor)
            for bucket in self._buckets:
                for view in bucket.views:
                    view.div_(divisor)
        self._assign_gradients()

    def _on_gradient(self, parameter: torch.nn.Parameter) -> None:
        if not self._in_shard:
            self._on_other_gradient(parameter)
            return
        self._check_gradient(parameter)
        gradient = parameter.grad
        assert gradient is not None
        parameter.grad = None
        self._seen.add(parameter)
        bucket, index = self._position[parameter]
        self._add(bucket, index, gradient.to_dense() if gradient.is_sparse else gradient)
        bucket.missing -= 1
        if self._exchange is not None:
            while self._next < len(self._buckets) - 1 and self._buckets[self._next].missing == 0:
                self._complete(self._buckets[self._next])
                self._launch()

    def _add(self, bucket: Bucket, index: int, gradient: torch.Tensor) -> None:
        """Add one parameter's gradient to the top of the stack, or push it."""
        parameter = bucket.parameters[index]
        if self._keep_shard:
            self._kept[parameter] = gradient
            return
        if self._merges == 0:
            self._level(bucket, self._depth).views[index].copy_(gradient)
            return
        view = self._level(bucket, self._depth - 1).views[index]
        kept = self._kept.pop(parameter, None)
        if kept is None:
            view.add_(gradient)
        else:
            torch.add(kept, gradient, out=view)

    def _complete(self, bucket: Bucket) -> None:
        """Finish the shard in one bucket: merge the nodes that it completes."""
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
        count = 0 if self._range.empty else self._depth + 1 - self._merges
        nodes = [operand(level.flat)[0] for level in levels[:count]]
        self._next += 1
        self._works.append(self._exchange.reduce(*operand(levels[0].flat), TreePartials(self._range, nodes)))
