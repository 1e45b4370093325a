from __future__ import annotations

import pytest

from shoal.core.shares.cost_curve import line
from shoal.core.shares.split import EqualShares, FixedShares, by_cost, by_weight, parse, span
from shoal.errors import BadPlan


def test_equal_shares_differ_by_one_at_most() -> None:
    assert EqualShares().shares(10, 4) == (3, 3, 2, 2)


def test_a_ghost_gets_nothing_and_the_others_its_part() -> None:
    assert EqualShares().shares(10, 3, ghosts=(1,)) == (5, 0, 5)
    assert FixedShares((3, 1)).shares(8, 2, ghosts=(0,)) == (0, 8)


def test_more_members_than_samples_leave_some_without() -> None:
    assert EqualShares().shares(2, 4) == (1, 1, 0, 0)


def test_fixed_shares_follow_the_weights() -> None:
    assert FixedShares((3, 1)).shares(512, 2) == (384, 128)
    assert FixedShares((0.1, 0.2)).shares(10, 2) == (3, 7)


def test_ranks_beyond_the_weights_count_as_the_last() -> None:
    assert FixedShares((2, 1)).shares(10, 4) == (4, 2, 2, 2)


def test_somebody_computes_the_batch_even_if_all_weight_is_gone() -> None:
    assert FixedShares((1, 0, 0)).shares(8, 3, ghosts=(0,)) == (0, 4, 4)


def test_a_span_is_where_the_shares_before_end() -> None:
    assert [span((3, 0, 2), rank) for rank in range(3)] == [(0, 3), (3, 3), (3, 5)]


def test_a_world_of_ghosts_cannot_share_a_batch() -> None:
    with pytest.raises(ValueError, match="cannot split"):
        EqualShares().shares(4, 2, ghosts=(0, 1))


def test_plans_are_read_from_text() -> None:
    assert parse("equal") == EqualShares()
    assert parse("fixed:3,1") == FixedShares((3.0, 1.0))


@pytest.mark.parametrize(
    "text", ["", "equals", "equal:1", "fixed:", "fixed:a", "fixed:0,0", "fixed:-1,2", "fixed:inf", "fixed:nan"]
)
def test_other_text_is_refused_with_a_remedy(text: str) -> None:
    with pytest.raises(BadPlan) as caught:
        parse(text)
    assert "fixed:3,1" in caught.value.do


def test_a_slow_member_gets_less() -> None:
    assert by_cost(100, [line(0, 1), line(0, 4)], [0, 0], [100, 100]) == (80, 20)


def test_a_fixed_cost_is_part_of_the_time() -> None:
    assert by_cost(100, [line(0, 1), line(20, 1)], [0, 0], [100, 100]) == (60, 40)


def test_a_member_that_costs_more_than_it_brings_is_parked() -> None:
    assert by_cost(10, [line(0, 1), line(11, 1)], [0, 0], [10, 10]) == (10, 0)
    assert by_cost(10, [line(0, 1), line(11, 1)], [0, 1], [10, 10]) == (9, 1)


def test_what_a_cap_forbids_goes_to_the_others() -> None:
    assert by_cost(100, [line(0, 1), line(0, 4), line(0, 4)], [0, 0, 0], [40, 100, 100]) == (40, 30, 30)
    assert by_weight(100, [4, 1, 1], [0, 0, 0], [40, 100, 100]) == (40, 30, 30)


def test_floors_hold_and_take_from_the_others() -> None:
    assert by_cost(100, [line(0, 1), line(0, 9)], [0, 30], [100, 100]) == (70, 30)
    assert by_weight(100, [9, 1], [0, 30], [100, 100]) == (70, 30)


def test_a_batch_too_small_for_the_floors_is_cut_in_their_proportion() -> None:
    assert by_cost(6, [line(0, 1), line(0, 1)], [8, 4], [10, 10]) == (4, 2)
    assert by_weight(6, [1, 1], [8, 4], [10, 10]) == (4, 2)


def test_a_batch_smaller_than_the_members_goes_to_the_fastest() -> None:
    assert by_cost(2, [line(0, 3), line(0, 1), line(0, 2)], [0] * 3, [2] * 3) == (0, 2, 0)
    assert by_cost(2, [line(0, 1)] * 3, [0] * 3, [2] * 3) == (1, 1, 0)


def test_micro_batches_are_filled_before_another_is_begun() -> None:
    assert by_cost(24, [line(1, 0.01, micro=8), line(1, 0.01, micro=16)], [0, 0], [24, 24]) == (8, 16)


def test_ties_go_to_the_first_rank() -> None:
    assert by_cost(7, [line(0.1, 1)] * 3, [0] * 3, [7] * 3) == (3, 2, 2)


def test_caps_below_the_batch_are_refused_with_their_sum() -> None:
    for cut in (lambda: by_cost(10, [line(0, 1)] * 2, [0, 0], [4, 5]), lambda: by_weight(10, [1, 1], [0, 0], [4, 5])):
        with pytest.raises(BadPlan, match="10 does not fit") as caught:
            cut()
        assert "allow 9" in caught.value.why


def test_a_floor_above_the_cap_is_refused() -> None:
    with pytest.raises(BadPlan) as caught:
        by_cost(10, [line(0, 1)] * 2, [0, 6], [10, 5])
    assert "floor is above its cap" in caught.value.why
