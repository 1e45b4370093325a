from __future__ import annotations

import pytest

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


def test_member_holds_the_largest_nodes_of_its_shards() -> None:
    assert nodes(ShardRange(8, 0, 4)) == ((0, 4),)
    assert nodes(ShardRange(8, 3, 8)) == ((3, 4), (4, 8))
    assert nodes(ShardRange(8, 1, 7)) == ((1, 2), (2, 4), (4, 6), (6, 7))
    assert nodes(NO_SHARDS) == ()


def test_range_that_wraps_around_has_two_parts() -> None:
    assert nodes(ShardRange(8, 6, 3)) == ((6, 8), (0, 2), (2, 3))


def test_any_number_of_shards_has_a_tree() -> None:
    assert nodes(ShardRange(13, 0, 13)) == ((0, 13),)
    assert nodes(ShardRange(13, 8, 13)) == ((8, 13),)
    assert nodes(ShardRange(13, 5, 12)) == ((5, 6), (6, 8), (8, 12))


def test_adjacent_ranges_are_joined() -> None:
    assert union(ShardRange(8, 3, 5), ShardRange(8, 5, 8)) == ShardRange(8, 3, 8)
    assert union(ShardRange(8, 3, 8), ShardRange(8, 0, 2)) == ShardRange(8, 3, 2)
    assert union(ShardRange(8, 3, 8), ShardRange(8, 0, 3)) == ShardRange(8, 0, 8)
    assert union(NO_SHARDS, ShardRange(8, 2, 3)) == union(ShardRange(8, 2, 3), NO_SHARDS) == ShardRange(8, 2, 3)


@pytest.mark.parametrize(
    "then", [ShardRange(8, 6, 7), ShardRange(8, 4, 6), ShardRange(9, 5, 6), ShardRange(8, 5, 4), ShardRange(8, 0, 8)]
)
def test_ranges_that_do_not_follow_are_refused(then: ShardRange) -> None:
    with pytest.raises(ValueError, match="does not follow"):
        union(ShardRange(8, 3, 5), then)


def test_halves_of_a_node_are_added_when_they_meet() -> None:
    merged = merge(ShardRange(8, 3, 6), ShardRange(8, 6, 8))
    assert merged.additions == ((2, 1),), "our own operand holds the sum"
    assert merged.kept == (0, 2)


def test_complete_sum_replaces_our_first_operand() -> None:
    assert merge(ShardRange(8, 5, 3), ShardRange(8, 3, 5)).kept == (len(nodes(ShardRange(8, 5, 3))),)
    assert merge(NO_SHARDS, ShardRange(5, 0, 5)).kept == (0,)


def test_consecutive_shards_complete_nodes_like_a_binary_counter() -> None:
    assert [completed_nodes(8, 0, shard) for shard in range(8)] == [0, 1, 0, 2, 0, 1, 0, 3]
    assert [completed_nodes(8, 3, shard) for shard in range(3, 8)] == [0, 0, 1, 0, 2]
    assert [completed_nodes(5, 0, shard) for shard in range(5)] == [0, 1, 0, 2, 1], (
        "the last shard has no sibling to wait for"
    )


def test_whole_shards_are_assigned_in_proportion_to_shares() -> None:
    assert assign_shards((8, 0, 8, 8), 8) == (ShardRange(8, 0, 3), NO_SHARDS, ShardRange(8, 3, 6), ShardRange(8, 6, 8))
    assert assign_shards((30, 2), 8) == (ShardRange(8, 0, 8), NO_SHARDS)


def test_short_batch_has_fewer_shards_of_the_same_size() -> None:
    assert shard_sizes(24, 24, 8) == (3,) * 8
    assert shard_sizes(26, 26, 8) == (4, 4, 3, 3, 3, 3, 3, 3)
    assert shard_sizes(10, 24, 8) == (3, 3, 2, 2)
    assert shard_sizes(3, 3, 8) == (1, 1, 1)
