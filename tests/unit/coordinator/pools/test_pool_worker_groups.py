"""Instructions to a pool that are carried out together."""

from __future__ import annotations

from shoal.coordinator.pools.pool_worker import group_orders
from shoal.core.provisioning.events import CancelAllocation, SubmitAllocation


def submit(number: int) -> SubmitAllocation:
    return SubmitAllocation("lab", f"lab-{number}", 1, "a run needs a slot")


def cancel(number: int) -> CancelAllocation:
    return CancelAllocation("lab", f"lab-{number}", f"job-{number}", "no run needs it")


def test_submissions_in_a_row_are_carried_out_together():
    assert group_orders([submit(1), submit(2), submit(3)]) == [[submit(1), submit(2), submit(3)]]


def test_cancellation_before_a_submission_is_carried_out_first():
    orders = [submit(1), cancel(1), cancel(2), submit(3)]
    assert group_orders(orders) == [[submit(1)], [cancel(1), cancel(2)], [submit(3)]]


def test_wake_up_of_the_worker_is_left_out():
    assert group_orders([None]) == []
    assert group_orders([submit(1), None, submit(2)]) == [[submit(1), submit(2)]]
