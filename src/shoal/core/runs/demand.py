"""Demand of runs for machines: the slots that each could use, computed again after every event."""

from __future__ import annotations

from dataclasses import replace

from shoal.core.fleet.state import ACTIVE, FINISHING, DesiredRun
from shoal.core.membership.state import EVALUATOR, SERVER, TRAINER
from shoal.core.provisioning import events as pe
from shoal.core.runs.state import CoordinatorState, RunState


def machine_demands(state: CoordinatorState) -> tuple[pe.MachineDemand, ...]:
    """Return the slots that each run could use: by priority, then in the order of submission."""
    active = [run for run in state.runs.values() if not run.has_ended]
    demands: list[pe.MachineDemand] = []
    for run in sorted(active, key=lambda run: -run.spec.priority):
        desired = state.fleet.runs.get(run.name)
        if desired is not None and (run.spec.on or desired.reserved):
            demands += _demands_of(state, run, desired)
    return tuple(demands)


def _demands_of(state: CoordinatorState, run: RunState, desired: DesiredRun) -> list[pe.MachineDemand]:
    """Return one demand per role; a run that is about to end keeps its machines but gets no more."""
    active, finishing = desired.status == ACTIVE, desired.status == FINISHING
    roles = [
        (SERVER, desired.servers, desired.servers, active and desired.has_own_pools(SERVER)),
        (
            EVALUATOR,
            desired.evaluators,
            desired.evaluators,
            (active or finishing) and desired.has_own_pools(EVALUATOR),
        ),
        (TRAINER, desired.max_slots, desired.min_slots, active and bool(run.spec.on)),
    ]
    demands = []
    for role, most, least, wants in roles:
        if wants and most:
            required = desired.requirements_of(role)
            demand = pe.MachineDemand(run.name, required.pools, most, least, required.cpus, required.memory_bytes)
            # Training starts without the evaluator, so a pool that fails for it alone does not fail the run.
            started = role == EVALUATOR or _has_started(run, desired)
            start_timeout_s = float(run.settings.get("start_timeout_s", demand.start_timeout_s))
            budget = run.budget if active else None
            demands.append(replace(demand, budget=budget, started=started, start_timeout_s=start_timeout_s))
    agents = dict.fromkeys(p.agent for p in state.fleet.of_run(run.name) if p.alive and not active)
    if in_use := tuple(name for name in agents if name in state.provisioning.allocations):
        demands.append(pe.MachineDemand(run.name, (), 0, in_use=in_use))
    return demands


def _has_started(run: RunState, desired: DesiredRun) -> bool:
    """Return whether a member has trained; of an unmodified script, whether it was ever started."""
    state = run.membership
    return state.started or state.placement is not None or bool(run.spec.compat and desired.seen)
