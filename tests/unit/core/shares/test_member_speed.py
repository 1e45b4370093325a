from __future__ import annotations

import json
import math
import random

import pytest

from shoal.core.shares.cost_curve import CostCurve, linear
from shoal.core.shares.member_speed import DriftDetector, MemberSpeed, robust_mean, weighted_median


def measured(*pairs: tuple[int, float], times: int = 10) -> MemberSpeed:
    speed = MemberSpeed()
    for samples, seconds in pairs:
        speed = speed.add_window([(samples, seconds)] * times)
    return speed


def test_one_measured_size_means_no_fixed_cost() -> None:
    curve = measured((32, 0.64)).curve()
    assert curve is not None
    assert curve.seconds(16) == pytest.approx(0.32)
    assert curve.seconds(64) == pytest.approx(1.28)


def test_several_measured_sizes_reveal_the_fixed_cost() -> None:
    fixed_s, slope = measured((32, 0.1 + 0.32), (64, 0.1 + 0.64), (16, 0.1 + 0.16)).fit()
    assert fixed_s == pytest.approx(0.1, rel=0.05)
    assert slope == pytest.approx(0.01, rel=0.05)


def test_one_measured_size_takes_the_common_cost_ratio() -> None:
    curve = measured((32, 0.64)).curve(common_ratio=32.0)
    assert curve is not None
    assert curve.seconds(64) == pytest.approx(0.96)


def test_fixed_cost_and_slope_are_never_negative() -> None:
    convex = measured((10, 0.1), (20, 0.4)).fit()
    falling = measured((10, 0.4), (20, 0.1)).fit()
    assert min(*convex, *falling) >= 0
    assert falling[1] > 0


def test_each_further_micro_batch_costs_the_fixed_part_again() -> None:
    curve = linear(0.5, 0.01, micro=8)
    assert [round(curve.seconds(b), 6) for b in (0, 1, 8, 9, 17)] == [0, 0.51, 0.58, 1.09, 1.67]
    assert curve.samples_within(1.0, 100) == 8


def test_curve_passes_through_points_that_noise_does_not_explain() -> None:
    speed = measured((10, 1.0), (20, 2.0), (40, 8.0), (80, 16.0), times=100)
    curve = speed.curve()
    assert curve is not None
    assert curve.seconds(40) == pytest.approx(8.0, rel=0.05)
    assert curve.seconds(10) == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize(
    "curve", [linear(0.0, 1e-3), linear(0.2, 1e-3), CostCurve((0.0, 10.0, 20.0), (0.1, 0.5, 0.5), 0.02)]
)
def test_samples_within_is_the_inverse_of_seconds(curve: CostCurve) -> None:
    for seconds in (0.05, 0.2, 0.3, 0.5, 0.7, 3.0):
        most = curve.samples_within(seconds, 10_000)
        assert most == 0 or curve.seconds(most) <= seconds + 1e-9
        assert curve.seconds(most + 1) > seconds - 1e-9


@pytest.mark.parametrize("bad", [(0, 1.0), (8, 0.0), (8, -1.0), (8, math.inf), (8, math.nan), (-1, 1.0)])
def test_implausible_measurements_are_ignored(bad: tuple[int, float]) -> None:
    assert MemberSpeed().add_window([bad]) == MemberSpeed()
    assert MemberSpeed().add_window([bad, (8, 0.5)]) == MemberSpeed().add_window([(8, 0.5)])


def test_spike_does_not_change_the_robust_mean() -> None:
    assert robust_mean([1.0] * 9 + [100.0]) == 1.0
    assert robust_mean([1.0, 100.0]) == 1.0
    assert MemberSpeed().add_window([(8, 1.0)] * 9 + [(8, 100.0)]).points[0].seconds == 1.0


def test_only_the_latest_sizes_are_kept() -> None:
    speed = measured(*((size, size / 100) for size in range(1, 30)))
    assert [point.samples for point in speed.points] == list(range(22, 30))


def test_rescaling_after_a_jump_keeps_the_shape_of_the_curve() -> None:
    before = measured((32, 0.1 + 0.32), (64, 0.1 + 0.64))
    after = before.rescaled([(64, 4 * (0.1 + 0.64))] * 3)
    curve = after.curve()
    assert curve is not None
    assert curve.seconds(64) == pytest.approx(2.96, rel=0.01)
    assert curve.seconds(32) == pytest.approx(1.68, rel=0.05)


def test_drift_detector_finds_a_jump_in_three_steps_and_ignores_spikes() -> None:
    drift = DriftDetector()
    assert [drift.update(4.0, 1.0, 0.15) for _ in range(3)] == [0, 0, 3]
    drift = DriftDetector()
    assert not any(drift.update(100.0 if step % 10 == 0 else 1.0, 1.0, 0.15) for step in range(1000))
    drift = DriftDetector()
    assert [drift.update(0.25, 1.0, 0.15) for _ in range(3)] == [0, 0, 3]


def test_noise_of_ten_percent_is_no_jump() -> None:
    chance, drift = random.Random(0), DriftDetector()
    assert not any(drift.update(math.exp(chance.gauss(0, 0.1)), 1.0, 0.15) for _ in range(20_000))


def test_noise_is_learned() -> None:
    chance, speed = random.Random(1), MemberSpeed()
    for _ in range(30):
        speed = speed.add_window([(8, math.exp(chance.gauss(0, 0.03))) for _ in range(10)])
    assert 0.02 < speed.noise < 0.04


def test_weighted_median_follows_the_weights() -> None:
    assert weighted_median([]) is None
    assert weighted_median([(5.0, 100.0), (1000.0, 50.0), (6.0, 100.0)]) == 6.0


def test_speed_survives_a_round_trip_through_json() -> None:
    speed = measured((32, 0.42), (64, 0.1 / 3)).rescaled([(64, 1.7)] * 3)
    assert MemberSpeed.from_dict(json.loads(json.dumps(speed.as_dict()))) == speed
