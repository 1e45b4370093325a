from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from shoal.core.forecast.blocks import Block, BlockLog
from shoal.core.forecast.step_time import UNKNOWN_SD, step_time, trend


def blocks_of(*step_times: float) -> list[Block]:
    return [Block(10, 10 * step_s) for step_s in step_times]


def step_seconds(seed: int, count: int, wander: float, wander_s: float) -> NDArray[np.float64]:
    """Return the seconds of steps of about 0.1 s: noise, a spike now and then, and a machine whose speed wanders."""
    rng = np.random.default_rng(seed)
    kept = np.exp(-0.1 / wander_s)
    steps, level = rng.normal(0, wander * np.sqrt(1 - kept**2), count), rng.normal(0, wander)
    mood = np.empty(count)
    for index in range(count):
        mood[index] = level = kept * level + steps[index]
    return 0.1 * np.exp(mood + rng.normal(0, 0.08, count)) * np.where(rng.random(count) < 0.01, 5.0, 1.0)


def forecasts(part: float, wander: float, wander_s: float) -> Iterator[tuple[float, bool]]:
    """Yield, for many emulated runs of ten minutes, the error of the total and whether the interval held it."""
    for seed in range(60):
        times = step_seconds(seed, 6000, wander, wander_s)
        ends = np.cumsum(times)
        log = BlockLog()
        for step in range(1, int(part * len(times)) + 1):
            log.observe(float(ends[step - 1]), step)
        left, real_s = len(times) - step, float(ends[-1] - ends[step - 1])
        estimate = step_time(log.blocks, left).times(left)
        low, high = estimate.interval()
        yield abs(estimate.value - real_s) / float(ends[-1]), low <= real_s <= high


@pytest.mark.parametrize(("wander", "wander_s"), [(0.0, 1.0), (0.03, 30.0), (0.05, 300.0)])
@pytest.mark.parametrize(("part", "error"), [(0.1, 0.04), (0.3, 0.025)])
def test_total_time_is_foretold_and_the_interval_holds_it(
    part: float, error: float, wander: float, wander_s: float
) -> None:
    errors, covered = zip(*forecasts(part, wander, wander_s), strict=True)
    assert float(np.mean(errors)) <= error
    assert float(np.mean(covered)) >= 0.8


def test_few_blocks_have_a_wide_interval() -> None:
    estimate = step_time(blocks_of(0.1, 0.12), 100)
    assert (estimate.value, estimate.sd) == (pytest.approx(0.11), pytest.approx(UNKNOWN_SD * 0.11))


def test_moods_of_the_machine_count_more_than_noise() -> None:
    noise = step_time(blocks_of(*([0.1, 0.12] * 16)), 1000, drift=0.0)
    moods = step_time(blocks_of(*([0.1] * 8 + [0.12] * 8) * 2), 1000, drift=0.0)
    assert moods.sd > 2 * noise.sd
    assert moods.freedom < noise.freedom


def test_growing_steps_are_a_trend_and_a_wandering_machine_is_none() -> None:
    growing = blocks_of(*(0.1 * (1 + 0.02 * index) for index in range(20)))
    assert trend(growing) == pytest.approx(0.32, abs=0.02)
    assert trend(growing[::-1]) == pytest.approx(-0.32, abs=0.02)
    assert trend(growing[:5]) == 0.0, "five blocks are too few to tell"
    moods = [trend([Block(10, 10 * t) for t in step_seconds(seed, 40, 0.1, 0.5)]) for seed in range(100)]
    assert moods.count(0.0) >= 98
