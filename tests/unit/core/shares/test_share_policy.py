from __future__ import annotations

import pytest

from shoal.core.shares.settings import ShareSettings, parse
from shoal.core.shares.share_policy import (
    SharePlan,
    extrapolation_doubt,
    faster_shares,
    initial_shares,
    pays_back,
    ratio_shares,
    share_bounds,
)
from shoal.core.shares.speed_table import SpeedTable, StepMeasurement

MEMBERS = ("a", "b")


def table(*sample_s: float, samples: int = 32) -> SpeedTable:
    """Return a speed table after many steps in which every member computed so many samples."""
    speeds, names = SpeedTable(), MEMBERS[: len(sample_s)]
    speeds.track(names)
    for _ in range(20):
        speeds.observe(names, [StepMeasurement(samples, samples * seconds) for seconds in sample_s])
    speeds.close_window([])
    return speeds


def test_memory_limit_takes_precedence_over_min() -> None:
    settings = parse("model", min=8, machines="b max=4")
    assert share_bounds(settings, 64, MEMBERS) == ([8, 4], [64, 4])
    assert share_bounds(settings, 64, MEMBERS, catching_up=(0,)) == ([0, 4], [0, 64])


def test_initial_shares_follow_measured_speeds() -> None:
    assert initial_shares(ShareSettings(), table(1.0, 3.0), 64, MEMBERS) == (48, 16)


def test_share_at_most_halves_or_doubles_unless_unbounded() -> None:
    speeds, plan = table(1.0, 15.0), SharePlan(0, 64, MEMBERS, (32, 32))
    speeds.end_freshness(MEMBERS)
    costs = speeds.costs(MEMBERS)
    assert faster_shares(ShareSettings(), speeds, plan, costs, 0.02, unbounded=False) == (48, 16)
    assert faster_shares(ShareSettings(), speeds, plan, costs, 0.02, unbounded=True) == (60, 4)


def test_ratio_law_scales_shares_by_the_mean_time() -> None:
    plan = SharePlan(0, 64, MEMBERS, (32, 32))
    assert ratio_shares(parse("ratio"), table(1.0, 3.0), plan) == (48, 16)
    assert ratio_shares(parse("ratio", threshold=0.1), table(1.0, 1.05), plan) is None


def test_growth_beyond_measured_sizes_is_doubted() -> None:
    speeds, plan = table(1.0, 1.0), SharePlan(0, 64, MEMBERS, (32, 32))
    assert extrapolation_doubt(speeds, plan, (32, 32)) == 0.0
    assert extrapolation_doubt(speeds, plan, (48, 16)) == pytest.approx(0.05)
    assert extrapolation_doubt(speeds, plan, (640, 0)) == pytest.approx(0.1)


def test_change_must_repay_one_and_a_half_steps() -> None:
    assert pays_back(0.02, steps_left=None)
    assert not pays_back(0.02, steps_left=70)
    assert pays_back(0.02, steps_left=80)
