"""Provisioning: which machines to request from which pools, and which to release.

A pool is a source of machines: some ssh hosts, a Slurm partition, a Ray cluster. An *allocation* is one agent
requested from a pool until it is released. Each run states its *demand*: how many slots it can use, how many it needs
at least, and its pools in order of preference. Provisioning keeps allocations and demands in balance while pools
reject requests, machines are preempted, and the coordinator itself may be down for a while.

`decide(state, event, now)` returns the next state and the instructions to carry out; `expired_timers(state, now)`
returns the events for timers that have expired. Both are pure. After every event the draft serves all demands again
from the allocations there are (see `assignment`), requests what is missing and marks what is unused. States::

    REQUESTED ──accepted──▶ SUBMITTED ──agent connects──▶ RUNNING ──unused──▶ RELEASING ──engine confirms──▶ forgotten
        │                      │                             │
        └──────────────────────┴── rejected, ended or lost: forgotten, and the demand is served from elsewhere

*Never request twice.* The request is in the journal, under a name that no other allocation ever gets, before the
engine hears of it. A coordinator that was killed in between cannot know whether the engine got the request, so it
asks what the engine lists: what is listed is adopted, what is not is submitted again under the same name, and what it
never requested is cancelled. Should the engine start one name twice, the second is cancelled. A released allocation
stays in the state, and its cancellation is repeated, until the engine no longer lists it: nothing that costs money is
forgotten.

*Pools in order.* A demand is served from its first pool as far as that delivers. A machine that takes longer than the
pool's `max_wait_s` becomes overdue: it stays in its queue, but the demand is served from the next pool meanwhile. If
it arrives after all, the run moves to it, and the machine of the later pool is released once it is no longer needed
to bridge the gap. A machine with notice is replaced before it leaves.

*Failing pools.* A rejection, a failed setup, or an agent that lives for less than `min_lifetime_s` counts against the
pool, which is then left alone for 5, 10, 20, … s up to 10 min. The other pools are asked meanwhile. A run that has
not started fails once its pools cannot deliver its minimum (see `feasibility`); one that has started waits. Time
during which the coordinator was down counts against no pool and no machine.

*Budget.* Costs are charged up to `now` before any event is handled. A run whose budget gets low releases its most
expensive machines first, and is stopped while a clean stop can still be paid (see `budget`).

*Surplus.* A machine that no demand uses is released after `surplus_s`, so that a run that ends just before another
begins hands its machines over instead of returning them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from shoal.core.provisioning import events as se
from shoal.core.provisioning import feasibility
from shoal.core.provisioning.assignment import assign, over_budget
from shoal.core.provisioning.costs import Account
from shoal.core.provisioning.draft import ProvisioningDraft
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
)

SEE_LOG = "see agent.log below allocations/ in its directory on that machine"

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
]


def decide(
    state: ProvisioningState, event: se.Event, now: float
) -> tuple[ProvisioningState, tuple[se.Instruction, ...]]:
    """Return the next state and the instructions to carry out."""
    draft = ProvisioningDraft(state, now)
    _HANDLERS[type(event)](draft, event)
    draft.level()
    return draft.freeze(), tuple(draft.instructions)


def expired_timers(state: ProvisioningState, now: float) -> tuple[se.ProvisioningTimerExpired, ...]:
    """Return an event for every timer that has expired, except that of budgets."""
    timeouts = state.timeouts
    expired = [
        se.ProvisioningTimerExpired("pool", pool=name)
        for name, health in state.health.items()
        if 0.0 < health.retry_at <= now
    ]
    expired += [
        se.ProvisioningTimerExpired("start", run=demand.run)
        for demand in state.demands
        if feasibility.start_problems(state, demand, now)
    ]
    for allocation in state.allocations.values():
        waited_s = now - allocation.since
        max_wait_s = state.pools[allocation.pool].max_wait_s if allocation.pool in state.pools else 0.0
        silent_s = now - max(allocation.since, allocation.setup_reported_at or allocation.since)
        submitted = allocation.status == SUBMITTED
        slow = submitted and (allocation.preparing or not allocation.started)
        if submitted and allocation.started and silent_s > timeouts.join_s:
            expired.append(se.ProvisioningTimerExpired("join", allocation=allocation.name))
        elif slow and not allocation.overdue and waited_s > max_wait_s:
            expired.append(se.ProvisioningTimerExpired("wait", allocation=allocation.name))
        elif allocation.status == RELEASING and waited_s > timeouts.cancel_retry_s:
            expired.append(se.ProvisioningTimerExpired("cancel", allocation=allocation.name))
        elif allocation.unused_since is not None and now - allocation.unused_since >= timeouts.surplus_s:
            expired.append(se.ProvisioningTimerExpired("surplus", allocation=allocation.name))
    return tuple(expired)


def expired_budget_timer(state: ProvisioningState, now: float) -> tuple[se.ProvisioningTimerExpired, ...]:
    """Return an event if some run can no longer pay for all that it uses; call it every `budget.CHECK_INTERVAL_S`."""
    if all(demand.budget is None for demand in state.demands):
        return ()
    charged = ProvisioningDraft(state, now).freeze()
    changed = assign(charged, state.demands).slots != assign(state, state.demands).slots
    if changed or any(over_budget(charged, run) for run in {demand.run for demand in state.demands}):
        return (se.ProvisioningTimerExpired("budget"),)
    return ()


def account_at(state: ProvisioningState, now: float) -> Account:
    """Return the costs of all runs up to `now`."""
    return ProvisioningDraft(state, now).account


def is_new_information(state: ProvisioningState, event: se.PoolListed) -> bool:
    """Return whether a pool's listing differs from the state; if not, it need not be journalled."""
    existing = {name: allocation for name, allocation in state.allocations.items() if allocation.pool == event.pool}
    named = {listed.allocation for listed in event.listed}
    if event.unsubmitted or state.health.get(event.pool, PoolHealth()).unreachable_since is not None:
        return True
    if any(allocation.status != REQUESTED and name not in named for name, allocation in existing.items()):
        return True
    return any(_differs(existing.get(listed.allocation), listed) for listed in event.listed)


