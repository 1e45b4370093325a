"""Timing of committed steps, as `shoal status` shows it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from shoal.core.batch.gradient_noise import GradientNoise
from shoal.core.shares.balancer import ShareBalancer, StepMeasurement, parse
from shoal.core.step_report import StepReport
from shoal.worker.training.step_timing import REFRESH_S, StepTimer

MEMBERS = ("m/0", "m/1")


def step_with(*reports: StepReport, batch: int = 64) -> Any:
    return SimpleNamespace(reports=reports, global_batch_size=batch, world=SimpleNamespace(size=len(reports)))


def uneven(step: int, wait_s: float = 0.031) -> Any:
    """Return a step in which rank 0 works for 10 ms and waits for rank 1, which works for 40 ms, and the exchange."""
    fast = StepReport(step, 32, data_s=0.001, compute_s=0.009, wait_s=wait_s, measured=32)
    slow = StepReport(step, 32, data_s=0.002, compute_s=0.038, wait_s=0.001, measured=32)
    return step_with(fast, slow)


def status_after(steps: list[Any], rank: int = 0, policy: str = "equal", each_s: float = REFRESH_S) -> dict[str, Any]:
    timer, balance = StepTimer(GradientNoise()), ShareBalancer(parse(policy))
    for number, step in enumerate(steps, 1):
        timer.commit(step, rank, balance, number * each_s)
    return timer.status()


@pytest.mark.parametrize(("rank", "parts"), [(0, (0.001, 0.009, 0.03, 0.001)), (1, (0.002, 0.038, 0.0, 0.001))])
def test_waiting_for_the_slowest_is_separated_from_the_exchange(rank: int, parts: tuple[float, ...]) -> None:
    spent = status_after([uneven(step) for step in range(9)], rank)["spent"]
    assert (spent.data_s, spent.compute_s, spent.wait_s, spent.exchange_s) == pytest.approx(parts)


def test_waiting_is_never_more_than_was_measured() -> None:
    spent = status_after([uneven(step, wait_s=0.004) for step in range(9)])["spent"]
    assert (spent.wait_s, spent.exchange_s) == pytest.approx((0.004, 0.0))


def test_first_step_with_its_set_up_does_not_count() -> None:
    empty_reports = step_with(StepReport(0, 32), StepReport(0, 32))
    reports_of_the_first = step_with(StepReport(1, 32, compute_s=7.0), StepReport(1, 32, compute_s=9.0))
    steps = [empty_reports, reports_of_the_first, uneven(2)]
    assert status_after(steps)["spent"].compute_s == pytest.approx(0.009)


def test_rate_and_duration_are_measured_from_commit_to_commit() -> None:
    status = status_after([uneven(step) for step in range(9)], each_s=0.5)
    assert status["usual_step_s"] == pytest.approx(0.5)
    assert status["samples_per_s"] == pytest.approx(128)


def test_short_last_batch_does_not_change_the_batch_size() -> None:
    steps = [step_with(StepReport(0, 64), batch=batch) for batch in (64, 64, 16)]
    assert status_after(steps)["batch"] == 64
    assert status_after([*steps, step_with(StepReport(0, 16), batch=16)])["batch"] == 16


def test_idle_time_of_equal_shares_is_measured() -> None:
    steps = [uneven(step) for step in range(9)]
    assert status_after(steps, policy="equal")["idle"] == pytest.approx((0.375, 0.375))
    assert status_after(steps, policy="fixed:1,1")["idle"] == (None, pytest.approx(0.375))


def test_idle_time_of_learned_shares_is_compared_with_equal_ones() -> None:
    timer, balance = StepTimer(GradientNoise()), ShareBalancer()
    for step in range(60):
        shares = balance.shares(step, 64, MEMBERS)
        seen = [StepMeasurement(n, n * sample_s) for n, sample_s in zip(shares, (0.001, 0.004), strict=True)]
        balance.observe(step, MEMBERS, seen)
        timer.commit(uneven(step), 0, balance, step * REFRESH_S)
    before, now = timer.status()["idle"]
    assert before == pytest.approx(0.375, abs=0.01)
    assert now < 0.05


def test_noise_scale_is_shown_once_it_is_known() -> None:
    noise = GradientNoise()
    timer = StepTimer(noise)
    timer.commit(uneven(0), 0, ShareBalancer(), 1.0)
    assert timer.status()["noise"] is None
    for _ in range(20):
        noise.observe(shares=[2, 2], squares=[3.0, 3.0], total_sq=2.0)
    timer.commit(uneven(1), 0, ShareBalancer(), 1.1)
    assert timer.status()["noise"] is None, "it is not refreshed in every step"
    timer.commit(uneven(2), 0, ShareBalancer(), 1.0 + REFRESH_S)
    assert timer.status()["noise"] == pytest.approx(4.0)


def test_single_member_has_no_idle_time() -> None:
    status = status_after([step_with(StepReport(step, 64, compute_s=0.01, wait_s=0.001)) for step in range(9)])
    assert status["idle"] is None
    assert status["noise"] is None
