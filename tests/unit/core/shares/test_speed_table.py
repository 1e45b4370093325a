"""Speed table: what the balancer knows of every member."""

from __future__ import annotations

import json

import pytest

from shoal.core.shares.speed_table import MAX_FORMER_MEMBERS, SpeedTable, StepMeasurement


def table_of(**sample_s: float) -> SpeedTable:
    """Return a table in which each member was measured at 8 and at 16 samples, without a fixed cost."""
    table = SpeedTable()
    table.track(list(sample_s))
    for samples in (8, 16):
        for _ in range(4):
            table.observe(list(sample_s), [StepMeasurement(samples, samples * each) for each in sample_s.values()])
        table.close_window([])
    return table


def test_measured_members_cost_what_was_measured() -> None:
    slow, fast = table_of(slow=0.4, fast=0.1).costs(["slow", "fast"])
    assert slow.seconds(16) == pytest.approx(6.4, rel=0.01)
    assert fast.seconds(16) == pytest.approx(1.6, rel=0.01)


def test_estimates_count_until_a_member_is_measured() -> None:
    table = SpeedTable()
    table.profile("a").set_estimate(4.0)
    table.profile("b").set_estimate(1.0)
    a, b, unknown = table.costs(["a", "b", "unknown"])
    assert b.seconds(8) == 4 * a.seconds(8)
    assert a.seconds(8) <= unknown.seconds(8) <= b.seconds(8)


def test_joiner_is_compared_with_measured_members_by_its_estimate() -> None:
    table = table_of(old=0.1)
    table.profile("old").set_estimate(1.0)
    table.profile("new").set_estimate(0.5)
    assert table.costs(["old", "new"])[1].seconds(16) == pytest.approx(3.2, rel=0.01)


def test_speed_that_jumps_is_reported_within_a_few_steps_and_rescales_the_curve() -> None:
    table = table_of(a=0.1)
    for _ in range(6):
        jumps = table.observe(["a"], [StepMeasurement(16, 4.8)])
        if jumps:
            break
    assert jumps, "three times slower, and no jump was noticed"
    table.close_window(jumps)
    assert table.profile("a").fresh
    assert table.costs(["a"])[0].seconds(8) == pytest.approx(2.4, rel=0.1)


def test_impossible_measurements_are_ignored() -> None:
    table = SpeedTable()
    table.track(["a"])
    assert table.observe(["a"], [StepMeasurement(8, float("nan"))]) == []
    table.observe(["a"], [StepMeasurement(0, 1.0)])
    table.close_window([])
    assert not table.profile("a").speed.measured


def test_only_a_few_former_members_are_remembered() -> None:
    table = SpeedTable()
    for number in range(40):
        table.track([f"m{number}"])
    assert len(table.state_dict()["members"]) == MAX_FORMER_MEMBERS + 1
    assert table.get("m39") is not None
    assert table.get("m0") is None


def test_state_survives_json_bit_by_bit() -> None:
    table, restored = table_of(a=0.1, b=0.3), SpeedTable()
    restored.load_state_dict(json.loads(json.dumps(table.state_dict())))
    assert restored.state_dict() == table.state_dict()
    assert restored.costs(["a", "b"]) == table.costs(["a", "b"])
