"""Budgets: the most expensive machines go first, the minimum stays, and a clean stop can always be paid."""

from __future__ import annotations

import pytest

from shoal.core.provisioning import budget as provisioning_budget
from shoal.core.provisioning import decide as provisioning
from shoal.core.provisioning import events as se
from shoal.core.provisioning.budget import AffordableMachine
from shoal.core.provisioning.decide import RELEASING, RUNNING, ProvisioningState
from shoal.core.provisioning.events import MachineDemand, PoolInfo

SPOT = PoolInfo("spot", "slurm", limit=8, price_per_h=1.0, on_demand_per_h=3.0)
PREMIUM = PoolInfo("premium", "slurm", limit=8, price_per_h=4.0)
OWN = PoolInfo("own", "ssh", limit=2)


class Harness:
    """Provisioning with one run that has a budget."""

    def __init__(self, budget: float, *pools: PoolInfo, slots: int = 3, min_slots: int = 1) -> None:
        self.state, self.now, self.over = ProvisioningState(), 0.0, ""
        self.notes: list[str] = []
        self.handle(se.PoolsConfigured(pools))
        self.demand = MachineDemand("run", tuple(pool.name for pool in pools), slots, min_slots, budget=budget)
        self.handle(se.DemandChanged((self.demand,)))

    def handle(self, event: se.Event) -> None:
        self.state, instructions = provisioning.decide(self.state, event, self.now)
        self.notes += [i.text for i in instructions if isinstance(i, se.ProvisioningNote)]
        for instruction in instructions:
            if isinstance(instruction, se.StopRunOverBudget):
                self.over = instruction.reason

    def deliver(self) -> None:
        for allocation in [a for a in self.state.allocations.values() if a.status == provisioning.REQUESTED]:
            self.handle(se.AllocationSubmitted(allocation.pool, allocation.name, allocation.name))
            self.handle(se.AgentArrived(allocation.name))

    def wait(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until and not self.over:
            self.now += provisioning_budget.CHECK_INTERVAL_S
            for event in (
                *provisioning.expired_timers(self.state, self.now),
                *provisioning.expired_budget_timer(self.state, self.now),
            ):
                self.handle(event)
            for allocation in [a for a in self.state.allocations.values() if a.status == RELEASING]:
                self.handle(se.AllocationEnded(allocation.name))

    def running(self) -> list[str]:
        return [name for name, allocation in self.state.allocations.items() if allocation.status == RUNNING]

    @property
    def spent(self) -> float:
        return provisioning.account_at(self.state, self.now).of_run("run").spent


def test_ample_budget_releases_nothing() -> None:
    harness = Harness(2.0, SPOT)
    harness.deliver()
    harness.wait(1000.0)
    assert len(harness.running()) == 3


def test_low_budget_releases_the_most_expensive_machines_first() -> None:
    harness = Harness(1.4, PoolInfo("premium", "slurm", limit=1, price_per_h=4.0), SPOT)
    harness.deliver()
    assert harness.running() == ["premium-1", "spot-2", "spot-3"]
    harness.wait(360.0)
    assert harness.running() == ["spot-2", "spot-3"]
    assert any("releasing premium-1 of pool premium, the most expensive" in text for text in harness.notes)


def test_minimum_stays_until_only_the_reserve_is_left() -> None:
    harness = Harness(0.5, SPOT, slots=4, min_slots=2)
    harness.deliver()
    sizes = set()
    while not harness.over:
        harness.wait(5.0)
        sizes.add(len(harness.running()))
    assert min(sizes) == 2
    reserve = 2 * SPOT.price_per_h * provisioning_budget.RESERVE_S / 3600.0
    assert harness.spent == pytest.approx(0.5 - reserve, abs=2 * provisioning_budget.CHECK_INTERVAL_S / 3600.0)
    assert "0.03 remain of the budget of 0.50, which is reserved for a clean stop" in harness.over


def test_free_machines_are_kept_without_money() -> None:
    harness = Harness(0.3, SPOT, OWN, slots=4, min_slots=1)
    harness.deliver()
    harness.wait(4000.0)
    assert not harness.over
    assert harness.running() == [name for name in harness.running() if name.startswith("own")]
    assert len(harness.running()) == 2
    assert harness.spent < 0.3


def test_lost_machine_is_replaced_only_if_affordable() -> None:
    harness = Harness(0.3, SPOT, slots=4, min_slots=1)
    harness.deliver()
    assert len(harness.running()) == 1, "three would not last for the horizon"
    harness.wait(200.0)
    harness.handle(se.AgentLost("spot-1", "preempted"))
    harness.deliver()
    assert len(harness.running()) == 1, "the run needs one to continue"


def test_run_stops_if_its_missing_machines_are_unaffordable() -> None:
    harness = Harness(0.05, PREMIUM, slots=1, min_slots=1)
    assert not harness.state.allocations
    assert "does not pay for the missing machines" in harness.over


def test_cheaper_pool_is_used_if_the_preferred_one_is_unaffordable() -> None:
    for budget, pools in ((2.0, ["premium", "premium"]), (0.5, ["spot", "spot"]), (0.05, ["spot"])):
        harness = Harness(budget, PREMIUM, SPOT, slots=2, min_slots=1)
        assert [allocation.pool for allocation in harness.state.allocations.values()] == pools


def test_pending_machines_go_before_running_ones() -> None:
    machines = [AffordableMachine("running", 3.0, 1, True), AffordableMachine("coming", 1.0, 1, False)]
    assert provisioning_budget.unaffordable(machines, remaining=0.0, other_roles_per_h=0.0, min_slots=1) == ["coming"]
    machines = [AffordableMachine("running", 3.0, 1, True), AffordableMachine("too", 1.0, 1, True)]
    assert provisioning_budget.unaffordable(machines, remaining=0.0, other_roles_per_h=0.0, min_slots=1) == ["running"]


def test_costs_continue_while_the_coordinator_is_down() -> None:
    harness = Harness(1.0, SPOT, slots=1)
    harness.deliver()
    harness.now += 1800.0
    harness.handle(se.AgentArrived("spot-1"))
    assert harness.spent == pytest.approx(0.5)


def test_starting_and_releasing_machines_count_as_unused() -> None:
    harness = Harness(100.0, SPOT, slots=1)
    harness.handle(se.AllocationSubmitted("spot", "spot-1", "job"))
    harness.handle(se.PoolListed("spot", (se.ListedAllocation("spot-1", "job", running=True),)))
    harness.now += 360.0
    harness.handle(se.AgentArrived("spot-1"))
    harness.now += 3600.0
    harness.handle(se.AgentLost("spot-1", "silent"))
    harness.now += 36.0
    harness.handle(se.AllocationEnded("spot-1"))
    cost = harness.state.account.of_run("run")
    assert cost.spent == pytest.approx(1.11)
    assert cost.unused == pytest.approx(0.11)
    assert cost.lost == 1


def test_closed_pool_costs_nothing_more() -> None:
    harness = Harness(1.0, SPOT, slots=1)
    harness.deliver()
    harness.now += 360.0
    harness.handle(se.DemandChanged(()))
    harness.handle(se.PoolClosed("spot"))
    harness.now += 36000.0
    harness.handle(se.DemandChanged((harness.demand,)))
    assert harness.spent == pytest.approx(0.1)
    assert harness.state.health.get("spot", provisioning.PoolHealth()).failures == 0