def _differs(allocation: Allocation | None, listed: se.ListedAllocation) -> bool:
    return (
        allocation is None
        or allocation.status == REQUESTED
        or allocation.handle != listed.handle
        or (listed.running != allocation.started and allocation.status != RELEASING)
        or (_why(allocation, listed) != allocation.why and allocation.status == SUBMITTED)
        or (bool(listed.why) and not allocation.why and allocation.status == RUNNING)
    )


def _why(allocation: Allocation, listed: se.ListedAllocation) -> str:
    """Return what to show about an allocation: during its setup, its own report."""
    return allocation.why if allocation.preparing else listed.why or allocation.why


# --- pools and demands


def _on_pools_configured(draft: ProvisioningDraft, event: se.PoolsConfigured) -> None:
    draft.base = replace(draft.base, pools={pool.name: pool for pool in event.pools})
    draft.health = {name: health for name, health in draft.health.items() if name in draft.base.pools}
    for pool in [pool for pool in event.pools if not pool.retired]:
        live = [a for a in draft.allocations.values() if a.pool == pool.name and a.status in LIVE and not a.leaving]
        for allocation in sorted(live, key=_keep_first)[pool.limit :]:
            draft.release(allocation, f"the limit of pool {pool.name} was lowered to {pool.limit}")


def _keep_first(allocation: Allocation) -> tuple[int, bool, float, str]:
    """Return the sort key by which allocations are kept: running, used, and old ones first."""
    status = LIVE[::-1].index(allocation.status)
    return status, allocation.unused_since is not None, allocation.since, allocation.name


def _on_demand_changed(draft: ProvisioningDraft, event: se.DemandChanged) -> None:
    existing = {demand.run for demand in draft.base.demands}
    draft.base = replace(draft.base, demands=event.demands)
    pools = {pool for demand in event.demands if demand.run not in existing for pool in demand.pools}
    for pool in sorted(pools & draft.health.keys()):
        _forgive(draft, pool)


