from __future__ import annotations

import pytest

from shoal.core.shares.cost_curve import linear
from shoal.core.shares.split import EqualShares, FixedShares, by_cost, by_weight, parse, span
from shoal.errors import BadPlan


def test_equal_shares_differ_by_one_at_most() -> None:
    assert EqualShares().shares(10, 4) == (3, 3, 2, 2)


def test_rank_that_is_catching_up_gets_nothing() -> None:
    assert EqualShares().shares(10, 3, catching_up=(1,)) == (5, 0, 5)
    assert FixedShares((3, 1)).shares(8, 2, catching_up=(0,)) == (0, 8)


def test_more_members_than_samples_leave_empty_shares() -> None:
    assert EqualShares().shares(2, 4) == (1, 1, 0, 0)


def test_fixed_shares_follow_the_weights() -> None:
    assert FixedShares((3, 1)).shares(512, 2) == (384, 128)
    assert FixedShares((0.1, 0.2)).shares(10, 2) == (3, 7)


def test_ranks_beyond_the_weights_count_as_the_last() -> None:
    assert FixedShares((2, 1)).shares(10, 4) == (4, 2, 2, 2)


def test_batch_is_split_equally_without_any_weight() -> None:
    assert FixedShares((1, 0, 0)).shares(8, 3, catching_up=(0,)) == (0, 4, 4)


def test_span_starts_where_the_previous_share_ends() -> None:
    assert [span((3, 0, 2), rank) for rank in range(3)] == [(0, 3), (3, 3), (3, 5)]


def test_batch_cannot_be_split_if_all_ranks_are_catching_up() -> None:
    with pytest.raises(ValueError, match="cannot split"):
        EqualShares().shares(4, 2, catching_up=(0, 1))


def test_policies_are_parsed_from_text() -> None:
    assert parse("equal") == EqualShares()
    assert parse("fixed:3,1") == FixedShares((3.0, 1.0))


@pytest.mark.parametrize(
    "text", ["", "equals", "equal:1", "fixed:", "fixed:a", "fixed:0,0", "fixed:-1,2", "fixed:inf", "fixed:nan"]
)
def test_invalid_policy_is_refused_with_a_remedy(text: str) -> None:
    with pytest.raises(BadPlan) as caught:
        parse(text)
    assert "fixed:3,1" in caught.value.do


def test_slow_member_gets_less() -> None:
    assert by_cost(100, [linear(0, 1), linear(0, 4)], [0, 0], [100, 100]) == (80, 20)


def test_fixed_cost_reduces_the_share() -> None:
    assert by_cost(100, [linear(0, 1), linear(20, 1)], [0, 0], [100, 100]) == (60, 40)


def test_member_that_only_slows_the_step_down_is_parked() -> None:
    assert by_cost(10, [linear(0, 1), linear(11, 1)], [0, 0], [10, 10]) == (10, 0)
    assert by_cost(10, [linear(0, 1), linear(11, 1)], [0, 1], [10, 10]) == (9, 1)


def test_excess_over_an_upper_bound_goes_to_the_others() -> None:
    assert by_cost(100, [linear(0, 1), linear(0, 4), linear(0, 4)], [0, 0, 0], [40, 100, 100]) == (40, 30, 30)
    assert by_weight(100, [4, 1, 1], [0, 0, 0], [40, 100, 100]) == (40, 30, 30)


def test_lower_bounds_hold() -> None:
    assert by_cost(100, [linear(0, 1), linear(0, 9)], [0, 30], [100, 100]) == (70, 30)
    assert by_weight(100, [9, 1], [0, 30], [100, 100]) == (70, 30)


def test_batch_below_the_lower_bounds_is_split_in_their_proportion() -> None:
    assert by_cost(6, [linear(0, 1), linear(0, 1)], [8, 4], [10, 10]) == (4, 2)
    assert by_weight(6, [1, 1], [8, 4], [10, 10]) == (4, 2)


def test_batch_smaller_than_the_members_goes_to_the_fastest() -> None:
    assert by_cost(2, [linear(0, 3), linear(0, 1), linear(0, 2)], [0] * 3, [2] * 3) == (0, 2, 0)
    assert by_cost(2, [linear(0, 1)] * 3, [0] * 3, [2] * 3) == (1, 1, 0)


def test_micro_batches_are_filled_before_another_starts() -> None:
    assert by_cost(24, [linear(1, 0.01, micro=8), linear(1, 0.01, micro=16)], [0, 0], [24, 24]) == (8, 16)


def test_ties_go_to_the_first_rank() -> None:
    assert by_cost(7, [linear(0.1, 1)] * 3, [0] * 3, [7] * 3) == (3, 2, 2)


def test_upper_bounds_below_the_batch_are_refused_with_their_sum() -> None:
    for split in (
        lambda: by_cost(10, [linear(0, 1)] * 2, [0, 0], [4, 5]),
        lambda: by_weight(10, [1, 1], [0, 0], [4, 5]),
    ):
        with pytest.raises(BadPlan, match="10 does not fit") as caught:
            split()
        assert "allow 9" in caught.value.why


def test_lower_bound_above_the_upper_bound_is_refused() -> None:
    with pytest.raises(BadPlan) as caught:
        by_cost(10, [linear(0, 1)] * 2, [0, 6], [10, 5])
    assert "lower bound is above its upper bound" in caught.value.why
