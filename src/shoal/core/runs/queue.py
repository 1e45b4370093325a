"""The queue of runs that wait for machines: their order, and what each of them waits for."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from shoal.core.fleet import decide as fleet
from shoal.core.fleet.state import DesiredRun
from shoal.core.membership.state import EVALUATOR, TRAINER
from shoal.core.nouns import counted
from shoal.core.provisioning import decide as provisioning
from shoal.core.runs.state import CoordinatorState, RunState


@dataclass(frozen=True, slots=True)
class QueuedRun:
    """A run that has not started: its position in the queue, from 1, and what it waits for."""

    position: int
    waits_for: str


def queued_runs(state: CoordinatorState) -> list[str]:
    """Return the runs that have no process yet, in the order in which they get machines."""
    begun = {p.run for p in state.fleet.processes.values() if p.role != EVALUATOR}
    waiting = [
        run
        for run in state.runs.values()
        if not run.has_ended and run.name not in begun and not run.membership.members and _is_active(state, run)
    ]
    return [run.name for run in sorted(waiting, key=lambda run: -run.spec.priority)]


def queue_position(run: RunState, state: CoordinatorState, now: float) -> QueuedRun | None:
    """Return the position of a run and what it waits for, None if it has started."""
    queue = queued_runs(state)
    if run.name not in queue:
        return None
    least = state.fleet.runs[run.name].min_slots
    slots = counted(least, "slot")
    causes = [_requested(run, state, now), *_pool_problems(run, state), _held_by(run, state)]
    return QueuedRun(1 + queue.index(run.name), "; ".join([slots, *filter(None, causes)]))


def _is_active(state: CoordinatorState, run: RunState) -> bool:
    desired = state.fleet.runs.get(run.name)
    return desired is not None and desired.status == fleet.ACTIVE


def _requested(run: RunState, state: CoordinatorState, now: float) -> str:
    """Return which machines were requested for the run, and how long ago."""
    pending = [
        allocation
        for allocation in state.provisioning.allocations.values()
        if run.name in allocation.slots_by_run and allocation.status in (provisioning.REQUESTED, provisioning.SUBMITTED)
    ]
    if not pending:
        return ""
    counts = sorted(Counter(allocation.pool for allocation in pending).items())
    machines = ", ".join(f"{count} of {pool}" for pool, count in counts)
    why = next((allocation.why for allocation in pending if allocation.why), "")
    since_s = now - min(allocation.since for allocation in pending)
    return f"{machines} requested {since_s:.0f} s ago" + (f" ({why})" if why else "")


def _pool_problems(run: RunState, state: CoordinatorState) -> list[str]:
    health = {name: state.provisioning.health.get(name) for name in run.spec.on}
    return [f"pool {name}: {pool.why}" for name, pool in health.items() if pool is not None and pool.why]


def _held_by(run: RunState, state: CoordinatorState) -> str:
    """Return which runs hold the slots that this run may use."""
    desired = state.fleet.runs[run.name]
    usable = {agent.name for agent in state.fleet.agents.values() if _may_use(desired, agent.pool)}
    if not usable:
        return "no machine is connected"
    held = Counter(p.run for p in state.fleet.processes.values() if p.agent in usable and p.alive)
    return "held by " + ", ".join(f"{name} ({count})" for name, count in held.most_common(3)) if held else ""


def _may_use(desired: DesiredRun, pool: str) -> bool:
    pools = desired.requirements_of(TRAINER).pools if desired.requirements else ()
    return not pools or not pool or pool in pools
