from __future__ import annotations

from shoal.core.shares.parking import MIN_STEPS_BETWEEN_PROBES, due_probe, record_parked, with_probe
from shoal.core.shares.share_policy import SharePlan
from shoal.core.shares.speed_table import SpeedTable, StepMeasurement


def parked_table(parked_s: float) -> tuple[SpeedTable, SharePlan]:
    """Return speeds of a member that takes 1 s for 8 samples, and of a parked one that takes so long for one."""
    speeds, plan = SpeedTable(), SharePlan(0, 8, ("fast", "parked"), (8, 0))
    speeds.track(plan.members)
    speeds.observe(plan.members, (StepMeasurement(8, 1.0), StepMeasurement(1, parked_s)))
    speeds.close_window([])
    record_parked(speeds, plan)
    return speeds, plan


def test_cheap_probe_is_due_after_the_least_interval() -> None:
    speeds, plan = parked_table(1.0)
    assert due_probe(speeds, plan, MIN_STEPS_BETWEEN_PROBES - 1) is None
    assert due_probe(speeds, plan, MIN_STEPS_BETWEEN_PROBES) == "parked"
    assert due_probe(speeds, plan, MIN_STEPS_BETWEEN_PROBES + 1) is None, "the wait starts again"


def test_expensive_probe_waits_until_its_cost_is_spread() -> None:
    speeds, plan = parked_table(10.0)
    assert due_probe(speeds, plan, 900) is None
    assert due_probe(speeds, plan, 1100) == "parked"


def test_probe_takes_samples_from_the_largest_share() -> None:
    plan = SharePlan(0, 10, ("a", "b", "c"), (4, 6, 0))
    assert with_probe(plan, "c", 2) == (4, 4, 2)
    assert with_probe(plan, "gone", 2) == plan.shares
