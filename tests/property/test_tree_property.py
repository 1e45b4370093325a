"""Whatever the split and wherever the sum starts, the tree gives one result, to the last bit."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from shoal.core.shares.reduction_tree import (
    NO_SHARDS,
    ShardRange,
    assign_shards,
    completed_nodes,
    merge,
    nodes,
    shard_sizes,
    union,
)

Row = list[NDArray[np.float32]]


def leaves(shards: int, seed: int) -> Row:
    random = np.random.default_rng(seed)
    scale = 10.0 ** random.integers(-6, 6, (shards, 5))
    return list((random.standard_normal((shards, 5)) * scale).astype(np.float32))


def by_definition(found: Row) -> NDArray[np.float32]:
    """The tree as it is told: the left half has the largest power of two."""
    if len(found) == 1:
        return found[0]
    half = 1 << (len(found) - 1).bit_length() - 1
    return by_definition(found[:half]) + by_definition(found[half:])


def own_nodes(found: Row, held: ShardRange) -> Row:
    """What a member has after its last shard, adding as it goes along."""
    stack: Row = []
    for shard in range(held.start, held.stop):
        total = found[shard].copy()
        for _ in range(completed_nodes(held.shards, held.start, shard)):
            total = stack.pop() + total
        stack.append(total)
    return stack


def applied(arrived: ShardRange, rows: Row, own: ShardRange, mine: Row) -> Row:
    operands = [row.copy() for row in rows + mine]
    how = merge(arrived, own)
    for target, source in how.additions:
        operands[target] += operands[source]
    return [operands[number] for number in how.kept]


@given(
    shares=st.lists(st.integers(0, 20), min_size=1, max_size=9).filter(any),
    shards=st.integers(1, 70),
    first=st.integers(0, 8),
    seed=st.integers(0, 99),
)
def test_every_split_sums_to_the_same_bits(shares: list[int], shards: int, first: int, seed: int) -> None:
    found = leaves(shards, seed)
    members = assign_shards(shares, shards)
    held, rows = NO_SHARDS, list[NDArray[np.float32]]()
    for number in range(len(members)):
        own = members[(first + number) % len(members)]
        rows = applied(held, rows, own, own_nodes(found, own))
        held = union(held, own)
        assert len(rows) == len(nodes(held)) <= 2 * shards.bit_length()
    assert held.complete
    assert rows[0].tobytes() == by_definition(found).tobytes()


@given(shards=st.integers(1, 70), start=st.integers(0, 69), count=st.integers(1, 70))
def test_nodes_cover_each_shard_once(shards: int, start: int, count: int) -> None:
    start, count = start % shards, min(count, shards)
    stop = (start + count) % shards or shards
    held = ShardRange(shards, 0, shards) if count == shards else ShardRange(shards, start, stop)
    covered = sorted(shard for a, b in nodes(held) for shard in range(a, b))
    assert covered == sorted((start + i) % shards for i in range(count))


@given(shares=st.lists(st.integers(0, 1000), min_size=1, max_size=20).filter(any), shards=st.integers(1, 300))
def test_each_shard_is_dealt_out_once_in_the_order_of_ranks(shares: list[int], shards: int) -> None:
    dealt = [shard for held in assign_shards(shares, shards) for shard in range(held.start, held.stop)]
    assert dealt == list(range(shards))
    assert all(held.empty for held, share in zip(assign_shards(shares, shards), shares, strict=True) if share == 0)


@given(size=st.integers(1, 5000), whole=st.integers(1, 5000), shards=st.integers(1, 300))
def test_no_shard_is_empty_and_none_larger_than_those_of_a_whole_batch(size: int, whole: int, shards: int) -> None:
    size, shards = min(size, whole), min(shards, whole)
    sizes = shard_sizes(size, whole, shards)
    assert sum(sizes) == size
    assert min(sizes) >= 1
    assert max(sizes) <= max(shard_sizes(whole, whole, shards))
    assert len(shard_sizes(whole, whole, shards)) == shards
