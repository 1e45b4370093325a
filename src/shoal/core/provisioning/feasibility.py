"""Whether a run can begin at all with what its pools have said so far; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shoal.core.provisioning.events import MachineDemand, PoolInfo, PoolProblem
from shoal.core.provisioning.state import LIVE, REQUESTED, RUNNING, SUBMITTED, PoolHealth, ProvisioningState

# So many machines in a row that were gone before their agents came are no accident.
FRUITLESS = 3


def start_problems(state: ProvisioningState, need: MachineDemand, now: float) -> tuple[PoolProblem, ...]:
    """What is wrong with each pool of a run that cannot begin as things are; nothing for all others.

    A pool that only fails is good for what it has given; one that does not is good for all that it may give.
    """
    if need.started:
        return ()
    places, troubles = 0, []
    for name in need.pools:
        pool, standing = state.pools.get(name), state.health.get(name)
        wrong = _wrong(pool, standing, need, now) if pool is not None else None
        if wrong is not None:
            failed_starts = standing is not None and standing.failed_starts >= FRUITLESS
            places += _had(state, name, (RUNNING,) if failed_starts else LIVE)
            troubles.append(wrong)
        elif pool is not None:
            places += pool.limit * pool.slots
    if places >= need.min_slots:
        return ()
    named = {trouble.pool for trouble in troubles}
    troubles += [_too_small(pool, need) for pool in _pools(state.pools, need) if pool.name not in named]
    return tuple(troubles)


def describe_wait(state: ProvisioningState, pools: Sequence[str]) -> str:
    """What a run without members waits for: machines of its pools, and what those say."""
    parts = []
    for name in pools:
        standing = state.health.get(name)
        coming = [h for h in state.allocations.values() if h.pool == name and h.status in (REQUESTED, SUBMITTED)]
        if coming:
            why = next((h.why for h in coming if h.why and not h.started), "")
            parts.append(f"{len(coming)} of pool {name}" + (f" ({why})" if why else ""))
        elif standing is not None and standing.why:
            parts.append(f"pool {name}, which is asked again ({standing.why})")
    return f"waiting for machines: {'; '.join(parts)}" if parts else ""


def _wrong(pool: PoolInfo, standing: PoolHealth | None, need: MachineDemand, now: float) -> PoolProblem | None:
    if pool.limit == 0:
        return PoolProblem(pool.name, "it may give no machine: its limit is 0", do="raise its limit")
    if standing is None:
        return None
    if standing.final:
        return PoolProblem(pool.name, standing.why, standing.where, standing.do)
    if standing.failed_starts >= FRUITLESS:
        why = f"{standing.failed_starts} machines in a row were gone before they could be used; {standing.why}"
        return PoolProblem(pool.name, why, standing.where, standing.do)
    if standing.failing_since is not None and now - standing.failing_since >= need.start_timeout_s:
        why = f"it was asked again and again for {need.start_timeout_s:g} s: {standing.why}"
        return PoolProblem(pool.name, why, standing.where, standing.do)
    return None


def _too_small(pool: PoolInfo, need: MachineDemand) -> PoolProblem:
    why = f"it gives {pool.limit * pool.slots} places at most, and the run cannot begin with less than {need.min_slots}"
    return PoolProblem(pool.name, why, do="raise its limit, name more pools, or ask for fewer members with -n")


def _had(state: ProvisioningState, pool: str, statuses: tuple[str, ...]) -> int:
    """The places of what a pool has given, and still may; if machines there are of no use, only of those that were."""
    return sum(hire.slots for hire in state.allocations.values() if hire.pool == pool and hire.status in statuses)


def _pools(known: Mapping[str, PoolInfo], need: MachineDemand) -> list[PoolInfo]:
    return [known[name] for name in need.pools if name in known]
