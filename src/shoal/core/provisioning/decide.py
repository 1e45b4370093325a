"""Which machines to hire from which pools, and which to let go.

`decide(state, event, now)` returns the next state and what to tell which pool; `due(state, now)` says which waits are
over, as events. A *hire* is one agent that a pool was asked for::

    asked ──▶ submitted ──its agent joins──▶ here ──not needed──▶ leaving ──▶ forgotten
                 │                            │
                 └── refused, gone, or never came: another is asked for, here or of the next pool

A run takes from its pools in their order. A pool that does not deliver in time is not counted on, so that the next one
is asked; if it delivers after all, whatever is then too much is let go, the last pool's first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from shoal.core.provisioning import events as se
from shoal.core.provisioning import feasibility
from shoal.core.provisioning.costs import Account
from shoal.core.provisioning.draft import ProvisioningDraft, submission
from shoal.core.provisioning.state import (
    LIVE,
    RELEASING,
    REQUESTED,
    RUNNING,
    SUBMITTED,
    Allocation,
    PoolHealth,
    ProvisioningState,
    ProvisioningTimeouts,
    hourly_rate,
    over_budget,
    users,
)

LOOK = "look into agent.log below allocations/ in its directory there"

__all__ = [
    "LIVE",
    "RELEASING",
    "REQUESTED",
    "RUNNING",
    "SUBMITTED",
    "Allocation",
    "PoolHealth",
    "ProvisioningState",
    "ProvisioningTimeouts",
    "account_at",
    "decide",
    "expired_budget_timer",
    "expired_timers",
    "hourly_rate",
    "is_new_information",
    "over_budget",
    "users",
]


def decide(
    state: ProvisioningState, event: se.Event, now: float
) -> tuple[ProvisioningState, tuple[se.Instruction, ...]]:
    """The next state, and what to ask of which pool."""
    draft = ProvisioningDraft(state, now)
    _HANDLERS[type(event)](draft, event)
    draft.level()
    return draft.freeze(), tuple(draft.asked)


def expired_timers(state: ProvisioningState, now: float) -> tuple[se.ProvisioningTimerExpired, ...]:
    """The waits that are over."""
    limits = state.timeouts
    fired = [
        se.ProvisioningTimerExpired("pool", pool=name)
        for name, one in state.health.items()
        if 0.0 < one.retry_at <= now
    ]
    fired += [
        se.ProvisioningTimerExpired("start", run=need.run)
        for need in state.demands
        if feasibility.start_problems(state, need, now)
    ]
    for hire in state.allocations.values():
        waited_s = now - hire.since
        patience_s = state.pools[hire.pool].max_wait_s if hire.pool in state.pools else 0.0
        silent_s = now - max(hire.since, hire.setup_reported_at or hire.since)
        slow = hire.status == SUBMITTED and (hire.preparing or not hire.started)
        if hire.status == SUBMITTED and hire.started and silent_s > limits.join_s:
            fired.append(se.ProvisioningTimerExpired("join", allocation=hire.name))
        elif slow and not hire.overdue and waited_s > patience_s:
            fired.append(se.ProvisioningTimerExpired("wait", allocation=hire.name))
        elif hire.status == RELEASING and waited_s > limits.cancel_retry_s:
            fired.append(se.ProvisioningTimerExpired("cancel", allocation=hire.name))
        elif hire.unused_since is not None and now - hire.unused_since >= limits.surplus_s:
            fired.append(se.ProvisioningTimerExpired("surplus", allocation=hire.name))
    return tuple(fired)


def expired_budget_timer(state: ProvisioningState, now: float) -> tuple[se.ProvisioningTimerExpired, ...]:
    """Whether some run can no longer pay all that it has; asked every `spending.CHECK_INTERVAL_S`."""
    if all(need.budget is None for need in state.demands):
        return ()
    later = ProvisioningDraft(state, now).freeze()
    short = users(later) != users(state) or any(over_budget(later, run) for run in {need.run for need in state.demands})
    return (se.ProvisioningTimerExpired("budget"),) if short else ()


def account_at(state: ProvisioningState, now: float) -> Account:
    """What everything has cost up to now."""
    return ProvisioningDraft(state, now).account


def is_new_information(state: ProvisioningState, event: se.PoolListed) -> bool:
    """Whether what a pool says there is differs from what we know."""
    mine = {name: hire for name, hire in state.allocations.items() if hire.pool == event.pool}
    named = {seen.allocation for seen in event.listed}
    if event.unsubmitted or state.health.get(event.pool, PoolHealth()).unreachable_since is not None:
        return True
    if any(hire.status != REQUESTED and name not in named for name, hire in mine.items()):
        return True
    return any(
        seen.allocation not in mine
        or mine[seen.allocation].status == REQUESTED
        or mine[seen.allocation].handle != seen.handle
        or (seen.running != mine[seen.allocation].started and mine[seen.allocation].status != RELEASING)
        or (
            _why(mine[seen.allocation], seen) != mine[seen.allocation].why and mine[seen.allocation].status == SUBMITTED
        )
        or (seen.why and not mine[seen.allocation].why and mine[seen.allocation].status == RUNNING)
        for seen in event.listed
    )


def _why(hire: Allocation, seen: se.ListedAllocation) -> str:
    """What is to be said of a hire: its machine knows best what it does."""
    return hire.why if hire.preparing else seen.why or hire.why


def _on_pools(draft: ProvisioningDraft, event: se.PoolsConfigured) -> None:
    draft.base = replace(draft.base, pools={pool.name: pool for pool in event.pools})
    draft.health = {name: one for name, one in draft.health.items() if name in draft.base.pools}
    for pool in event.pools:
        mine = [hire for hire in draft.allocations.values() if hire.pool == pool.name and hire.status in LIVE]
        staying = sorted((hire for hire in mine if not hire.leaving), key=_worth)
        for hire in staying[pool.limit :]:
            draft.let_go(hire, f"pool {pool.name} may have {pool.limit} machines only, since its limit was lowered")


def _worth(hire: Allocation) -> tuple[int, bool, float, str]:
    """Rather kept are those that are here, are used, and have been for long."""
    return LIVE[::-1].index(hire.status), hire.unused_since is not None, hire.since, hire.name


def _on_needs(draft: ProvisioningDraft, event: se.DemandChanged) -> None:
    known = {need.run for need in draft.base.demands}
    draft.base = replace(draft.base, demands=event.demands)
    new = {pool for need in event.demands if need.run not in known for pool in need.pools}
    for pool in sorted(new & draft.health.keys()):
        _ask_anew(draft, pool)


def _ask_anew(draft: ProvisioningDraft, pool: str) -> None:
    """What a pool refused to an earlier run is not held against it when another comes: it may have been mended."""
    if draft.health[pool].unreachable_since is None:
        draft.stand(pool, retry_at=0.0, failures=0, why="", failing_since=None, final=False, failed_starts=0)
    else:
        draft.stand(pool, failing_since=draft.now)


def _on_submitted(draft: ProvisioningDraft, event: se.AllocationSubmitted) -> None:
    hire = draft.allocations.get(event.allocation)
    if hire is None:
        draft.asked.append(se.CancelAllocation(event.pool, event.allocation, event.handle, "nobody asked for it"))
    elif hire.status == REQUESTED:
        draft.update(hire, status=SUBMITTED, handle=event.handle, since=draft.now)
        draft.trust(hire.pool)
    elif hire.status == RELEASING:
        draft.asked.append(se.CancelAllocation(hire.pool, hire.name, event.handle, hire.why))
        draft.update(hire, handle=event.handle)
    elif not hire.handle:
        draft.update(hire, handle=event.handle)


def _on_refused(draft: ProvisioningDraft, event: se.AllocationRejected) -> None:
    hire = draft.allocations.get(event.allocation)
    if hire is not None and hire.status in (REQUESTED, RELEASING):
        draft.forget(hire)
        draft.strike(hire.pool, event.why, event.where, event.do)
        if hire.status == REQUESTED:
            draft.fail(hire.pool, final=event.final)


def _on_observed(draft: ProvisioningDraft, event: se.PoolListed) -> None:
    """What a pool says there is: the whole of it, so that what it does not name is not there."""
    _reached(draft, event.pool)
    named = {seen.allocation for seen in event.listed}
    for seen in event.listed:
        hire = draft.allocations.get(seen.allocation)
        if hire is None:
            draft.tell(f"{seen.allocation} of pool {event.pool} is ended: nobody asked for it")
            draft.asked.append(se.CancelAllocation(event.pool, seen.allocation, seen.handle, "nobody asked for it"))
        else:
            _saw(draft, hire, seen)
    for hire in [one for one in draft.allocations.values() if one.pool == event.pool and one.name not in named]:
        if hire.status == REQUESTED:
            if hire.name in event.unsubmitted:
                draft.asked.append(submission(hire, "it was asked for, but never came about"))
        else:
            _gone(draft, hire, dict(event.ended).get(hire.name, "the engine does not know it any more"))


def _saw(draft: ProvisioningDraft, hire: Allocation, seen: se.ListedAllocation) -> None:
    if hire.status == REQUESTED:
        hire = draft.update(hire, status=SUBMITTED, since=draft.now)
    if seen.running and not hire.started:
        billed_until = draft.now if hire.billed_until is None else hire.billed_until
        since = draft.now if hire.status == SUBMITTED else hire.since
        hire = draft.update(hire, started=True, overdue=False, since=since, billed_until=billed_until)
    elif hire.started and not seen.running and hire.status in (SUBMITTED, RUNNING):
        # It was put back into the queue, and its agent is gone or going; it comes back under the same name.
        draft.lose(hire)
        hire = draft.update(
            hire,
            status=SUBMITTED,
            started=False,
            leaving=False,
            since=draft.now,
            billed_until=None,
            setup_reported_at=None,
        )
    if seen.running and seen.why and not hire.why:
        draft.tell(f"{hire.name} of pool {hire.pool} runs: {seen.why}")
    if hire.status == RELEASING and not hire.handle:
        draft.asked.append(se.CancelAllocation(hire.pool, hire.name, seen.handle, hire.why))
    elif hire.handle and hire.handle != seen.handle:
        draft.asked.append(se.CancelAllocation(hire.pool, hire.name, seen.handle, "it was started twice"))
        return
    draft.update(hire, handle=hire.handle or seen.handle, why=_why(hire, seen))


def _gone(draft: ProvisioningDraft, hire: Allocation, why: str) -> None:
    draft.forget(hire)
    if hire.status == RELEASING:
        return
    draft.lose(hire)
    draft.tell(f"{hire.name} of pool {hire.pool} is gone: {why}")
    if hire.status == SUBMITTED:
        draft.stand(hire.pool, failed_starts=draft.health.get(hire.pool, PoolHealth()).failed_starts + 1)
    lived_s = draft.now - hire.since if hire.status == RUNNING else 0.0
    if lived_s < draft.base.timeouts.min_lifetime_s and not hire.leaving:
        draft.strike(hire.pool, f"{hire.name} was gone too soon: {why}", do=LOOK)


def _on_unreachable(draft: ProvisioningDraft, event: se.PoolUnreachable) -> None:
    standing = draft.health.get(event.pool, PoolHealth())
    if standing.unreachable_since is None:
        draft.stand(event.pool, unreachable_since=draft.now, why=event.why, where=event.where, do=event.do)
        draft.fail(event.pool, final=event.final)
        draft.tell(f"pool {event.pool} cannot be reached: {event.why}; {event.do or 'it is asked again by itself'}")


def _on_away(draft: ProvisioningDraft, event: se.CoordinatorWasDown) -> None:
    """Time in which nobody could come, and nobody was asked, is held against no machine and no pool."""

    def later(at: float | None) -> float | None:
        return None if at is None else min(draft.now, at + event.seconds)

    for hire in [one for one in draft.allocations.values() if one.status in (REQUESTED, SUBMITTED)]:
        draft.update(hire, since=later(hire.since), setup_reported_at=later(hire.setup_reported_at))
    for pool, standing in list(draft.health.items()):
        draft.stand(pool, failing_since=later(standing.failing_since))


def _on_closed(draft: ProvisioningDraft, event: se.PoolClosed) -> None:
    for hire in [one for one in draft.allocations.values() if one.pool == event.pool]:
        draft.forget(hire)


def _reached(draft: ProvisioningDraft, pool: str) -> None:
    standing = draft.health.get(pool, PoolHealth())
    if standing.unreachable_since is not None:
        draft.stand(pool, unreachable_since=None, why="", final=False)
        draft.tell(f"pool {pool} can be reached again")


def _on_preparing(draft: ProvisioningDraft, event: se.SetupProgressed) -> None:
    """It is not mistaken for a machine slots_by_run agent does not come for as long as it says what it does."""
    hire = draft.allocations.get(event.allocation)
    if hire is not None and hire.status in (REQUESTED, SUBMITTED):
        since = hire.since if hire.preparing else draft.now
        billed_until = draft.now if hire.billed_until is None else hire.billed_until
        if event.why != hire.why:
            draft.tell(f"{hire.name} of pool {hire.pool} {event.why}")
        draft.update(
            hire,
            status=SUBMITTED,
            started=True,
            overdue=hire.overdue and hire.preparing,
            since=since,
            billed_until=billed_until,
            setup_reported_at=draft.now,
            why=event.why,
        )


def _on_unprepared(draft: ProvisioningDraft, event: se.SetupFailed) -> None:
    hire = draft.allocations.get(event.allocation)
    if hire is not None and hire.status in (REQUESTED, SUBMITTED):
        draft.strike(hire.pool, event.why, event.where, event.do)
        draft.stand(hire.pool, failed_starts=draft.health[hire.pool].failed_starts + 1)
        if event.final:
            draft.fail(hire.pool, final=True)
        draft.let_go(hire, event.why)


def _on_joined(draft: ProvisioningDraft, event: se.AgentArrived) -> None:
    hire = draft.allocations.get(event.agent)
    if hire is not None and hire.status in (REQUESTED, SUBMITTED):
        billed_until = draft.now if hire.billed_until is None else hire.billed_until
        draft.update(
            hire,
            status=RUNNING,
            since=draft.now,
            overdue=False,
            started=True,
            billed_until=billed_until,
            setup_reported_at=None,
        )
        if hire.pool in draft.health:
            draft.stand(hire.pool, retry_at=0.0, why="", failing_since=None, final=False, failed_starts=0)


def _on_leaving(draft: ProvisioningDraft, event: se.AgentLeaving) -> None:
    """It has got a notice, and hands over; another is hired meanwhile."""
    hire = draft.allocations.get(event.agent)
    if hire is not None and hire.status == RUNNING:
        draft.update(hire, leaving=True, why=event.why)


def _on_lost(draft: ProvisioningDraft, event: se.AgentLost) -> None:
    """Its agent is given up, whatever the engine says of the machine: that is let go, and another is hired."""
    hire = draft.allocations.get(event.agent)
    if hire is not None and hire.status == RUNNING:
        draft.lose(hire)
        if draft.now - hire.since < draft.base.timeouts.min_lifetime_s and not hire.leaving:
            draft.strike(hire.pool, f"{hire.name} was lost too soon: {event.why}")
        draft.let_go(hire, event.why)


def _on_ended(draft: ProvisioningDraft, event: se.AllocationEnded) -> None:
    hire = draft.allocations.get(event.allocation)
    if hire is not None and hire.status == RELEASING:
        draft.forget(hire)


def _on_wait_over(draft: ProvisioningDraft, event: se.ProvisioningTimerExpired) -> None:
    hire = draft.allocations.get(event.allocation)
    if event.timer == "start":
        for need in draft.base.demands:
            troubles = feasibility.start_problems(draft.freeze(), need, draft.now) if need.run == event.run else ()
            draft.asked += [se.FailInfeasibleRun(need.run, troubles)] if troubles else []
    elif event.timer == "pool" and event.pool in draft.health:
        draft.stand(event.pool, retry_at=0.0)
    elif hire is None:
        return
    elif event.timer == "wait" and hire.status == SUBMITTED:
        pool = draft.base.pools.get(hire.pool)
        waited_s = pool.max_wait_s if pool is not None else 0.0
        draft.update(hire, overdue=True)
        draft.tell(
            f"{hire.name} was not there after {waited_s:g} s ({hire.why or 'nobody says why'}): others are asked"
        )
    elif event.timer == "join" and hire.status == SUBMITTED:
        why = f"its machine runs, but no agent came within {draft.base.timeouts.join_s:g} s"
        draft.strike(hire.pool, f"{hire.name}: {why}", do=f"see that its machines reach the coordinator: {LOOK}")
        draft.stand(hire.pool, failed_starts=draft.health[hire.pool].failed_starts + 1)
        draft.let_go(hire, why)
    elif event.timer == "cancel" and hire.status == RELEASING:
        draft.update(hire, since=draft.now)
        draft.asked.append(se.CancelAllocation(hire.pool, hire.name, hire.handle, hire.why))
    elif event.timer == "surplus" and hire.unused_since is not None and hire.status in LIVE:
        draft.let_go(hire, hire.unused_why or "no run needs it")


_HANDLERS: dict[type, Callable[[ProvisioningDraft, Any], None]] = {
    se.PoolsConfigured: _on_pools,
    se.DemandChanged: _on_needs,
    se.AllocationSubmitted: _on_submitted,
    se.AllocationRejected: _on_refused,
    se.PoolListed: _on_observed,
    se.PoolUnreachable: _on_unreachable,
    se.CoordinatorWasDown: _on_away,
    se.PoolClosed: _on_closed,
    se.SetupProgressed: _on_preparing,
    se.SetupFailed: _on_unprepared,
    se.AgentArrived: _on_joined,
    se.AgentLeaving: _on_leaving,
    se.AgentLost: _on_lost,
    se.AllocationEnded: _on_ended,
    se.ProvisioningTimerExpired: _on_wait_over,
}