def _forgive(draft: ProvisioningDraft, pool: str) -> None:
    """Reset a pool's failures for a new run: the cause may have been fixed since."""
    if draft.health[pool].unreachable_since is None:
        draft.update_health(pool, retry_at=0.0, failures=0, why="", failing_since=None, final=False, failed_starts=0)
    else:
        draft.update_health(pool, failing_since=draft.now)


def _on_pool_listed(draft: ProvisioningDraft, event: se.PoolListed) -> None:
    """Compare a complete listing with the state: what it does not name has ended."""
    _mark_reachable(draft, event.pool)
    for listed in event.listed:
        allocation = draft.allocations.get(listed.allocation)
        if allocation is None:
            why = "not requested by this coordinator"
            draft.note(f"cancelling {listed.allocation} of pool {event.pool}: {why}")
            draft.cancel(event.pool, listed.allocation, listed.handle, why)
        else:
            _on_listed(draft, allocation, listed)
    named, ended = {listed.allocation for listed in event.listed}, dict(event.ended)
    for allocation in [a for a in draft.allocations.values() if a.pool == event.pool and a.name not in named]:
        if allocation.status != REQUESTED:
            _on_gone(draft, allocation, ended.get(allocation.name, "its engine no longer lists it"))
        elif allocation.name in event.unsubmitted:
            draft.submit(allocation, "the coordinator went down before it was submitted")


def _on_listed(draft: ProvisioningDraft, allocation: Allocation, listed: se.ListedAllocation) -> None:
    if allocation.status == REQUESTED:
        allocation = draft.update(allocation, status=SUBMITTED, since=draft.now)
    if listed.running and not allocation.started:
        since = draft.now if allocation.status == SUBMITTED else allocation.since
        allocation = draft.update(
            allocation, started=True, overdue=False, since=since, billed_until=_billed_until(draft, allocation)
        )
    elif allocation.started and not listed.running and allocation.status in (SUBMITTED, RUNNING):
        # The engine requeued it: its agent is gone or going, and it will come back under the same name.
        draft.count_loss(allocation)
        allocation = draft.update(
            allocation,
            status=SUBMITTED,
            started=False,
            leaving=False,
            since=draft.now,
            billed_until=None,
            setup_reported_at=None,
        )
    if listed.running and listed.why and not allocation.why:
        draft.note(f"{allocation.name} of pool {allocation.pool} is running: {listed.why}")
    if allocation.status == RELEASING and not allocation.handle:
        draft.cancel(allocation.pool, allocation.name, listed.handle, allocation.why)
    elif allocation.handle and allocation.handle != listed.handle:
        draft.cancel(allocation.pool, allocation.name, listed.handle, "it was started twice")
        return
    draft.update(allocation, handle=allocation.handle or listed.handle, why=_why(allocation, listed))


def _on_gone(draft: ProvisioningDraft, allocation: Allocation, why: str) -> None:
    """Forget an allocation that its engine no longer has; count it against the pool if it ended early."""
    draft.forget(allocation)
    if allocation.status == RELEASING:
        return
    draft.count_loss(allocation)
    draft.note(f"{allocation.name} of pool {allocation.pool} ended: {why}")
    if allocation.status == SUBMITTED:
        draft.count_failed_start(allocation.pool)
    lived_s = draft.now - allocation.since if allocation.status == RUNNING else 0.0
    if lived_s < draft.base.timeouts.min_lifetime_s and not allocation.leaving:
        draft.back_off(allocation.pool, f"{allocation.name} ended too early: {why}", do=SEE_LOG)


def _on_pool_unreachable(draft: ProvisioningDraft, event: se.PoolUnreachable) -> None:
    if draft.health.get(event.pool, PoolHealth()).unreachable_since is None:
        draft.update_health(event.pool, unreachable_since=draft.now, why=event.why, where=event.where, do=event.do)
        draft.mark_failing(event.pool, final=event.final)
        draft.note(f"pool {event.pool} is unreachable: {event.why}; {event.do or 'it will be retried'}")


