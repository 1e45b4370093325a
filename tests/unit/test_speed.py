from __future__ import annotations

import json
import math
import random

import pytest

from shoal.core.shares.cost_curve import CostCurve, line
from shoal.core.shares.member_speed import DriftDetector, MemberSpeed, common, usual


def measured(*pairs: tuple[int, float], times: int = 10) -> MemberSpeed:
    speed = MemberSpeed()
    for samples, seconds in pairs:
        speed = speed.fold([(samples, seconds)] * times)
    return speed


def test_with_one_size_seen_all_of_the_time_grows_with_the_share() -> None:
    curve = measured((32, 0.64)).curve()
    assert curve is not None
    assert curve.seconds(16) == pytest.approx(0.32)
    assert curve.seconds(64) == pytest.approx(1.28)


def test_with_two_sizes_seen_the_fixed_part_is_found() -> None:
    fixed_s, slope = measured((32, 0.1 + 0.32), (64, 0.1 + 0.64), (16, 0.1 + 0.16)).fitted()
    assert fixed_s == pytest.approx(0.1, rel=0.05)
    assert slope == pytest.approx(0.01, rel=0.05)


def test_a_member_seen_with_one_size_is_taken_to_be_shaped_like_the_others() -> None:
    curve = measured((32, 0.64)).curve(alike=32.0)
    assert curve is not None
    assert curve.seconds(64) == pytest.approx(0.96)


def test_fixed_part_and_slope_are_never_negative() -> None:
    convex = measured((10, 0.1), (20, 0.4)).fitted()
    falling = measured((10, 0.4), (20, 0.1)).fitted()
    assert min(*convex, *falling) >= 0
    assert falling[1] > 0


def test_each_further_micro_batch_costs_the_fixed_part_again() -> None:
    curve = line(0.5, 0.01, micro=8)
    assert [round(curve.seconds(b), 6) for b in (0, 1, 8, 9, 17)] == [0, 0.51, 0.58, 1.09, 1.67]
    assert curve.reach(1.0, 100) == 8


def test_a_curve_passes_through_points_that_noise_does_not_explain() -> None:
    speed = measured((10, 1.0), (20, 2.0), (40, 8.0), (80, 16.0), times=100)
    curve = speed.curve()
    assert curve is not None
    assert curve.seconds(40) == pytest.approx(8.0, rel=0.05)
    assert curve.seconds(10) == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize(
    "curve", [line(0.0, 1e-3), line(0.2, 1e-3), CostCurve((0.0, 10.0, 20.0), (0.1, 0.5, 0.5), 0.02)]
)
def test_reach_is_the_inverse_of_seconds(curve: CostCurve) -> None:
    for seconds in (0.05, 0.2, 0.3, 0.5, 0.7, 3.0):
        most = curve.reach(seconds, 10_000)
        assert most == 0 or curve.seconds(most) <= seconds + 1e-9
        assert curve.seconds(most + 1) > seconds - 1e-9


@pytest.mark.parametrize("bad", [(0, 1.0), (8, 0.0), (8, -1.0), (8, math.inf), (8, math.nan), (-1, 1.0)])
def test_what_cannot_be_a_measurement_is_left_out(bad: tuple[int, float]) -> None:
    assert MemberSpeed().fold([bad]) == MemberSpeed()
    assert MemberSpeed().fold([bad, (8, 0.5)]) == MemberSpeed().fold([(8, 0.5)])


def test_a_spike_does_not_change_the_usual_time() -> None:
    assert usual([1.0] * 9 + [100.0]) == 1.0
    assert usual([1.0, 100.0]) == 1.0
    assert MemberSpeed().fold([(8, 1.0)] * 9 + [(8, 100.0)]).points[0].seconds == 1.0


def test_only_the_latest_sizes_are_kept() -> None:
    speed = measured(*((size, size / 100) for size in range(1, 30)))
    assert [point.samples for point in speed.points] == list(range(22, 30))


def test_after_a_jump_only_what_came_after_it_counts_but_the_shape_stays() -> None:
    before = measured((32, 0.1 + 0.32), (64, 0.1 + 0.64))
    after = before.jumped([(64, 4 * (0.1 + 0.64))] * 3)
    curve = after.curve()
    assert curve is not None
    assert curve.seconds(64) == pytest.approx(2.96, rel=0.01)
    assert curve.seconds(32) == pytest.approx(1.68, rel=0.05)


def test_a_jump_is_noticed_in_three_steps_and_a_single_spike_never() -> None:
    drift = DriftDetector()
    assert [drift.see(4.0, 1.0, 0.15) for _ in range(3)] == [0, 0, 3]
    drift = DriftDetector()
    assert not any(drift.see(100.0 if step % 10 == 0 else 1.0, 1.0, 0.15) for step in range(1000))
    drift = DriftDetector()
    assert [drift.see(0.25, 1.0, 0.15) for _ in range(3)] == [0, 0, 3]


def test_noise_of_a_tenth_is_no_jump() -> None:
    chance, drift = random.Random(0), DriftDetector()
    assert not any(drift.see(math.exp(chance.gauss(0, 0.1)), 1.0, 0.15) for _ in range(20_000))


def test_noise_is_learned() -> None:
    chance, speed = random.Random(1), MemberSpeed()
    for _ in range(30):
        speed = speed.fold([(8, math.exp(chance.gauss(0, 0.03))) for _ in range(10)])
    assert 0.02 < speed.noise < 0.04


def test_the_common_shape_is_that_of_the_certain_ones() -> None:
    assert common([]) is None
    assert common([(5.0, 100.0), (1000.0, 50.0), (6.0, 100.0)]) == 6.0


def test_a_speed_survives_as_plain_values() -> None:
    speed = measured((32, 0.42), (64, 0.1 / 3)).jumped([(64, 1.7)] * 3)
    assert MemberSpeed.from_dict(json.loads(json.dumps(speed.as_dict()))) == speed
