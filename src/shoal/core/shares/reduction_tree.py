"""One fixed tree of sums over the shards of a global batch: whoever adds, the bits come out the same.

A node (start, stop) is the sum of the shards from start to stop. With more than one shard it is the sum of two nodes,
of which the left has the largest power of two of shards that leaves the right one something. A member that holds some
shards in a row adds up what the tree lets it, and passes on the largest nodes that it has; as soon as two halves of a
node meet they are added. Floating-point addition is commutative, so only the tree matters, not who comes first.

>>> nodes(Held(8, 3, 8))
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
    """Shards start…stop of so many, in a row; if start is beyond stop, from start to the end and then from the first.

    Whoever holds none need not know how many there are.
    """

    shards: int = 0
    start: int = 0
    stop: int = 0

    @property
    def empty(self) -> bool:
        return self.start == self.stop

    @property
    def complete(self) -> bool:
        return not self.empty and self.start == 0 and self.stop == self.shards


NO_SHARDS = ShardRange()


@dataclass(frozen=True, slots=True)
class TreeMerge:
    """How two rows of nodes become one.

    Operands are numbered: first those that arrived, then our own. Each addition adds operand `source` to operand
    `target`, in this order; `kept` are the operands that are left, in the order of their nodes.
    """

    additions: tuple[tuple[int, int], ...]
    kept: tuple[int, ...]


def shard_sizes(size: int, whole: int, shards: int) -> tuple[int, ...]:
    """The sizes of the shards of a batch of `size`, where one of `whole` samples has `shards`; none is empty."""
    return split(size, [1] * max(1, min(size, -(-size * shards // whole))))


def assign_shards(shares: Sequence[int], shards: int) -> tuple[ShardRange, ...]:
    """Whole shards for every rank, in proportion to their shares in samples."""
    ends = list(accumulate(split(shards, shares), initial=0))
    return tuple(ShardRange(shards, a, b) if a < b else NO_SHARDS for a, b in pairwise(ends))


@lru_cache(maxsize=1024)
def nodes(held: ShardRange) -> tuple[Node, ...]:
    """The fewest nodes of the tree that make up these shards, in their order."""
    round_the_end = held.start > held.stop
    rows = [(held.start, held.shards), (0, held.stop)] if round_the_end else [(held.start, held.stop)]
    return tuple(node for start, stop in rows for node in _within((0, held.shards), start, stop))


def union(first: ShardRange, then: ShardRange) -> ShardRange:
    """What somebody holds who had `first` and gets `then`, which must follow it."""
    if first.empty or then.empty:
        return then if first.empty else first
    follows = then.start == first.stop % first.shards
    over = (then.stop - first.start) % first.shards
    grown = (over or first.shards) == _count(first) + _count(then)
    if first.shards != then.shards or not follows or not grown:
        raise ValueError(f"{then} does not follow {first}")
    return ShardRange(first.shards, 0, first.shards) if over == 0 else ShardRange(first.shards, first.start, then.stop)


@lru_cache(maxsize=4096)
def merge(arrived: ShardRange, own: ShardRange) -> TreeMerge:
    """How nodes that arrived are added to our own; sums stand where our own nodes stood, whenever there is one."""
    mine = len(nodes(arrived))
    place = {node: number for number, node in enumerate((*nodes(arrived), *nodes(own)))}
    additions: list[tuple[int, int]] = []

    def made(node: Node) -> int:
        if node in place:
            return place[node]
        one, other = (made(child) for child in _children(node))
        target, source = sorted((one, other), key=lambda number: (number < mine, number))
        additions.append((target, source))
        return target

    kept = tuple(made(node) for node in nodes(union(arrived, own)))
    return TreeMerge(tuple(additions), kept)


@lru_cache(maxsize=4096)
def completed_nodes(shards: int, start: int, shard: int) -> int:
    """How many nodes are completed when `shard` is added to a row of shards that begins at `start`."""
    return len(nodes(ShardRange(shards, start, shard))) + 1 - len(nodes(ShardRange(shards, start, shard + 1)))


def _count(held: ShardRange) -> int:
    return held.shards if held.complete else (held.stop - held.start) % held.shards


def _children(node: Node) -> tuple[Node, Node]:
    start, stop = node
    middle = start + (1 << (stop - start - 1).bit_length() - 1)
    return (start, middle), (middle, stop)


def _within(node: Node, start: int, stop: int) -> tuple[Node, ...]:
    """The largest nodes below `node` that lie between start and stop."""
    if node[1] <= start or node[0] >= stop:
        return ()
    if start <= node[0] and node[1] <= stop:
        return (node,)
    left, right = _children(node)
    return (*_within(left, start, stop), *_within(right, start, stop))
