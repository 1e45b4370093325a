"""A supply under change: what is charged, hired and given back in the course of one event."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shoal.core.provisioning import budget, costs
from shoal.core.provisioning import events as se
from shoal.core.provisioning.events import MachineDemand, PoolInfo
from shoal.core.provisioning.state import (
    ASKED,
    HERE,
    LEAVING,
    LIVE,
    Allocation,
    PoolHealth,
    ProvisioningState,
    broke,
    is_fit,
    left_of,
    paid_by,
    rate_of,
    serve,
)


def _new_hire(name: str, pool: PoolInfo, need: MachineDemand, now: float) -> Allocation:
    cpus = pool.cpus // pool.slots or need.cpus
    memory_bytes = pool.memory_bytes // pool.slots or need.memory_bytes
    return Allocation(name, pool.name, pool.slots, ASKED, now, cpus=cpus, memory_bytes=memory_bytes)


def submission(hire: Allocation, reason: str) -> se.SubmitAllocation:
    return se.SubmitAllocation(hire.pool, hire.name, hire.slots, reason, hire.cpus, hire.memory_bytes)


class ProvisioningDraft:
    """A state under change; it lives for one event."""

    def __init__(self, state: ProvisioningState, now: float) -> None:
        self.base, self.now = state, now
        self.hires = dict(state.hires)
        self.standings = dict(state.standings)
        self.account = state.account
        self.asked: list[se.Instruction] = []
        self._settle(state)

    def freeze(self) -> ProvisioningState:
        return replace(self.base, hires=self.hires, standings=self.standings, account=self.account)

    def _settle(self, state: ProvisioningState) -> None:
        """Charge what the hires have cost since the last event to the runs that needed them."""
        for hire in state.hires.values():
            self._charge(hire)

    def _charge(self, hire: Allocation) -> None:
        """To those who need it; if nobody does any more, to those who did last."""
        pool = self.base.pools.get(hire.pool)
        if hire.paid_since is not None and pool is not None and self.now > hire.paid_since:
            seconds, at_work = self.now - hire.paid_since, hire.status == HERE and hire.spare_since is None
            bill = costs.MachineCharge(hire.pool, pool.price_per_h, pool.instead_per_h, seconds, at_work)
            self.account = costs.charge(self.account, bill, hire.whose)
            self.update(hire, paid_since=self.now)

    # --- changing

    def update(self, hire: Allocation, **changes: Any) -> Allocation:
        changed = replace(self.hires.get(hire.name, hire), **changes)
        self.hires[hire.name] = changed
        return changed

    def stand(self, pool: str, **changes: Any) -> PoolHealth:
        changed = replace(self.standings.get(pool, PoolHealth()), **changes)
        self.standings[pool] = changed
        return changed

    def tell(self, text: str, run: str = "") -> None:
        self.asked.append(se.ProvisioningNote(text, run))

    def strike(self, pool: str, why: str, where: str = "", do: str = "") -> None:
        """A pool failed us: leave it alone for a while, longer each time."""
        limits, before = self.base.limits, self.standings.get(pool, PoolHealth())
        strikes = before.strikes if self.now - before.struck_at < 2 * limits.pause_max_s else 0
        pause_s = min(limits.pause_max_s, limits.pause_s * 2.0 ** min(strikes, 20))
        self.stand(pool, strikes=strikes + 1, struck_at=self.now, until=self.now + pause_s, why=why, where=where, do=do)
        if why != before.why:
            self.tell(f"pool {pool} is asked again in {pause_s:g} s: {why}" + (f"; {do}" if do else ""))

    def fail(self, pool: str, *, final: bool) -> None:
        """A pool took no hire."""
        since = self.standings.get(pool, PoolHealth()).failing_since
        self.stand(pool, failing_since=self.now if since is None else since, final=final)

    def trust(self, pool: str) -> None:
        """A pool took a hire."""
        if pool in self.standings:
            self.stand(pool, failing_since=None, final=False)

    def let_go(self, hire: Allocation, reason: str) -> None:
        self.update(hire, status=LEAVING, since=self.now, spare_since=None, why=reason)
        self.asked.append(se.CancelAllocation(hire.pool, hire.name, hire.handle, reason))

    def forget(self, hire: Allocation) -> None:
        self.hires.pop(hire.name, None)

    def lose(self, hire: Allocation) -> None:
        """It went without being asked to."""
        if hire.paid_since is not None:
            self.account = costs.lose(self.account, hire.pool, hire.whose)

    # --- moving on

    def level(self) -> None:
        """Hire what is missing, and mark what is too much."""
        state = self.freeze()
        found: dict[str, dict[str, int]] = {name: {} for name, hire in self.hires.items() if hire.status in LIVE}
        dear: dict[str, str] = {}
        for need in state.needs:
            served = serve(state, need, found)
            dear |= dict.fromkeys(served.dear, self._why_dear(state, need)) if served.dear else {}
            self._hire(need, served.lacks, found)
        for name, shares in found.items():
            stays = name not in dear and self._stands_in(state, self.hires[name], found)
            self._mark(self.hires[name], shares, dear.get(name, ""), stays=stays)
        for run in dict.fromkeys(need.run for need in state.needs if need.budget is not None):
            if why := broke(state, run):
                self.asked.append(se.StopRunOverBudget(run, why))

    def _stands_in(self, state: ProvisioningState, hire: Allocation, found: Mapping[str, Mapping[str, int]]) -> bool:
        """Whether it is here, while those that a need rather has are not."""
        if hire.status != HERE or found[hire.name]:
            return False
        coming = {run for name, shares in found.items() if self.hires[name].status != HERE for run in shares}
        return any(need.run in coming and is_fit(state, need, hire) for need in state.needs)

    def _why_dear(self, state: ProvisioningState, need: MachineDemand) -> str:
        left, paying = left_of(state, need), rate_of(state, need.run)
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
        mine = [hire for hire in self.hires.values() if hire.pool == name]
        if any(hire.overdue for hire in mine):
            return lacks
        living = len(mine)
        while lacks > (need.slots - need.least if least else 0) and living < pool.limit:
            if not self._can_pay(need, pool, found, least=least):
                break
            number = self.base.count + 1
            self.base = replace(self.base, count=number)
            hire = _new_hire(se.name_of(name, number), pool, need, self.now)
            self.hires[hire.name] = hire
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
        return budget.may_hire(left_of(state, need), paid_by(state, found, need.run), pool.price_per_h, least=least)

    def _is_open(self, pool: str) -> bool:
        standing = self.standings.get(pool, PoolHealth())
        return standing.until <= self.now and standing.unreachable_since is None

    def _mark(self, hire: Allocation, shares: Mapping[str, int], dear: str, *, stays: bool) -> None:
        if shares and hire.whose != shares:
            hire = self.update(hire, whose=dict(shares))
        if shares or hire.overdue or hire.going or stays:
            if hire.spare_since is not None:
                self.update(hire, spare_since=None)
            if hire.overdue and not self._is_wanted(hire):
                self.let_go(hire, "nobody needs it any more")
        elif hire.spare_since is None:
            self.update(hire, spare_since=self.now, spare_why=dear)
            for run in hire.whose if dear else ():
                self.tell(f"{hire.name} of pool {hire.pool} is given back as the dearest: {dear}", run)

    def _is_wanted(self, hire: Allocation) -> bool:
        """Whether some run would still rather have one that is overdue than what it has, or lacks."""
        return any(hire.pool in need.pools and need.slots for need in self.base.needs)
