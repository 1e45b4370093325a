"""A budget: the dearest go first, the least stays for as long as it can be paid, and there is always enough to stop."""

from __future__ import annotations

import pytest

from shoal.core.provisioning import budget as provisioning_budget
from shoal.core.provisioning import decide as provisioning
from shoal.core.provisioning import events as se
from shoal.core.provisioning.budget import AffordableMachine
from shoal.core.provisioning.decide import RELEASING, RUNNING, ProvisioningState
from shoal.core.provisioning.events import MachineDemand, PoolInfo

SPOT = PoolInfo("spot", "slurm", limit=8, price_per_h=1.0, on_demand_per_h=3.0)
DEAR = PoolInfo("dear", "slurm", limit=8, price_per_h=4.0)
OWN = PoolInfo("own", "ssh", limit=2)


class World:
    """A supply with one run and its budget."""

    def __init__(self, budget: float, *pools: PoolInfo, slots: int = 3, min_slots: int = 1) -> None:
        self.state, self.now, self.over = ProvisioningState(), 0.0, ""
        self.told: list[str] = []
        self.tell(se.PoolsConfigured(pools))
        self.need = MachineDemand("run", tuple(pool.name for pool in pools), slots, min_slots, budget=budget)
        self.tell(se.DemandChanged((self.need,)))

    def tell(self, event: se.Event) -> None:
        self.state, asked = provisioning.decide(self.state, event, self.now)
        self.told += [one.text for one in asked if isinstance(one, se.ProvisioningNote)]
        for one in asked:
            if isinstance(one, se.StopRunOverBudget):
                self.over = one.reason

    def deliver(self) -> None:
        for hire in [one for one in self.state.allocations.values() if one.status == provisioning.REQUESTED]:
            self.tell(se.AllocationSubmitted(hire.pool, hire.name, hire.name))
            self.tell(se.AgentArrived(hire.name))

    def wait(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until and not self.over:
            self.now += provisioning_budget.CHECK_INTERVAL_S
            for event in (
                *provisioning.expired_timers(self.state, self.now),
                *provisioning.expired_budget_timer(self.state, self.now),
            ):
                self.tell(event)
            for hire in [one for one in self.state.allocations.values() if one.status == RELEASING]:
                self.tell(se.AllocationEnded(hire.name))

    def here(self) -> list[str]:
        return [name for name, hire in self.state.allocations.items() if hire.status == RUNNING]

    @property
    def spent(self) -> float:
        return provisioning.account_at(self.state, self.now).of_run("run").spent


def test_while_the_budget_is_far_away_nothing_is_given_back() -> None:
    world = World(2.0, SPOT)
    world.deliver()
    world.wait(1000.0)
    assert len(world.here()) == 3


def test_as_the_budget_gets_low_the_dearest_machines_go_first() -> None:
    world = World(1.4, PoolInfo("dear", "slurm", limit=1, price_per_h=4.0), SPOT)
    world.deliver()
    assert world.here() == ["dear-1", "spot-2", "spot-3"]
    world.wait(360.0)
    assert world.here() == ["spot-2", "spot-3"]
    assert any("dear-1 of pool dear is given back as the dearest" in text for text in world.told)


def test_the_least_stays_as_long_as_there_is_money_and_some_is_kept_to_stop() -> None:
    world = World(0.5, SPOT, slots=4, min_slots=2)
    world.deliver()
    sizes = set()
    while not world.over:
        world.wait(5.0)
        sizes.add(len(world.here()))
    assert min(sizes) == 2
    reserve = 2 * SPOT.price_per_h * provisioning_budget.RESERVE_S / 3600.0
    assert world.spent == pytest.approx(0.5 - reserve, abs=2 * provisioning_budget.CHECK_INTERVAL_S / 3600.0)
    assert "the budget of 0.50 is spent but for 0.03, which is needed to stop in order" in world.over


def test_machines_that_cost_nothing_are_kept_when_the_money_is_gone() -> None:
    world = World(0.3, SPOT, OWN, slots=4, min_slots=1)
    world.deliver()
    world.wait(4000.0)
    assert not world.over
    assert world.here() == [name for name in world.here() if name.startswith("own")]
    assert len(world.here()) == 2
    assert world.spent < 0.3


def test_a_lost_machine_is_replaced_only_if_that_can_be_paid() -> None:
    world = World(0.3, SPOT, slots=4, min_slots=1)
    world.deliver()
    assert len(world.here()) == 1, "three would not last for the horizon"
    world.wait(200.0)
    world.tell(se.AgentLost("spot-1", "preempted"))
    world.deliver()
    assert len(world.here()) == 1, "without one it cannot go on"


def test_when_the_machines_that_are_missing_cannot_be_paid_the_run_ends() -> None:
    world = World(0.05, DEAR, slots=1, min_slots=1)
    assert not world.state.allocations
    assert "does not pay the machines that are missing" in world.over


def test_a_cheaper_pool_is_asked_when_the_preferred_one_is_too_dear() -> None:
    for budget, pools in ((2.0, ["dear", "dear"]), (0.5, ["spot", "spot"]), (0.05, ["spot"])):
        world = World(budget, DEAR, SPOT, slots=2, min_slots=1)
        assert [hire.pool for hire in world.state.allocations.values()] == pools


def test_what_is_not_here_yet_goes_before_what_is_and_the_least_must_be_here() -> None:
    kept = [AffordableMachine("here", 3.0, 1, True), AffordableMachine("coming", 1.0, 1, False)]
    assert provisioning_budget.unaffordable(kept, left=0.0, beside_per_h=0.0, min_slots=1) == ["coming"]
    kept = [AffordableMachine("here", 3.0, 1, True), AffordableMachine("too", 1.0, 1, True)]
    assert provisioning_budget.unaffordable(kept, left=0.0, beside_per_h=0.0, min_slots=1) == ["here"]


def test_a_coordinator_that_was_away_counts_what_its_machines_cost_meanwhile() -> None:
    world = World(1.0, SPOT, slots=1)
    world.deliver()
    world.now += 1800.0
    world.tell(se.AgentArrived("spot-1"))
    assert world.spent == pytest.approx(0.5)


def test_what_a_loss_costs_is_what_machines_cost_while_they_start_or_go() -> None:
    world = World(100.0, SPOT, slots=1)
    world.tell(se.AllocationSubmitted("spot", "spot-1", "job"))
    world.tell(se.PoolListed("spot", (se.ListedAllocation("spot-1", "job", running=True),)))
    world.now += 360.0
    world.tell(se.AgentArrived("spot-1"))
    world.now += 3600.0
    world.tell(se.AgentLost("spot-1", "silent"))
    world.now += 36.0
    world.tell(se.AllocationEnded("spot-1"))
    cost = world.state.account.of_run("run")
    assert cost.spent == pytest.approx(1.11)
    assert cost.unused == pytest.approx(0.11)
    assert cost.lost == 1


def test_what_the_coordinator_ended_when_it_ended_for_good_costs_nothing_more() -> None:
    world = World(1.0, SPOT, slots=1)
    world.deliver()
    world.now += 360.0
    world.tell(se.DemandChanged(()))
    world.tell(se.PoolClosed("spot"))
    world.now += 36000.0
    world.tell(se.DemandChanged((world.need,)))
    assert world.spent == pytest.approx(0.1)
    assert world.state.health.get("spot", provisioning.PoolHealth()).failures == 0