def _mark_reachable(draft: ProvisioningDraft, pool: str) -> None:
    if draft.health.get(pool, PoolHealth()).unreachable_since is not None:
        draft.update_health(pool, unreachable_since=None, why="", final=False)
        draft.note(f"pool {pool} is reachable again")


def _on_pool_closed(draft: ProvisioningDraft, event: se.PoolClosed) -> None:
    for allocation in [a for a in draft.allocations.values() if a.pool == event.pool]:
        draft.forget(allocation)


def _on_coordinator_was_down(draft: ProvisioningDraft, event: se.CoordinatorWasDown) -> None:
    """Shift the starts of all waits, so that the time counts against no machine and no pool."""

    def shifted(at: float | None) -> float | None:
        return None if at is None else min(draft.now, at + event.seconds)

    for allocation in [a for a in draft.allocations.values() if a.status in (REQUESTED, SUBMITTED)]:
        reported_at = shifted(allocation.setup_reported_at)
        draft.update(allocation, since=shifted(allocation.since), setup_reported_at=reported_at)
    for pool, health in list(draft.health.items()):
        draft.update_health(pool, failing_since=shifted(health.failing_since))


# --- the course of one allocation


def _on_submitted(draft: ProvisioningDraft, event: se.AllocationSubmitted) -> None:
    allocation = draft.allocations.get(event.allocation)
    if allocation is None:
        draft.cancel(event.pool, event.allocation, event.handle, "not requested by this coordinator")
    elif allocation.status == REQUESTED:
        draft.update(allocation, status=SUBMITTED, handle=event.handle, since=draft.now)
        draft.clear_failing(allocation.pool)
    elif allocation.status == RELEASING:
        draft.cancel(allocation.pool, allocation.name, event.handle, allocation.why)
        draft.update(allocation, handle=event.handle)
    elif not allocation.handle:
        draft.update(allocation, handle=event.handle)


def _on_rejected(draft: ProvisioningDraft, event: se.AllocationRejected) -> None:
    allocation = draft.allocations.get(event.allocation)
    if allocation is not None and allocation.status in (REQUESTED, RELEASING):
        draft.forget(allocation)
        draft.back_off(allocation.pool, event.why, event.where, event.do)
        if allocation.status == REQUESTED:
            draft.mark_failing(allocation.pool, final=event.final)


def _on_setup_progressed(draft: ProvisioningDraft, event: se.SetupProgressed) -> None:
    """Restart the wait for the agent: a machine that reports its setup has not hung."""
    allocation = draft.allocations.get(event.allocation)
    if allocation is not None and allocation.status in (REQUESTED, SUBMITTED):
        if event.why != allocation.why:
            draft.note(f"{allocation.name} of pool {allocation.pool} {event.why}")
        draft.update(
            allocation,
            status=SUBMITTED,
            started=True,
            overdue=allocation.overdue and allocation.preparing,
            since=allocation.since if allocation.preparing else draft.now,
            billed_until=_billed_until(draft, allocation),
            setup_reported_at=draft.now,
            why=event.why,
        )


def _on_setup_failed(draft: ProvisioningDraft, event: se.SetupFailed) -> None:
    allocation = draft.allocations.get(event.allocation)
    if allocation is not None and allocation.status in (REQUESTED, SUBMITTED):
        draft.back_off(allocation.pool, event.why, event.where, event.do)
        draft.count_failed_start(allocation.pool)
        if event.final:
            draft.mark_failing(allocation.pool, final=True)
        draft.release(allocation, event.why)


def _on_agent_arrived(draft: ProvisioningDraft, event: se.AgentArrived) -> None:
    allocation = draft.allocations.get(event.agent)
    if allocation is not None and allocation.status in (REQUESTED, SUBMITTED):
        draft.update(
            allocation,
            status=RUNNING,
            since=draft.now,
            overdue=False,
            started=True,
            billed_until=_billed_until(draft, allocation),
            setup_reported_at=None,
        )
        if allocation.pool in draft.health:
            draft.update_health(allocation.pool, retry_at=0.0, why="", failing_since=None, final=False, failed_starts=0)


