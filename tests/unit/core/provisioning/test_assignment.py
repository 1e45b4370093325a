"""Assignments: which run uses how many slots of which machine."""

from __future__ import annotations

from shoal.core.provisioning.assignment import assign, over_budget
from shoal.core.provisioning.events import MachineDemand, PoolInfo
from shoal.core.provisioning.state import RELEASING, REQUESTED, RUNNING, Allocation, ProvisioningState

POOLS = {"spot": PoolInfo("spot", "slurm", 8, price_per_h=6.0, sized=True), "lab": PoolInfo("lab", "ssh", 8, slots=2)}


def state_of(*allocations: Allocation) -> ProvisioningState:
    return ProvisioningState(pools=POOLS, allocations={allocation.name: allocation for allocation in allocations})


SPOT = Allocation("spot-1", "spot", 1, RUNNING, 0.0, cpus=4)
LAB = Allocation("lab-2", "lab", 2, REQUESTED, 0.0)


def test_demands_are_served_in_order_and_missing_slots_are_counted() -> None:
    demands = (MachineDemand("a", ("spot", "lab"), 2), MachineDemand("b", ("lab",), 3))
    assignment = assign(state_of(LAB, SPOT), demands)
    assert assignment.slots == {"lab-2": {"a": 1, "b": 1}, "spot-1": {"a": 1}}
    assert assignment.missing == (0, 2)


def test_released_overdue_and_small_machines_serve_no_demand() -> None:
    released = Allocation("lab-3", "lab", 2, RELEASING, 0.0)
    overdue = Allocation("lab-4", "lab", 2, REQUESTED, 0.0, overdue=True)
    assignment = assign(state_of(SPOT, released, overdue), (MachineDemand("a", ("spot", "lab"), 2, cpus=8),))
    assert assignment.slots == {"spot-1": {}, "lab-4": {}}
    assert assignment.missing == (2,)


def test_machines_in_use_are_kept_without_a_demand_for_slots() -> None:
    assert assign(state_of(SPOT), (MachineDemand("a", (), 0, in_use=("spot-1", "gone-9")),)).slots == {
        "spot-1": {"a": 1}
    }


def test_unaffordable_machine_is_left_to_a_run_that_can_pay() -> None:
    poor = MachineDemand("poor", ("spot", "lab"), 3, 1, budget=0.5)
    running_lab = Allocation("lab-2", "lab", 2, RUNNING, 0.0)
    assignment = assign(state_of(SPOT, running_lab), (poor, MachineDemand("rich", ("spot",), 1)))
    assert assignment.slots == {"spot-1": {"rich": 1}, "lab-2": {"poor": 2}}
    assert assignment.unaffordable == {"spot-1": poor}
    assert assignment.missing == (1, 0)


def test_run_without_money_for_its_minimum_is_over_budget() -> None:
    demands = (MachineDemand("a", ("spot",), 1, 1, budget=0.05),)
    assert over_budget(ProvisioningState(pools=POOLS, demands=demands), "a") == (
        "0.05 remain of the budget of 0.05, which does not pay for the missing machines"
    )
    assert over_budget(ProvisioningState(pools=POOLS, demands=demands), "other") == ""
