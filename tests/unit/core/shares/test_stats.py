from __future__ import annotations

import pytest

from shoal.core.shares.cost_curve import linear
from shoal.core.shares.stats import describe_change, idle_fraction, slowest_s


def test_idle_fraction_is_the_wait_of_an_average_member() -> None:
    costs = [linear(0, 1), linear(0, 4)]
    assert slowest_s(costs, (8, 8)) == 32
    assert idle_fraction(costs, (8, 8)) == pytest.approx(1 - (8 + 32) / 2 / 32)


def test_reason_gives_one_figure_for_similar_members() -> None:
    costs = [linear(0, 0.001), linear(0, 0.00105), linear(0, 0.004)]
    assert describe_change(("a", "b", "c"), (8, 8, 8), (11, 10, 3), costs).startswith(
        "c takes 4 ms a sample, the others 1 ms: 11, 10, 3 instead of 8, 8, 8"
    )


def test_reason_gives_a_range_for_members_that_differ() -> None:
    costs = [linear(0, 0.001), linear(0, 0.002), linear(0, 0.008)]
    assert describe_change(("a", "b", "c"), (8, 8, 8), (14, 7, 3), costs).startswith(
        "c takes 8 ms a sample, the others 1 ms to 2 ms: "
    )
