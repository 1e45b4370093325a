"""Whatever is delivered, lost or dear: a run never spends more than its budget, nor less than it could use of it.

The engines here give a machine back within seconds, and a run that is told to stop has ended within its grace.
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.provisioning import budget as provisioning_budget
from shoal.core.provisioning import decide as provisioning
from shoal.core.provisioning import events as se
from shoal.core.provisioning.decide import REQUESTED, RUNNING, ProvisioningState
from shoal.core.provisioning.events import MachineDemand, PoolInfo

GONE_S = 6.0
STOP_S = provisioning_budget.RESERVE_S - 15.0

pools = st.lists(
    st.tuples(st.sampled_from([0.0, 0.3, 1.0, 4.0]), st.integers(1, 3), st.integers(1, 2)), min_size=1, max_size=3
)
happenings = st.lists(st.sampled_from(["deliver", "lose", "refuse", "wait", "long"]), min_size=3, max_size=12)


class Site:
    """Pools that give and take, and one run with a budget."""

    def __init__(self, described: list[tuple[float, int, int]], budget: float, slots: int, min_slots: int) -> None:
        self.pools = tuple(
            PoolInfo(f"p{at}", "e", limit, each, price, max_wait_s=30.0)
            for at, (price, limit, each) in enumerate(described)
        )
        self.state, self.now, self.over = ProvisioningState(), 0.0, False
        self.budget, self.min_slots = budget, min_slots
        self.leaving: dict[str, float] = {}
        self.tell(se.PoolsConfigured(self.pools))
        names = tuple(pool.name for pool in self.pools)
        self.need = MachineDemand("run", names, slots, min_slots, budget=budget)
        self.tell(se.DemandChanged((self.need,)))

    def tell(self, event: se.Event) -> None:
        before = {name for name, hire in self.state.allocations.items() if hire.status == RUNNING}
        self.state, asked = provisioning.decide(self.state, event, self.now)
        self.over = self.over or any(isinstance(one, se.StopRunOverBudget) for one in asked)
        given_back = [one.allocation for one in asked if isinstance(one, se.CancelAllocation)]
        self.leaving |= dict.fromkeys(given_back, self.now + GONE_S)
        if before & set(given_back) and not self.over and not isinstance(event, se.AgentLost):
            places = sum(hire.slots for hire in self.state.allocations.values() if hire.status == RUNNING)
            assert places >= self.min_slots, "a machine was given back that the run cannot do without"

    def tick(self) -> None:
        self.now += provisioning_budget.CHECK_INTERVAL_S
        for event in (
            *provisioning.expired_timers(self.state, self.now),
            *provisioning.expired_budget_timer(self.state, self.now),
        ):
            self.tell(event)
        for name in [name for name, at in self.leaving.items() if at <= self.now]:
            del self.leaving[name]
            self.tell(se.AllocationEnded(name))

    def happen(self, what: str) -> None:
        waiting = [hire for hire in self.state.allocations.values() if hire.status == REQUESTED]
        here = [hire for hire in self.state.allocations.values() if hire.status == RUNNING]
        if what == "deliver":
            for hire in waiting:
                self.tell(se.AllocationSubmitted(hire.pool, hire.name, hire.name))
                self.tell(se.AgentArrived(hire.name))
        elif what == "refuse" and waiting:
            self.tell(se.AllocationRejected(waiting[0].pool, waiting[0].name, "no quota"))
        elif what == "lose" and here:
            self.tell(se.AgentLost(here[0].name, "preempted"))
        for _ in range({"wait": 40, "long": 250}.get(what, 3)):
            if not self.over:
                self.tick()

    def stop(self) -> None:
        """What its processes need to end, then all is given back."""
        self.over = True
        held = tuple(name for name, hire in self.state.allocations.items() if hire.status == RUNNING)
        self.tell(se.DemandChanged((MachineDemand("run", (), 0, in_use=held),)))
        for _ in range(int(STOP_S)):
            self.tick()
        self.tell(se.DemandChanged(()))
        for _ in range(40):
            self.tick()

    @property
    def spent(self) -> float:
        return provisioning.account_at(self.state, self.now).total.spent


@given(
    described=pools,
    budget=st.sampled_from([0.02, 0.1, 0.5, 2.0]),
    slots=st.integers(1, 5),
    min_slots=st.integers(1, 3),
    story=happenings,
)
@settings(max_examples=60)
def test_a_run_never_spends_more_than_its_budget(
    described: list[tuple[float, int, int]], budget: float, slots: int, min_slots: int, story: list[str]
) -> None:
    site = Site(described, budget, slots, min(min_slots, slots))
    most = 0.0
    for what in story:
        if not site.over:
            site.happen(what)
            most = max(most, provisioning.hourly_rate(site.state, "run"))
    assert site.spent <= budget + most * provisioning_budget.CHECK_INTERVAL_S / 3600.0
    left = budget - site.spent
    if site.over:
        cheapest = min(pool.price_per_h for pool in site.pools)
        prices = {pool.name: pool.price_per_h for pool in site.pools}
        paying = cheapest + sum(
            prices[hire.pool] for hire in site.state.allocations.values() if "run" in hire.slots_by_run
        )
        tick = (paying + most) * 2 * provisioning_budget.CHECK_INTERVAL_S / 3600.0
        assert left <= paying * provisioning_budget.RESERVE_S / 3600.0 + tick, "it was stopped while there was money"
    site.stop()
    assert not site.state.allocations
    assert site.spent <= budget + most * provisioning_budget.CHECK_INTERVAL_S / 3600.0
