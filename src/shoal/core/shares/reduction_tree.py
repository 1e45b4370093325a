"""Reduction tree of exact mode: one fixed order of additions, so that sums do not depend on the members.

Floating-point addition is not associative: the sum of a batch's gradients depends on the order of additions, hence on
which member computed what. In exact mode the batch is divided into a fixed number of shards, and their gradients are
added along one fixed binary tree, whichever member holds them. A node (start, stop) is the sum of the shards from start
to stop.
With more than one shard it is the sum of two nodes, of which the left has the largest power of two of shards that
leaves the right at least one. A member with consecutive shards adds what the tree permits and passes on the largest
nodes that it has; as soon as two halves of a node meet, they are added. Addition is commutative, so only the tree
matters, not which half arrives first.

>>> nodes(ShardRange(8, 3, 8))
((3, 4), (4, 8))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

from shoal.core.shares.split import split

Node = tuple[int, int]


@dataclass(frozen=True, slots=True)
class ShardRange:
    """Consecutive shards start…stop of `shards`; if start is beyond stop, the range wraps around the end.

    An empty range need not know how many shards there are.
    """

    shards: int = 0
    start: int = 0
    stop: int = 0

    @property
    def empty(self) -> bool:
        """Whether it holds no shard."""
        return self.start == self.stop

    @property
    def complete(self) -> bool:
        """Whether it holds all shards, in order."""
        return not self.empty and self.start == 0 and self.stop == self.shards


NO_SHARDS = ShardRange()


@dataclass(frozen=True, slots=True)
class TreeMerge:
    """Additions that merge two sequences of nodes into one.

    Operands are numbered: first those that arrived, then our own. Each pair (target, source) adds operand `source` to
    operand `target`, in this order; `kept` are the remaining operands, in the order of their nodes.
    """

    additions: tuple[tuple[int, int], ...]
    kept: tuple[int, ...]


def shard_sizes(size: int, full_size: int, shards: int) -> tuple[int, ...]:
    """Return the sizes of the shards of a batch, where a batch of `full_size` has `shards`; none is empty."""
    return split(size, [1] * max(1, min(size, -(-size * shards // full_size))))


def assign_shards(shares: Sequence[int], shards: int) -> tuple[ShardRange, ...]:
    """Return whole shards for every rank, in proportion to their shares in samples."""
    ends = list(accumulate(split(shards, shares), initial=0))
    return tuple(ShardRange(shards, a, b) if a < b else NO_SHARDS for a, b in pairwise(ends))


@lru_cache(maxsize=1024)
def nodes(held: ShardRange) -> tuple[Node, ...]:
    """Return the fewest nodes of the tree that make up these shards, in order."""
    wraps = held.start > held.stop
    parts = [(held.start, held.shards), (0, held.stop)] if wraps else [(held.start, held.stop)]
    return tuple(node for start, stop in parts for node in _within((0, held.shards), start, stop))


def union(first: ShardRange, then: ShardRange) -> ShardRange:
    """Return the range of `first` followed by `then`; raise ValueError if `then` does not follow."""
    if first.empty or then.empty:
        return then if first.empty else first
    follows = then.start == first.stop % first.shards
    extent = (then.stop - first.start) % first.shards
    disjoint = (extent or first.shards) == _count(first) + _count(then)
    if first.shards != then.shards or not follows or not disjoint:
        raise ValueError(f"{then} does not follow {first}")
    return ShardRange(first.shards, 0 if extent == 0 else first.start, then.stop if extent else first.shards)


@lru_cache(maxsize=4096)
def merge(arrived: ShardRange, own: ShardRange) -> TreeMerge:
    """Return how to add nodes that arrived to our own; a sum replaces our own operand if there is one."""
    first_own = len(nodes(arrived))
    operands = {node: number for number, node in enumerate((*nodes(arrived), *nodes(own)))}
    additions: list[tuple[int, int]] = []

    def operand_of(node: Node) -> int:
        if node in operands:
            return operands[node]
        children = [operand_of(child) for child in _children(node)]
        target, source = sorted(children, key=lambda number: (number < first_own, number))
        additions.append((target, source))
        return target

    kept = tuple(operand_of(node) for node in nodes(union(arrived, own)))
    return TreeMerge(tuple(additions), kept)


@lru_cache(maxsize=4096)
def completed_nodes(shards: int, start: int, shard: int) -> int:
    """Return how many nodes are completed when `shard` is added to consecutive shards that begin at `start`."""
    return len(nodes(ShardRange(shards, start, shard))) + 1 - len(nodes(ShardRange(shards, start, shard + 1)))


def _count(held: ShardRange) -> int:
    return held.shards if held.complete else (held.stop - held.start) % held.shards


def _children(node: Node) -> tuple[Node, Node]:
    start, stop = node
    middle = start + (1 << (stop - start - 1).bit_length() - 1)
    return (start, middle), (middle, stop)


def _within(node: Node, start: int, stop: int) -> tuple[Node, ...]:
    """Return the largest nodes below `node` that lie between start and stop."""
    if node[1] <= start or node[0] >= stop:
        return ()
    if start <= node[0] and node[1] <= stop:
        return (node,)
    left, right = _children(node)
    return (*_within(left, start, stop), *_within(right, start, stop))
