"""Working copy of the provisioning state for one event: charges, requests and releases.

`decide` creates one per event, lets the event's handler change it, then calls `level`, which requests what the demands
miss and releases what they no longer use. Which machine serves which run is decided in `assignment`; the draft only
applies it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shoal.core.nouns import plural
from shoal.core.provisioning import budget, costs
from shoal.core.provisioning import events as se
from shoal.core.provisioning.assignment import Assignment, is_fit, over_budget, paid_by, serve, unassigned
from shoal.core.provisioning.events import MachineDemand, PoolInfo
from shoal.core.provisioning.state import (
    RELEASING,
    REQUESTED,
    RUNNING,
    Allocation,
    PoolHealth,
    ProvisioningState,
    hourly_rate,
)


class ProvisioningDraft:
    """Mutable copy of a state; charges all costs up to `now` when it is created."""

    def __init__(self, state: ProvisioningState, now: float) -> None:
        self.base, self.now = state, now
        self.allocations = dict(state.allocations)
        self.health = dict(state.health)
        self.account = state.account
        self.instructions: list[se.Instruction] = []
        for allocation in state.allocations.values():
            self._charge(allocation)

    def freeze(self) -> ProvisioningState:
        """Return the changed state."""
        return replace(self.base, allocations=self.allocations, health=self.health, account=self.account)

    def _charge(self, allocation: Allocation) -> None:
        """Charge an allocation to the runs that use it, or used it last."""
        pool = self.base.pools.get(allocation.pool)
        if allocation.billed_until is not None and pool is not None and self.now > allocation.billed_until:
            seconds = self.now - allocation.billed_until
            in_use = allocation.status == RUNNING and allocation.unused_since is None
            usage = costs.MachineCharge(pool.name, pool.price_per_h, pool.on_demand_per_h, seconds, in_use)
            self.account = costs.charge(self.account, usage, allocation.slots_by_run)
            self.update(allocation, billed_until=self.now)

    # --- changes that handlers make

    def update(self, allocation: Allocation, **changes: Any) -> Allocation:
        """Change fields of an allocation and return it."""
        changed = replace(self.allocations.get(allocation.name, allocation), **changes)
        self.allocations[allocation.name] = changed
        return changed

    def update_health(self, pool: str, **changes: Any) -> None:
        """Change fields of a pool's health."""
        self.health[pool] = replace(self.health.get(pool, PoolHealth()), **changes)

    def note(self, text: str, run: str = "") -> None:
        """Add a sentence to the story of a run, or of all runs."""
        self.instructions.append(se.ProvisioningNote(text, run))

    def submit(self, allocation: Allocation, reason: str) -> None:
        """Tell the pool to start an allocation."""
        size = (allocation.cpus, allocation.memory_bytes)
        self.instructions.append(se.SubmitAllocation(allocation.pool, allocation.name, allocation.slots, reason, *size))

    def cancel(self, pool: str, allocation: str, handle: str, reason: str) -> None:
        """Tell the pool to end an allocation."""
        self.instructions.append(se.CancelAllocation(pool, allocation, handle, reason))

    def back_off(self, pool: str, why: str, where: str = "", do: str = "") -> None:
        """Count a failure of a pool and request nothing from it for a while, twice as long each time."""
        timeouts, health = self.base.timeouts, self.health.get(pool, PoolHealth())
        failures = health.failures if self.now - health.failed_at < 2 * timeouts.backoff_max_s else 0
        backoff_s = min(timeouts.backoff_max_s, timeouts.backoff_s * 2.0 ** min(failures, 20))
        retry_at = self.now + backoff_s
        self.update_health(
            pool, failures=failures + 1, failed_at=self.now, retry_at=retry_at, why=why, where=where, do=do
        )
        if why != health.why:
            self.note(f"pool {pool} failed; next request in {backoff_s:g} s: {why}" + (f"; {do}" if do else ""))

    def count_failed_start(self, pool: str) -> None:
        """Count an allocation that ended before its agent connected."""
        self.update_health(pool, failed_starts=self.health.get(pool, PoolHealth()).failed_starts + 1)

    def mark_failing(self, pool: str, *, final: bool) -> None:
        """Record that a pool rejected a request; `final` means that it always will."""
        since = self.health.get(pool, PoolHealth()).failing_since
        self.update_health(pool, failing_since=self.now if since is None else since, final=final)

    def clear_failing(self, pool: str) -> None:
        """Record that a pool accepted a request."""
        if pool in self.health:
            self.update_health(pool, failing_since=None, final=False)

    def release(self, allocation: Allocation, reason: str) -> None:
        """Start to release an allocation; it stays in the state until the engine confirms its end."""
        self.update(allocation, status=RELEASING, since=self.now, unused_since=None, why=reason)
        self.cancel(allocation.pool, allocation.name, allocation.handle, reason)

    def forget(self, allocation: Allocation) -> None:
        """Remove an allocation that has ended."""
        self.allocations.pop(allocation.name, None)

    def count_loss(self, allocation: Allocation) -> None:
        """Count an allocation that ended without being released, if it was paid for."""
        if allocation.billed_until is not None:
            self.account = costs.count_loss(self.account, allocation.pool, allocation.slots_by_run)

    # --- requests and releases

    def level(self) -> None:
        """Request the machines that demands miss, mark those that no demand uses, and stop runs without money."""
        assignment = unassigned(self.freeze())
        for demand in self.base.demands:
            assignment = self._request_missing(demand, serve(self.freeze(), demand, assignment))
        state = self.freeze()
        reasons = {name: _too_expensive(state, demand) for name, demand in assignment.unaffordable.items()}
        for name in assignment.slots:
            self._mark(state, self.allocations[name], assignment, reasons.get(name, ""))
        for run in dict.fromkeys(demand.run for demand in state.demands if demand.budget is not None):
            if why := over_budget(state, run):
                self.instructions.append(se.StopRunOverBudget(run, why))

    def _request_missing(self, demand: MachineDemand, assignment: Assignment) -> Assignment:
        """Request what a demand misses from its pools in their order; return the assignment with the requests.

        What a run with a budget cannot continue without is requested from its cheapest pools.
        """
        missing = assignment.missing[-1]
        for name in demand.pools:
            missing, assignment = self._request_from(name, demand, missing, assignment, essential=False)
        if demand.budget is not None:
            prices = {name: self.base.pools[name].price_per_h for name in demand.pools if name in self.base.pools}
            for name in sorted(prices, key=prices.__getitem__):
                missing, assignment = self._request_from(name, demand, missing, assignment, essential=True)
        return assignment

    def _request_from(
        self, name: str, demand: MachineDemand, missing: int, assignment: Assignment, *, essential: bool
    ) -> tuple[int, Assignment]:
        """Request as many machines as a pool may give; return how many slots are still missing, and the assignment."""
        pool, existing = self.base.pools.get(name), [a for a in self.allocations.values() if a.pool == name]
        # A pool with an overdue machine has a queue: another request would only wait behind it.
        if pool is None or not self._accepts_requests(name) or any(allocation.overdue for allocation in existing):
            return missing, assignment
        count, optional = len(existing), demand.slots - demand.min_slots if essential else 0
        while missing > optional and count < pool.limit:
            if not self._can_afford(demand, pool, assignment, essential=essential):
                break
            self.base = replace(self.base, count=self.base.count + 1)
            allocation = _new_allocation(self.base.count, pool, demand, self.now)
            self.allocations[allocation.name] = allocation
            assignment = assignment.add(allocation.name, demand.run, min(missing, pool.slots))
            self.submit(allocation, f"run {demand.run} needs {missing} more {plural(missing, 'slot')}")
            missing, count = missing - pool.slots, count + 1
        return max(0, missing), assignment

    def _can_afford(self, demand: MachineDemand, pool: PoolInfo, assignment: Assignment, *, essential: bool) -> bool:
        if demand.budget is None:
            return True
        state = self.freeze()
        remaining, rate = state.remaining_budget(demand), paid_by(state, assignment, demand.run)
        return budget.may_request(remaining, rate, pool.price_per_h, essential=essential)

    def _accepts_requests(self, pool: str) -> bool:
        health = self.health.get(pool, PoolHealth())
        return health.retry_at <= self.now and health.unreachable_since is None

    def _mark(
        self, state: ProvisioningState, allocation: Allocation, assignment: Assignment, too_expensive: str
    ) -> None:
        """Record the runs that use an allocation, or since when and why no run does."""
        slots_by_run = assignment.slots[allocation.name]
        bridges = not too_expensive and self._bridges(state, allocation, assignment)
        if slots_by_run and allocation.slots_by_run != slots_by_run:
            allocation = self.update(allocation, slots_by_run=dict(slots_by_run))
        if slots_by_run or allocation.overdue or allocation.leaving or bridges:
            if allocation.unused_since is not None:
                self.update(allocation, unused_since=None)
            if allocation.overdue and not self._is_awaited(allocation):
                self.release(allocation, "no run needs it any more")
        elif allocation.unused_since is None:
            self.update(allocation, unused_since=self.now, unused_why=too_expensive)
            for run in allocation.slots_by_run if too_expensive else ():
                name = f"{allocation.name} of pool {allocation.pool}"
                self.note(f"releasing {name}, the most expensive: {too_expensive}", run)

    def _bridges(self, state: ProvisioningState, allocation: Allocation, assignment: Assignment) -> bool:
        """Return whether an unused machine serves a run whose preferred machines have yet to arrive."""
        if allocation.status != RUNNING or assignment.slots[allocation.name]:
            return False
        pending = [name for name in assignment.slots if self.allocations[name].status != RUNNING]
        waiting = {run for name in pending for run in assignment.slots[name]}
        return any(demand.run in waiting and is_fit(state, demand, allocation) for demand in state.demands)

    def _is_awaited(self, allocation: Allocation) -> bool:
        """Return whether some demand would still use an overdue allocation once it arrives."""
        return any(allocation.pool in demand.pools and demand.slots for demand in self.base.demands)


def _new_allocation(number: int, pool: PoolInfo, demand: MachineDemand, now: float) -> Allocation:
    name, cpus = se.allocation_name(pool.name, number), pool.cpus // pool.slots or demand.cpus
    memory_bytes = pool.memory_bytes // pool.slots or demand.memory_bytes
    return Allocation(name, pool.name, pool.slots, REQUESTED, now, cpus=cpus, memory_bytes=memory_bytes)


def _too_expensive(state: ProvisioningState, demand: MachineDemand) -> str:
    remaining = state.remaining_budget(demand)
    minutes = budget.lasts_s(remaining, hourly_rate(state, demand.run)) / 60.0
    return f"the remaining budget of {remaining:.2f} pays for all machines for only {minutes:.1f} min"
