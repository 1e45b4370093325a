"""Assignment of allocations to demands: which run uses how many slots of which machine.

Demands are served in the order in which the coordinator lists them (by priority, then age). Each takes slots from its
pools in its order of preference; within a pool it prefers machines that are running, then those that have waited
longest. A demand with a budget gives up what it cannot pay (see `budget`), and a later demand may use that.

An assignment is recomputed from scratch at every event, so it needs no bookkeeping when a run ends or a machine is
lost: a machine that serves no demand is surplus, and a demand that misses slots leads to a request.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from shoal.core.provisioning import budget
from shoal.core.provisioning.events import MachineDemand
from shoal.core.provisioning.state import (
    LIVE,
    REQUESTED,
    RUNNING,
    SUBMITTED,
    Allocation,
    ProvisioningState,
    hourly_rate,
)


@dataclass(frozen=True, slots=True)
class Assignment:
    """The slots that each run uses of each live allocation.

    `missing` is the number of slots that each demand lacks, in the order of the demands. `unaffordable` maps
    allocations that would exceed a budget to the demand that gave them up.
    """

    slots: Mapping[str, Mapping[str, int]]
    missing: tuple[int, ...] = ()
    unaffordable: Mapping[str, MachineDemand] = field(default_factory=dict)

    def add(self, allocation: str, run: str, slots: int) -> Assignment:
        """Return the same assignment with a further allocation, of which a run uses so many slots."""
        return replace(self, slots={**self.slots, allocation: {run: slots}})


def unassigned(state: ProvisioningState) -> Assignment:
    """Return the assignment in which no live allocation is used."""
    return Assignment({name: {} for name, allocation in state.allocations.items() if allocation.status in LIVE})


def assign(state: ProvisioningState, demands: Iterable[MachineDemand]) -> Assignment:
    """Return the assignment that serves these demands in their order with the allocations there are."""
    assignment = unassigned(state)
    for demand in demands:
        assignment = serve(state, demand, assignment)
    return assignment


def serve(state: ProvisioningState, demand: MachineDemand, assignment: Assignment) -> Assignment:
    """Return the assignment with one more demand served from the slots that are still free."""
    slots = dict(assignment.slots)
    for name in demand.in_use:
        if name in slots:
            slots[name] = {**slots[name], demand.run: slots[name].get(demand.run, 1)}
    missing, chosen = demand.slots, list[tuple[Allocation, int]]()
    for allocation in sorted((state.allocations[name] for name in slots), key=lambda a: _rank(demand, a)):
        count = min(allocation.slots - sum(slots[allocation.name].values()), missing)
        if count > 0 and is_fit(state, demand, allocation):
            chosen.append((allocation, count))
            missing -= count
    unaffordable = _unaffordable(state, demand, chosen, replace(assignment, slots=slots))
    for allocation, count in chosen:
        if allocation.name in unaffordable:
            missing += count
        else:
            by_run = slots[allocation.name]
            slots[allocation.name] = {**by_run, demand.run: by_run.get(demand.run, 0) + count}
    given_up = {**assignment.unaffordable, **dict.fromkeys(unaffordable, demand)}
    return Assignment(slots, (*assignment.missing, max(0, missing)), given_up)


def is_fit(state: ProvisioningState, demand: MachineDemand, allocation: Allocation) -> bool:
    """Return whether a demand could use an allocation: right pool, large enough, and expected to stay."""
    if allocation.pool not in demand.pools or allocation.overdue or allocation.leaving:
        return False
    pool = state.pools.get(allocation.pool)
    if pool is None or not pool.sized:
        return True
    return allocation.cpus >= demand.cpus and allocation.memory_bytes >= demand.memory_bytes


def paid_by(state: ProvisioningState, assignment: Assignment, run: str) -> float:
    """Return the price for an hour of the machines that a run is assigned so far."""
    return sum(state.price_of(state.allocations[name]) for name, runs in assignment.slots.items() if run in runs)


def over_budget(state: ProvisioningState, run: str) -> str:
    """Return why a run must stop with what remains of its budget, or "" if it can continue."""
    demands = [demand for demand in state.demands if demand.run == run and demand.budget is not None]
    if not demands:
        return ""
    remaining, rate = state.remaining_budget(demands[0]), hourly_rate(state, run)
    status = f"{max(0.0, remaining):.2f} remain of the budget of {demands[0].budget:.2f}"
    if rate and not budget.can_pay(remaining, rate, budget.RESERVE_S):
        return f"{status}, which is reserved for a clean stop"
    assignment = unassigned(state)
    for demand in demands:
        assignment = serve(state, demand, assignment)
        essential = assignment.missing[-1] - (demand.slots - demand.min_slots)
        prices = [state.pools[name].price_per_h for name in demand.pools if name in state.pools]
        rate = paid_by(state, assignment, run)
        if essential > 0 and prices and not budget.may_request(remaining, rate, min(prices), essential=True):
            return f"{status}, which does not pay for the missing machines"
    return ""


def _unaffordable(
    state: ProvisioningState, demand: MachineDemand, chosen: Iterable[tuple[Allocation, int]], assignment: Assignment
) -> list[str]:
    if demand.budget is None:
        return []
    machines = [budget.AffordableMachine(a.name, state.price_of(a), count, a.status == RUNNING) for a, count in chosen]
    other_roles_per_h = paid_by(state, assignment, demand.run)
    return budget.unaffordable(machines, state.remaining_budget(demand), other_roles_per_h, demand.min_slots)


def _rank(demand: MachineDemand, allocation: Allocation) -> tuple[int, int, float, str]:
    """Return the sort key of preference: earlier pools, then running machines, then those that waited longest."""
    preference = demand.pools.index(allocation.pool) if allocation.pool in demand.pools else len(demand.pools)
    return preference, (RUNNING, SUBMITTED, REQUESTED).index(allocation.status), allocation.since, allocation.name
