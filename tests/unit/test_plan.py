from __future__ import annotations

import pytest

from shoal.core.plan import Equal, Fixed, parse, span
from shoal.errors import BadPlan


def test_equal_shares_differ_by_one_at_most() -> None:
    assert Equal().shares(10, 4) == (3, 3, 2, 2)


def test_a_ghost_gets_nothing_and_the_others_its_part() -> None:
    assert Equal().shares(10, 3, ghosts=(1,)) == (5, 0, 5)
    assert Fixed((3, 1)).shares(8, 2, ghosts=(0,)) == (0, 8)


def test_more_members_than_samples_leave_some_without() -> None:
    assert Equal().shares(2, 4) == (1, 1, 0, 0)


def test_fixed_shares_follow_the_weights() -> None:
    assert Fixed((3, 1)).shares(512, 2) == (384, 128)
    assert Fixed((0.1, 0.2)).shares(10, 2) == (3, 7)


def test_ranks_beyond_the_weights_count_as_the_last() -> None:
    assert Fixed((2, 1)).shares(10, 4) == (4, 2, 2, 2)


def test_somebody_computes_the_batch_even_if_all_weight_is_gone() -> None:
    assert Fixed((1, 0, 0)).shares(8, 3, ghosts=(0,)) == (0, 4, 4)


def test_a_span_is_where_the_shares_before_end() -> None:
    assert [span((3, 0, 2), rank) for rank in range(3)] == [(0, 3), (3, 3), (3, 5)]


def test_a_world_of_ghosts_cannot_share_a_batch() -> None:
    with pytest.raises(ValueError, match="cannot split"):
        Equal().shares(4, 2, ghosts=(0, 1))


def test_plans_are_read_from_text() -> None:
    assert parse("equal") == Equal()
    assert parse("fixed:3,1") == Fixed((3.0, 1.0))


@pytest.mark.parametrize(
    "text", ["", "equals", "equal:1", "fixed:", "fixed:a", "fixed:0,0", "fixed:-1,2", "fixed:inf", "fixed:nan"]
)
def test_other_text_is_refused_with_a_remedy(text: str) -> None:
    with pytest.raises(BadPlan) as caught:
        parse(text)
    assert "fixed:3,1" in caught.value.do