def _on_agent_leaving(draft: ProvisioningDraft, event: se.AgentLeaving) -> None:
    """Stop counting on an agent with notice, so that its replacement is requested while it still works."""
    allocation = draft.allocations.get(event.agent)
    if allocation is not None and allocation.status == RUNNING:
        draft.update(allocation, leaving=True, why=event.why)


def _on_agent_lost(draft: ProvisioningDraft, event: se.AgentLost) -> None:
    """Release the machine of a lost agent, whatever its engine says of it; a replacement is requested."""
    allocation = draft.allocations.get(event.agent)
    if allocation is not None and allocation.status == RUNNING:
        draft.count_loss(allocation)
        if draft.now - allocation.since < draft.base.timeouts.min_lifetime_s and not allocation.leaving:
            draft.back_off(allocation.pool, f"{allocation.name} was lost too early: {event.why}")
        draft.release(allocation, event.why)


def _on_ended(draft: ProvisioningDraft, event: se.AllocationEnded) -> None:
    allocation = draft.allocations.get(event.allocation)
    if allocation is not None and allocation.status == RELEASING:
        draft.forget(allocation)


def _billed_until(draft: ProvisioningDraft, allocation: Allocation) -> float:
    """Return the time from which a started machine is charged: now, unless it is charged already."""
    return draft.now if allocation.billed_until is None else allocation.billed_until


# --- timers


def _on_timer_expired(draft: ProvisioningDraft, event: se.ProvisioningTimerExpired) -> None:
    allocation = draft.allocations.get(event.allocation)
    if event.timer == "start":
        for demand in draft.base.demands:
            problems = feasibility.start_problems(draft.freeze(), demand, draft.now) if demand.run == event.run else ()
            draft.instructions += [se.FailInfeasibleRun(demand.run, problems)] if problems else []
    elif event.timer == "pool" and event.pool in draft.health:
        draft.update_health(event.pool, retry_at=0.0)
    elif allocation is None:
        return
    elif event.timer == "wait" and allocation.status == SUBMITTED:
        pool = draft.base.pools.get(allocation.pool)
        max_wait_s = pool.max_wait_s if pool is not None else 0.0
        draft.update(allocation, overdue=True)
        why = allocation.why or "no reason given"
        draft.note(f"{allocation.name} did not start within {max_wait_s:g} s ({why}); trying other pools")
    elif event.timer == "join" and allocation.status == SUBMITTED:
        why = f"its machine runs, but its agent did not connect within {draft.base.timeouts.join_s:g} s"
        do = f"check that its machines can reach the coordinator; {SEE_LOG}"
        draft.back_off(allocation.pool, f"{allocation.name}: {why}", do=do)
        draft.count_failed_start(allocation.pool)
        draft.release(allocation, why)
    elif event.timer == "cancel" and allocation.status == RELEASING:
        draft.update(allocation, since=draft.now)
        draft.cancel(allocation.pool, allocation.name, allocation.handle, allocation.why)
    elif event.timer == "surplus" and allocation.unused_since is not None and allocation.status in LIVE:
        draft.release(allocation, allocation.unused_why or "no run needs it")


_HANDLERS: dict[type, Callable[[ProvisioningDraft, Any], None]] = {
    se.PoolsConfigured: _on_pools_configured,
    se.DemandChanged: _on_demand_changed,
    se.AllocationSubmitted: _on_submitted,
    se.AllocationRejected: _on_rejected,
    se.PoolListed: _on_pool_listed,
    se.PoolUnreachable: _on_pool_unreachable,
    se.CoordinatorWasDown: _on_coordinator_was_down,
    se.PoolClosed: _on_pool_closed,
    se.SetupProgressed: _on_setup_progressed,
    se.SetupFailed: _on_setup_failed,
    se.AgentArrived: _on_agent_arrived,
    se.AgentLeaving: _on_agent_leaving,
    se.AgentLost: _on_agent_lost,
    se.AllocationEnded: _on_ended,
    se.ProvisioningTimerExpired: _on_timer_expired,
}
