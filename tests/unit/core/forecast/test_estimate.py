from __future__ import annotations

import math

import pytest

from shoal.core.forecast.estimate import Estimate, student_quantile


@pytest.mark.parametrize(
    ("freedom", "exact", "error"), [(1, 6.314, 0.06), (2, 2.920, 0.01), (4, 2.132, 0.001), (30, 1.697, 0.001)]
)
def test_quantiles_of_student_agree_with_the_table(freedom: int, exact: float, error: float) -> None:
    assert student_quantile(0.95, freedom) == pytest.approx(exact, rel=error)
    assert student_quantile(0.05, freedom) == pytest.approx(-exact, rel=error)


def test_known_error_has_the_interval_of_the_normal_distribution() -> None:
    low, high = Estimate(100.0, 1.0).interval(0.9)
    assert (low, high) == (pytest.approx(98.37, abs=0.02), pytest.approx(101.66, abs=0.02))


def test_few_observations_widen_the_interval() -> None:
    few, many = Estimate(100.0, 1.0, 2.0).interval(), Estimate(100.0, 1.0, 50.0).interval()
    assert few[0] < many[0] < many[1] < few[1]


def test_interval_of_a_poor_estimate_stays_positive_and_finite() -> None:
    low, high = Estimate(1.0, 1e9, 1.0).interval(0.999)
    assert 0.0 < low < 1.0 < high < math.inf
    assert Estimate(0.0, 1.0).interval() == (0.0, 0.0)


def test_errors_of_a_sum_add_up_as_squares() -> None:
    total = Estimate(10.0, 3.0, 4.0) + Estimate(20.0, 4.0)
    assert (total.value, total.sd) == (30.0, 5.0)
    assert total.freedom == pytest.approx(4 * 625 / 81)
    assert (Estimate(1.0) + Estimate(2.0)).interval() == (3.0, 3.0)
