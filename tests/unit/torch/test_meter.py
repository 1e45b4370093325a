"""Where the time of a step goes, as members tell it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from shoal.core.batch.gradient_noise import GradientNoise
from shoal.core.shares.balancer import ShareBalancer, StepMeasurement, parse
from shoal.core.step_report import StepReport
from shoal.worker.training.step_timing import LOOK_S, StepTimer

MEMBERS = ("m/0", "m/1")


def a_turn(*pulses: StepReport, nominal: int = 64) -> Any:
    return SimpleNamespace(everybody=pulses, nominal=nominal, world=SimpleNamespace(size=len(pulses)))


def uneven(step: int, wait_s: float = 0.031) -> Any:
    """The first member computes for 10 ms and waits for the second, which takes 40 ms, and for the exchange."""
    fast = StepReport(step, 32, data_s=0.001, compute_s=0.009, wait_s=wait_s, measured=32)
    slow = StepReport(step, 32, data_s=0.002, compute_s=0.038, wait_s=0.001, measured=32)
    return a_turn(fast, slow)


def metered(turns: list[Any], rank: int = 0, policy: str = "equal", each_s: float = LOOK_S) -> dict[str, Any]:
    meter, balance = StepTimer(GradientNoise()), ShareBalancer(parse(policy))
    for number, turn in enumerate(turns, 1):
        meter.commit(turn, rank, balance, number * each_s)
    return meter.status()


@pytest.mark.parametrize(("rank", "parts"), [(0, (0.001, 0.009, 0.03, 0.001)), (1, (0.002, 0.038, 0.0, 0.001))])
def test_waiting_for_the_slowest_is_told_from_the_exchange(rank: int, parts: tuple[float, ...]) -> None:
    spent = metered([uneven(step) for step in range(9)], rank)["spent"]
    assert (spent.data_s, spent.compute_s, spent.wait_s, spent.exchange_s) == pytest.approx(parts)


def test_nobody_waits_longer_than_it_waited() -> None:
    spent = metered([uneven(step, wait_s=0.004) for step in range(9)])["spent"]
    assert (spent.wait_s, spent.exchange_s) == pytest.approx((0.004, 0.0))


def test_the_step_in_which_all_is_set_up_does_not_count() -> None:
    told_of_nothing = a_turn(StepReport(0, 32), StepReport(0, 32))
    told_of_the_first = a_turn(StepReport(1, 32, compute_s=7.0), StepReport(1, 32, compute_s=9.0))
    turns = [told_of_nothing, told_of_the_first, uneven(2)]
    assert metered(turns)["spent"].compute_s == pytest.approx(0.009)


def test_rate_and_step_are_measured_from_commit_to_commit() -> None:
    status = metered([uneven(step) for step in range(9)], each_s=0.5)
    assert status["usual_step_s"] == pytest.approx(0.5)
    assert status["samples_per_s"] == pytest.approx(128)


def test_a_short_last_batch_is_no_other_batch() -> None:
    turns = [a_turn(StepReport(0, 64), nominal=nominal) for nominal in (64, 64, 16)]
    assert metered(turns)["batch"] == 64
    assert metered([*turns, a_turn(StepReport(0, 16), nominal=16)])["batch"] == 16


def test_idle_time_of_equal_shares_is_measured() -> None:
    turns = [uneven(step) for step in range(9)]
    assert metered(turns, policy="equal")["idle"] == pytest.approx((0.375, 0.375))
    assert metered(turns, policy="fixed:1,1")["idle"] == (None, pytest.approx(0.375))


def test_idle_time_of_learned_shares_is_compared_with_equal_ones() -> None:
    meter, balance = StepTimer(GradientNoise()), ShareBalancer()
    for step in range(60):
        shares = balance.shares(step, 64, MEMBERS)
        seen = [StepMeasurement(n, n * sample_s) for n, sample_s in zip(shares, (0.001, 0.004), strict=True)]
        balance.observe(step, MEMBERS, seen)
        meter.commit(uneven(step), 0, balance, step * LOOK_S)
    before, now = meter.status()["idle"]
    assert before == pytest.approx(0.375, abs=0.01)
    assert now < 0.05


def test_the_noise_scale_is_told_once_it_is_known() -> None:
    noise = GradientNoise()
    meter = StepTimer(noise)
    meter.commit(uneven(0), 0, ShareBalancer(), 1.0)
    assert meter.status()["noise"] is None
    for _ in range(20):
        noise.observe(shares=[2, 2], squares=[3.0, 3.0], total_sq=2.0)
    meter.commit(uneven(1), 0, ShareBalancer(), 1.1)
    assert meter.status()["noise"] is None, "it is not looked at in every step"
    meter.commit(uneven(2), 0, ShareBalancer(), 1.0 + LOOK_S)
    assert meter.status()["noise"] == pytest.approx(4.0)


def test_alone_nobody_waits() -> None:
    status = metered([a_turn(StepReport(step, 64, compute_s=0.01, wait_s=0.001)) for step in range(9)])
    assert status["idle"] is None
    assert status["noise"] is None
