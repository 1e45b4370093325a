"""What a pool is asked for at the same time, and what only after something else."""

from __future__ import annotations

from shoal.coordinator.pools.pool_worker import together
from shoal.core.provisioning.events import CancelAllocation, SubmitAllocation


def hire(number: int) -> SubmitAllocation:
    return SubmitAllocation("lab", f"lab-{number}", 1, "a run lacks a place")


def end(number: int) -> CancelAllocation:
    return CancelAllocation("lab", f"lab-{number}", f"job-{number}", "no run needs it")


def test_machines_that_are_hired_in_a_row_are_asked_for_together():
    assert together([hire(1), hire(2), hire(3)]) == [[hire(1), hire(2), hire(3)]]


def test_one_that_is_let_go_before_it_is_hired_again_is_ended_first():
    asked = [hire(1), end(1), end(2), hire(3)]
    assert together(asked) == [[hire(1)], [end(1), end(2)], [hire(3)]]


def test_who_only_wakes_the_desk_asks_for_nothing():
    assert together([None]) == []
    assert together([hire(1), None, hire(2)]) == [[hire(1), hire(2)]]
