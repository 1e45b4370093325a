from __future__ import annotations

import pytest

from shoal.core.forecast.time_left import ProgressForecast


def after_steps(
    steps: int, step_s: float = 0.5, total: int | None = 1000, world: int = 1, members: int = 4
) -> tuple[ProgressForecast, float]:
    forecast = ProgressForecast()
    now = train(forecast, 0.0, 0, steps, step_s, total, world, members)
    return forecast, now


def train(
    forecast: ProgressForecast,
    at: float,
    first: int,
    steps: int,
    step_s: float,
    total: int | None,
    world: int,
    members: int,
) -> float:
    for step in range(first, first + steps + 1):
        forecast.observe(at + (step - first) * step_s, step, total, world, members)
    return at + steps * step_s


def test_time_left_is_the_remaining_steps_at_the_measured_pace() -> None:
    forecast, now = after_steps(100)
    left = forecast.time_left(now)
    assert left.seconds == pytest.approx(450.0, rel=0.01)
    assert 400 < left.low_s < 450 < left.high_s < 500
    assert left.source == "100 steps of this run"
    assert left.unknown == left.changed == ""


def test_time_passes_between_two_steps() -> None:
    forecast, now = after_steps(100, step_s=10.0)
    assert (forecast.time_left(now).seconds or 0) - (forecast.time_left(now + 4.0).seconds or 0) == pytest.approx(4.0)
    assert forecast.time_left(now + 1000.0).seconds == pytest.approx(9000.0 - 10.0), "a step that hangs is no progress"


def test_last_step_leaves_nothing() -> None:
    forecast, now = after_steps(100, total=100)
    assert forecast.time_left(now).seconds == 0.0


def test_stream_without_a_length_and_a_run_before_its_first_block_are_unknown() -> None:
    assert "stream" in after_steps(100, total=None)[0].time_left(50.0).unknown
    assert "no step has been measured" in after_steps(1)[0].time_left(0.5).unknown


def test_steps_that_get_slower_are_unknown() -> None:
    forecast, at = ProgressForecast(), 0.0
    for step in range(200):
        at += 0.5 * (1 + step / 100)
        forecast.observe(at, step, 1000, 1, 2)
    left = forecast.time_left(at)
    assert left.seconds is None
    assert "steadily" in left.unknown
    assert "slower" in left.unknown


def test_new_world_is_scaled_from_the_one_before_until_it_is_measured() -> None:
    forecast, now = after_steps(100, members=4)
    forecast.observe(now, 100, 1000, 2, 2)
    left = forecast.time_left(now)
    assert left.seconds == pytest.approx(900.0, rel=0.01)
    assert left.high_s - left.low_s > 500
    assert left.source == "steps with 4 members, scaled to 2"
    now = train(forecast, now, 100, 50, 0.8, 1000, 2, 2)
    left = forecast.time_left(now)
    assert left.seconds == pytest.approx(850 * 0.8, rel=0.01)
    assert left.source == "50 steps of this run"
    assert left.changed == "4 → 2 members: 270 s later"


def test_change_of_world_without_a_change_of_size_explains_nothing() -> None:
    forecast, now = after_steps(100, members=4)
    now = train(forecast, now, 100, 50, 0.5, 1000, 2, 4)
    assert forecast.time_left(now).changed == ""
