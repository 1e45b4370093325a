"""Whatever pools deliver, lose or reject: a run never exceeds its budget, and is not stopped while it could pay.

The engines running release a machine within seconds, and a stopped run ends within its grace period.
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.provisioning import budget as provisioning_budget
from shoal.core.provisioning import decide as provisioning
from shoal.core.provisioning import events as se
from shoal.core.provisioning.decide import REQUESTED, RUNNING, ProvisioningState
from shoal.core.provisioning.events import MachineDemand, PoolInfo

RELEASE_S = 6.0
STOP_S = provisioning_budget.RESERVE_S - 15.0

pools = st.lists(
    st.tuples(st.sampled_from([0.0, 0.3, 1.0, 4.0]), st.integers(1, 3), st.integers(1, 2)), min_size=1, max_size=3
)
incident_lists = st.lists(st.sampled_from(["deliver", "lose", "reject", "wait", "long"]), min_size=3, max_size=12)


class Site:
    """Simulated pools and one run with a budget."""

    def __init__(self, described: list[tuple[float, int, int]], budget: float, slots: int, min_slots: int) -> None:
        self.pools = tuple(
            PoolInfo(f"p{at}", "e", limit, each, price, max_wait_s=30.0)
            for at, (price, limit, each) in enumerate(described)
        )
        self.state, self.now, self.over = ProvisioningState(), 0.0, False
        self.budget, self.min_slots = budget, min_slots
        self.leaving: dict[str, float] = {}
        self.handle(se.PoolsConfigured(self.pools))
        names = tuple(pool.name for pool in self.pools)
        self.demand = MachineDemand("run", names, slots, min_slots, budget=budget)
        self.handle(se.DemandChanged((self.demand,)))

    def handle(self, event: se.Event) -> None:
        before = {name for name, allocation in self.state.allocations.items() if allocation.status == RUNNING}
        self.state, instructions = provisioning.decide(self.state, event, self.now)
        self.over = self.over or any(isinstance(i, se.StopRunOverBudget) for i in instructions)
        released = [i.allocation for i in instructions if isinstance(i, se.CancelAllocation)]
        self.leaving |= dict.fromkeys(released, self.now + RELEASE_S)
        if before & set(released) and not self.over and not isinstance(event, se.AgentLost):
            slots = sum(
                allocation.slots for allocation in self.state.allocations.values() if allocation.status == RUNNING
            )
            assert slots >= self.min_slots, "a machine that the run needs was released"

    def tick(self) -> None:
        self.now += provisioning_budget.CHECK_INTERVAL_S
        for event in (
            *provisioning.expired_timers(self.state, self.now),
            *provisioning.expired_budget_timer(self.state, self.now),
        ):
            self.handle(event)
        for name in [name for name, at in self.leaving.items() if at <= self.now]:
            del self.leaving[name]
            self.handle(se.AllocationEnded(name))

    def cause(self, incident: str) -> None:
        waiting = [allocation for allocation in self.state.allocations.values() if allocation.status == REQUESTED]
        running = [allocation for allocation in self.state.allocations.values() if allocation.status == RUNNING]
        if incident == "deliver":
            for allocation in waiting:
                self.handle(se.AllocationSubmitted(allocation.pool, allocation.name, allocation.name))
                self.handle(se.AgentArrived(allocation.name))
        elif incident == "reject" and waiting:
            self.handle(se.AllocationRejected(waiting[0].pool, waiting[0].name, "no quota"))
        elif incident == "lose" and running:
            self.handle(se.AgentLost(running[0].name, "preempted"))
        for _ in range({"wait": 40, "long": 250}.get(incident, 3)):
            if not self.over:
                self.tick()

    def stop(self) -> None:
        """Let the processes of the run end, then release everything."""
        self.over = True
        in_use = tuple(name for name, allocation in self.state.allocations.items() if allocation.status == RUNNING)
        self.handle(se.DemandChanged((MachineDemand("run", (), 0, in_use=in_use),)))
        for _ in range(int(STOP_S)):
            self.tick()
        self.handle(se.DemandChanged(()))
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
    incidents=incident_lists,
)
@settings(max_examples=60)
def test_run_never_exceeds_its_budget(
    described: list[tuple[float, int, int]], budget: float, slots: int, min_slots: int, incidents: list[str]
) -> None:
    site = Site(described, budget, slots, min(min_slots, slots))
    most = 0.0
    for incident in incidents:
        if not site.over:
            site.cause(incident)
            most = max(most, provisioning.hourly_rate(site.state, "run"))
    assert site.spent <= budget + most * provisioning_budget.CHECK_INTERVAL_S / 3600.0
    remaining = budget - site.spent
    if site.over:
        cheapest = min(pool.price_per_h for pool in site.pools)
        prices = {pool.name: pool.price_per_h for pool in site.pools}
        paying = cheapest + sum(prices[a.pool] for a in site.state.allocations.values() if "run" in a.slots_by_run)
        tick = (paying + most) * 2 * provisioning_budget.CHECK_INTERVAL_S / 3600.0
        assert remaining <= paying * provisioning_budget.RESERVE_S / 3600.0 + tick, (
            "it was stopped while trunning was money"
        )
    site.stop()
    assert not site.state.allocations
    assert site.spent <= budget + most * provisioning_budget.CHECK_INTERVAL_S / 3600.0
