"""The tree gives the same bits for every split of the shards and every start of the ring."""

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


def by_definition(shards: Row) -> NDArray[np.float32]:
    """Return the sum along the tree: the left half has the largest power of two."""
    if len(shards) == 1:
        return shards[0]
    half = 1 << (len(shards) - 1).bit_length() - 1
    return by_definition(shards[:half]) + by_definition(shards[half:])


def own_nodes(gradients: Row, held: ShardRange) -> Row:
    """Return the nodes of a member that adds its shards one by one."""
    stack: Row = []
    for shard in range(held.start, held.stop):
        total = gradients[shard].copy()
        for _ in range(completed_nodes(held.shards, held.start, shard)):
            total = stack.pop() + total
        stack.append(total)
    return stack


def merged(arrived: ShardRange, arrived_rows: Row, own: ShardRange, own_rows: Row) -> Row:
    operands = [row.copy() for row in arrived_rows + own_rows]
    plan = merge(arrived, own)
    for target, source in plan.additions:
        operands[target] += operands[source]
    return [operands[number] for number in plan.kept]


@given(
    shares=st.lists(st.integers(0, 20), min_size=1, max_size=9).filter(any),
    shards=st.integers(1, 70),
    first=st.integers(0, 8),
    seed=st.integers(0, 99),
)
def test_every_split_sums_to_the_same_bits(shares: list[int], shards: int, first: int, seed: int) -> None:
    gradients = leaves(shards, seed)
    members = assign_shards(shares, shards)
    held, rows = NO_SHARDS, list[NDArray[np.float32]]()
    for number in range(len(members)):
        own = members[(first + number) % len(members)]
        rows = merged(held, rows, own, own_nodes(gradients, own))
        held = union(held, own)
        assert len(rows) == len(nodes(held)) <= 2 * shards.bit_length()
    assert held.complete
    assert rows[0].tobytes() == by_definition(gradients).tobytes()


@given(shards=st.integers(1, 70), start=st.integers(0, 69), count=st.integers(1, 70))
def test_nodes_cover_each_shard_once(shards: int, start: int, count: int) -> None:
    start, count = start % shards, min(count, shards)
    stop = (start + count) % shards or shards
    held = ShardRange(shards, 0, shards) if count == shards else ShardRange(shards, start, stop)
    covered = sorted(shard for a, b in nodes(held) for shard in range(a, b))
    assert covered == sorted((start + i) % shards for i in range(count))


@given(shares=st.lists(st.integers(0, 1000), min_size=1, max_size=20).filter(any), shards=st.integers(1, 300))
def test_each_shard_is_assigned_once_in_rank_order(shares: list[int], shards: int) -> None:
    assigned = [shard for held in assign_shards(shares, shards) for shard in range(held.start, held.stop)]
    assert assigned == list(range(shards))
    assert all(held.empty for held, share in zip(assign_shards(shares, shards), shares, strict=True) if share == 0)


@given(size=st.integers(1, 5000), full=st.integers(1, 5000), shards=st.integers(1, 300))
def test_no_shard_is_empty_or_larger_than_in_a_full_batch(size: int, full: int, shards: int) -> None:
    size, shards = min(size, full), min(shards, full)
    sizes = shard_sizes(size, full, shards)
    assert sum(sizes) == size
    assert min(sizes) >= 1
    assert max(sizes) <= max(shard_sizes(full, full, shards))
    assert len(shard_sizes(full, full, shards)) == shards
