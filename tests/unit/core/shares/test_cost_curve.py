"""Cost curves: seconds of a share, and their inverse."""

from __future__ import annotations

import pytest

from shoal.core.shares.cost_curve import CostCurve, isotonic, linear, piecewise

CURVES = {
    "proportional": linear(0.0, 0.5),
    "with a fixed cost": linear(2.0, 0.5),
    "in micro-batches": linear(2.0, 0.5, micro=4),
    "bent": piecewise([4.0, 8.0], [3.0, 9.0], 2.0, None, 0.0),
}


def test_no_samples_take_no_time_but_one_takes_the_fixed_cost() -> None:
    curve = linear(2.0, 0.5)
    assert (curve.seconds(0), curve.seconds(1), curve.seconds(4)) == (0.0, 2.5, 4.0)


def test_every_further_micro_batch_costs_its_fixed_part() -> None:
    curve = linear(2.0, 0.5, micro=4)
    assert [curve.seconds(samples) for samples in (4, 5, 8, 9)] == [4.0, 6.5, 8.0, 10.5]


def test_seconds_are_interpolated_between_knots_and_follow_the_slope_beyond() -> None:
    curve = CURVES["bent"]
    assert [curve.seconds(samples) for samples in (4, 6, 8, 9)] == [3.0, 6.0, 9.0, 11.0]


@pytest.mark.parametrize("curve", CURVES.values(), ids=CURVES)
def test_samples_within_inverts_seconds(curve: CostCurve) -> None:
    for samples in range(1, 40):
        assert abs(curve.samples_within(curve.seconds(samples), 100) - samples) <= 1
    assert curve.samples_within(1e9, 7) == 7
    assert curve.samples_within(-1.0, 7) == 0


def test_isotonic_pools_neighbours_that_decrease_and_keeps_the_weighted_mean() -> None:
    assert isotonic([1.0, 3.0, 2.0, 4.0], [1, 1, 1, 1]) == [1.0, 2.5, 2.5, 4.0]
    assert isotonic([4.0, 1.0], [1, 3]) == [1.75, 1.75]
