"""Feasibility of a start: can a run that has not started yet still start with its pools.

A run that trains waits for machines without limit. One that has not started fails early if its pools can never deliver
the minimum, so that a typo in a partition name costs a minute and not a night.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shoal.core.nouns import counted
from shoal.core.provisioning.events import MachineDemand, PoolInfo, PoolProblem
from shoal.core.provisioning.state import LIVE, REQUESTED, RUNNING, SUBMITTED, PoolHealth, ProvisioningState

# After so many machines in a row that ended before their agents connected, the pool is at fault.
MAX_FAILED_STARTS = 3


def start_problems(state: ProvisioningState, demand: MachineDemand, now: float) -> tuple[PoolProblem, ...]:
    """Return the problem of each pool if a demand cannot get its minimum from them; empty if it can, or has started.

    A failing pool counts with the slots that it has delivered, any other with all that it may deliver.
    """
    if demand.started:
        return ()
    slots, problems = 0, []
    for name in demand.pools:
        pool, health = state.pools.get(name), state.health.get(name)
        problem = _problem(pool, health, demand, now) if pool is not None else None
        if problem is not None:
            useless = health is not None and health.failed_starts >= MAX_FAILED_STARTS
            slots += _delivered(state, name, (RUNNING,) if useless else LIVE)
            problems.append(problem)
        elif pool is not None:
            slots += pool.limit * pool.slots
    if slots >= demand.min_slots:
        return ()
    named = {problem.pool for problem in problems}
    problems += [_too_small(pool, demand) for pool in _pools(state.pools, demand) if pool.name not in named]
    return tuple(problems)


def describe_wait(state: ProvisioningState, pools: Sequence[str]) -> str:
    """Return a sentence about the machines that these pools have yet to deliver, or "" if there are none."""
    parts = []
    for name in pools:
        health = state.health.get(name)
        coming = [a for a in state.allocations.values() if a.pool == name and a.status in (REQUESTED, SUBMITTED)]
        if coming:
            why = next((a.why for a in coming if a.why and not a.started), "")
            parts.append(f"{len(coming)} of pool {name}" + (f" ({why})" if why else ""))
        elif health is not None and health.why:
            parts.append(f"pool {name}, to be retried ({health.why})")
    return f"waiting for machines: {'; '.join(parts)}" if parts else ""


def _problem(pool: PoolInfo, health: PoolHealth | None, demand: MachineDemand, now: float) -> PoolProblem | None:
    if pool.retired:
        do = "name another pool, or configure it again and restart the coordinator"
        return PoolProblem(pool.name, "it is no longer configured, so it provides no machines", do=do)
    if pool.limit == 0:
        return PoolProblem(pool.name, "its limit is 0, so it provides no machines", do="raise its limit")
    if health is None:
        return None
    if health.final:
        return PoolProblem(pool.name, health.why, health.where, health.do)
    if health.failed_starts >= MAX_FAILED_STARTS:
        why = f"{counted(health.failed_starts, 'machine')} in a row ended before their agents connected; {health.why}"
        return PoolProblem(pool.name, why, health.where, health.do)
    if health.failing_since is not None and now - health.failing_since >= demand.start_timeout_s:
        why = f"every request failed for {demand.start_timeout_s:g} s: {health.why}"
        return PoolProblem(pool.name, why, health.where, health.do)
    return None


def _too_small(pool: PoolInfo, demand: MachineDemand) -> PoolProblem:
    why = (
        f"it provides at most {counted(pool.limit * pool.slots, 'slot')}, but the run needs at least {demand.min_slots}"
    )
    return PoolProblem(pool.name, why, do="raise its limit, name more pools, or ask for fewer members with -n")


def _delivered(state: ProvisioningState, pool: str, statuses: tuple[str, ...]) -> int:
    return sum(a.slots for a in state.allocations.values() if a.pool == pool and a.status in statuses)


def _pools(configured: Mapping[str, PoolInfo], demand: MachineDemand) -> list[PoolInfo]:
    return [configured[name] for name in demand.pools if name in configured]
