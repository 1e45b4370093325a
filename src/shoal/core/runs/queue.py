"""Which runs wait for machines, in which order, and what each of them waits for; pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from shoal.core.fleet import decide as fl
from shoal.core.fleet.state import DesiredRun
from shoal.core.membership.state import EVALUATOR
from shoal.core.provisioning import decide as provisioning
from shoal.core.runs.state import CoordinatorState, RunState


@dataclass(frozen=True, slots=True)
class QueuedRun:
    """A run that has not begun: its place in the queue, and what it waits for."""

    place: int
    what: str


def queue_of(runs: CoordinatorState) -> list[str]:
    """The runs that have no process yet, in the order in which they get machines."""
    begun = {p.run for p in runs.fleet.processes.values() if p.role != EVALUATOR}
    found = [
        run
        for run in runs.runs.values()
        if not run.over and run.name not in begun and not run.membership.members and _is_going(runs, run)
    ]
    return [run.name for run in sorted(found, key=lambda run: -run.spec.priority)]


def waiting_of(run: RunState, runs: CoordinatorState, now: float) -> QueuedRun | None:
    """What a run waits for, None if it has begun."""
    queue = queue_of(runs)
    if run.name not in queue:
        return None
    wanted = runs.fleet.runs[run.name]
    asked = [_asked(run, runs, now), *_troubles(run, runs), _holders(run, runs)]
    what = f"{wanted.min_slots} places" if wanted.min_slots > 1 else "a place"
    return QueuedRun(1 + queue.index(run.name), "; ".join([what, *filter(None, asked)]))


def _is_going(runs: CoordinatorState, run: RunState) -> bool:
    wanted: DesiredRun | None = runs.fleet.runs.get(run.name)
    return wanted is not None and wanted.status == fl.ACTIVE


def _asked(run: RunState, runs: CoordinatorState, now: float) -> str:
    """The machines that were asked for on its behalf."""
    coming = [
        hire
        for hire in runs.supply.allocations.values()
        if run.name in hire.slots_by_run and hire.status in (provisioning.REQUESTED, provisioning.SUBMITTED)
    ]
    if not coming:
        return ""
    many = ", ".join(f"{count} of {pool}" for pool, count in sorted(Counter(hire.pool for hire in coming).items()))
    why = next((hire.why for hire in coming if hire.why), "")
    since_s = now - min(hire.since for hire in coming)
    return f"{many} asked for {since_s:.0f} s ago" + (f" ({why})" if why else "")


def _troubles(run: RunState, runs: CoordinatorState) -> list[str]:
    standings = {name: runs.supply.health.get(name, provisioning.PoolHealth()) for name in run.spec.on}
    return [f"pool {name}: {one.why}" for name, one in standings.items() if one.why]


def _holders(run: RunState, runs: CoordinatorState) -> str:
    """Who has the places that it may use."""
    wanted = runs.fleet.runs[run.name]
    mine = {a.name for a in runs.fleet.agents.values() if not wanted.requirements or _may(wanted, a.pool)}
    held = Counter(p.run for p in runs.fleet.processes.values() if p.agent in mine and p.alive)
    if not held:
        return "" if mine else "no machine is there"
    return "held by " + ", ".join(f"{name} ({count})" for name, count in held.most_common(3))


def _may(wanted: DesiredRun, pool: str) -> bool:
    pools = wanted.requirements_of("trainer").pools
    return not pools or not pool or pool in pools
