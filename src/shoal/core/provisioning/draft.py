"""A supply under change: what is charged, hired and given back in the course of one event."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shoal.core.provisioning import budget, costs
from shoal.core.provisioning import events as se
from shoal.core.provisioning.events import MachineDemand, PoolInfo
from shoal.core.provisioning.state import (
    LIVE,
    RELEASING,
    REQUESTED,
    RUNNING,
    Allocation,
    PoolHealth,
    ProvisioningState,
    hourly_rate,
    is_fit,
    left_of,
    over_budget,
    paid_by,
    serve,
)


def _new_hire(name: str, pool: PoolInfo, need: MachineDemand, now: float) -> Allocation:
    cpus = pool.cpus // pool.slots or need.cpus
    memory_bytes = pool.memory_bytes // pool.slots or need.memory_bytes
    return Allocation(name, pool.name, pool.slots, REQUESTED, now, cpus=cpus, memory_bytes=memory_bytes)


def submission(hire: Allocation, reason: str) -> se.SubmitAllocation:
    return se.SubmitAllocation(hire.pool, hire.name, hire.slots, reason, hire.cpus, hire.memory_bytes)


class ProvisioningDraft:
    """A state under change; it lives for one event."""

    def __init__(self, state: ProvisioningState, now: float) -> None:
        self.base, self.now = state, now
        self.allocations = dict(state.allocations)
        self.health = dict(state.health)
        self.account = state.account
        self.asked: list[se.Instruction] = []
        self._settle(state)

    def freeze(self) -> ProvisioningState:
        return replace(self.base, allocations=self.allocations, health=self.health, account=self.account)

    def _settle(self, state: ProvisioningState) -> None:
        """Charge what the hires have cost since the last event to the runs that needed them."""
        for hire in state.allocations.values():
            self._charge(hire)

    def _charge(self, hire: Allocation) -> None:
        """To those who need it; if nobody does any more, to those who did last."""
        pool = self.base.pools.get(hire.pool)
        if hire.billed_until is not None and pool is not None and self.now > hire.billed_until:
            seconds, at_work = self.now - hire.billed_until, hire.status == RUNNING and hire.unused_since is None
            bill = costs.MachineCharge(hire.pool, pool.price_per_h, pool.on_demand_per_h, seconds, at_work)
            self.account = costs.charge(self.account, bill, hire.slots_by_run)
            self.update(hire, billed_until=self.now)

    # --- changing

    def update(self, hire: Allocation, **changes: Any) -> Allocation:
        changed = replace(self.allocations.get(hire.name, hire), **changes)
        self.allocations[hire.name] = changed
        return changed

    def stand(self, pool: str, **changes: Any) -> PoolHealth:
        changed = replace(self.health.get(pool, PoolHealth()), **changes)
        self.health[pool] = changed
        return changed

    def tell(self, text: str, run: str = "") -> None:
        self.asked.append(se.ProvisioningNote(text, run))

    def strike(self, pool: str, why: str, where: str = "", do: str = "") -> None:
        """A pool failed us: leave it alone for a while, longer each time."""
        limits, before = self.base.timeouts, self.health.get(pool, PoolHealth())
        failures = before.failures if self.now - before.failed_at < 2 * limits.backoff_max_s else 0
        backoff_s = min(limits.backoff_max_s, limits.backoff_s * 2.0 ** min(failures, 20))
        self.stand(
            pool, failures=failures + 1, failed_at=self.now, retry_at=self.now + backoff_s, why=why, where=where, do=do
        )
        if why != before.why:
            self.tell(f"pool {pool} is asked again in {backoff_s:g} s: {why}" + (f"; {do}" if do else ""))

    def fail(self, pool: str, *, final: bool) -> None:
        """A pool took no hire."""
        since = self.health.get(pool, PoolHealth()).failing_since
        self.stand(pool, failing_since=self.now if since is None else since, final=final)

    def trust(self, pool: str) -> None:
        """A pool took a hire."""
        if pool in self.health:
            self.stand(pool, failing_since=None, final=False)

    def let_go(self, hire: Allocation, reason: str) -> None:
        self.update(hire, status=RELEASING, since=self.now, unused_since=None, why=reason)
        self.asked.append(se.CancelAllocation(hire.pool, hire.name, hire.handle, reason))

    def forget(self, hire: Allocation) -> None:
        self.allocations.pop(hire.name, None)

    def lose(self, hire: Allocation) -> None:
        """It went without being asked to."""
        if hire.billed_until is not None:
            self.account = costs.lose(self.account, hire.pool, hire.slots_by_run)

    # --- moving on

    def level(self) -> None:
        """Hire what is missing, and mark what is too much."""
        state = self.freeze()
        found: dict[str, dict[str, int]] = {name: {} for name, hire in self.allocations.items() if hire.status in LIVE}
        dear: dict[str, str] = {}
        for need in state.demands:
            served = serve(state, need, found)
            dear |= dict.fromkeys(served.dear, self._why_dear(state, need)) if served.dear else {}
            self._hire(need, served.lacks, found)
        for name, shares in found.items():
            stays = name not in dear and self._stands_in(state, self.allocations[name], found)
            self._mark(self.allocations[name], shares, dear.get(name, ""), stays=stays)
        for run in dict.fromkeys(need.run for need in state.demands if need.budget is not None):
            if why := over_budget(state, run):
                self.asked.append(se.StopRunOverBudget(run, why))

    def _stands_in(self, state: ProvisioningState, hire: Allocation, found: Mapping[str, Mapping[str, int]]) -> bool:
        """Whether it is here, while those that a need rather has are not."""
        if hire.status != RUNNING or found[hire.name]:
            return False
        coming = {run for name, shares in found.items() if self.allocations[name].status != RUNNING for run in shares}
        return any(need.run in coming and is_fit(state, need, hire) for need in state.demands)

    def _why_dear(self, state: ProvisioningState, need: MachineDemand) -> str:
        left, paying = left_of(state, need), hourly_rate(state, need.run)
        lasts_min = budget.lasts_s(left, paying) / 60.0
        return f"the {left:.2f} that are left of the budget would pay all of them for {lasts_min:.1f} min only"

    def _hire(self, need: MachineDemand, lacks: int, found: dict[str, dict[str, int]]) -> None:
        """Ask the pools in their order; what a run with a budget cannot do without, of the cheapest that has it."""
        for name in need.pools:
            lacks = self._hire_of(need, name, lacks, found, least=False)
        prices = {name: pool.price_per_h for name, pool in self.base.pools.items()}
        known = [name for name in need.pools if name in prices and need.budget is not None]
        for name in sorted(known, key=lambda name: prices[name]):
            lacks = self._hire_of(need, name, lacks, found, least=True)

    def _hire_of(
        self, need: MachineDemand, name: str, lacks: int, found: dict[str, dict[str, int]], *, least: bool
    ) -> int:
        """Ask a pool for as many as it may give; how many places are lacking then."""
        pool = self.base.pools.get(name)
        if pool is None or not self._is_open(name):
            return lacks
        mine = [hire for hire in self.allocations.values() if hire.pool == name]
        if any(hire.overdue for hire in mine):
            return lacks
        living = len(mine)
        while lacks > (need.slots - need.min_slots if least else 0) and living < pool.limit:
            if not self._can_pay(need, pool, found, least=least):
                break
            number = self.base.count + 1
            self.base = replace(self.base, count=number)
            hire = _new_hire(se.allocation_name(name, number), pool, need, self.now)
            self.allocations[hire.name] = hire
            found[hire.name] = {need.run: min(lacks, pool.slots)}
            self.asked.append(submission(hire, f"run {need.run} lacks {lacks} places"))
            lacks, living = lacks - pool.slots, living + 1
        return max(0, lacks)

    def _can_pay(
        self, need: MachineDemand, pool: PoolInfo, found: Mapping[str, Mapping[str, int]], *, least: bool
    ) -> bool:
        if need.budget is None:
            return True
        state = self.freeze()
        return budget.may_request(left_of(state, need), paid_by(state, found, need.run), pool.price_per_h, least=least)

    def _is_open(self, pool: str) -> bool:
        standing = self.health.get(pool, PoolHealth())
        return standing.retry_at <= self.now and standing.unreachable_since is None

    def _mark(self, hire: Allocation, shares: Mapping[str, int], dear: str, *, stays: bool) -> None:
        if shares and hire.slots_by_run != shares:
            hire = self.update(hire, slots_by_run=dict(shares))
        if shares or hire.overdue or hire.leaving or stays:
            if hire.unused_since is not None:
                self.update(hire, unused_since=None)
            if hire.overdue and not self._is_wanted(hire):
                self.let_go(hire, "nobody needs it any more")
        elif hire.unused_since is None:
            self.update(hire, unused_since=self.now, unused_why=dear)
            for run in hire.slots_by_run if dear else ():
                self.tell(f"{hire.name} of pool {hire.pool} is given back as the dearest: {dear}", run)

    def _is_wanted(self, hire: Allocation) -> bool:
        """Whether some run would still rather have one that is overdue than what it has, or lacks."""
        return any(hire.pool in need.pools and need.slots for need in self.base.demands)
