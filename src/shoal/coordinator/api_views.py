"""API views: the coordinator's state as the HTTP API and the stored views show it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, astuple
from typing import Any

from shoal.coordinator.connections import AgentConnection
from shoal.coordinator.live_state import LiveRun, measure_progress, trainers_of_servers
from shoal.core.fleet import decide as fl
from shoal.core.membership import decide as mb
from shoal.core.membership.state import EVALUATOR, SERVER
from shoal.core.nouns import counted
from shoal.core.placement import describe_uncopied
from shoal.core.provisioning import decide as provisioning
from shoal.core.provisioning import feasibility
from shoal.core.provisioning.costs import Account, MachineCost
from shoal.core.provisioning.events import PoolInfo
from shoal.core.runs import queue
from shoal.core.runs.state import CoordinatorState, RunState
from shoal.wire.api import (
    AdjustmentView,
    AgentView,
    CostView,
    ErrorView,
    EvaluationView,
    ForecastView,
    MemberView,
    PoolView,
    RunView,
)
from shoal.wire.member_messages import HeartbeatMsg, StepTimes

# A process whose member counts as lost because it is silent; it is replaced unless it answers in time.
EVICTED = "evicted"
EVALUATING = "evaluating"


def run_view(run: RunState, state: CoordinatorState, live: LiveRun, directory: str, now: float) -> RunView:
    """Return the view of a run; `directory` is the run's own."""
    membership = run.membership
    latest = (measure_progress(run, live) if not run.has_ended else None) or live.progress
    status, reason, size = _status_reason_size(run, state)
    idle_before, idle_now = (latest.idle if latest else None) or (None, None)
    return RunView(
        run=run.name,
        name=run.spec.name,
        status=status,
        reason=reason,
        since=run.since,
        started=run.created,
        ended=run.ended_at,
        exit_code=run.exit_code,
        argv=run.spec.argv,
        members_min=membership.settings.min_members,
        members_max=membership.settings.max_members,
        world=membership.world.number if membership.world is not None else None,
        world_size=size,
        step=max(membership.step, latest.step if latest else 0, membership.checkpoint_step or 0),
        total_steps=latest.total_steps if latest else None,
        epoch=latest.epoch if latest else 0,
        loss=latest.loss if latest else None,
        samples_per_s=latest.samples_per_s if latest and not run.has_ended else 0.0,
        metrics=dict(latest.metrics) if latest else {},
        members=_members(run, state, live, now),
        losses=membership.losses,
        joins=membership.joins,
        last_change=run.last_change,
        checkpoint_step=membership.checkpoint_step,
        checkpoint_path=_local_path(membership.checkpoint_path, run.name, directory),
        directory=directory,
        batch=latest.batch if latest else 0,
        noise=latest.noise if latest else None,
        idle_before=idle_before,
        idle_now=idle_now,
        decided=tuple(
            AdjustmentView(d.what, d.step, dict(d.values), d.reason) for d in membership.adjustments.values()
        ),
        evaluation=_evaluation(run),
        user=run.user,
        problem=ErrorView(*astuple(run.problem)) if run.problem is not None else None,
        priority=run.spec.priority,
        **_costs(run, state, now),
        **_queued(run, state, now),
        cwd=run.spec.cwd,
        settings=dict(run.spec.settings),
        uncopied=describe_uncopied(membership.placement) if membership.placement is not None else "",
        forecast=_forecast(run, live, status, now),
    )


def _forecast(run: RunState, live: LiveRun, status: str, now: float) -> ForecastView | None:
    """Return when the run will be done, None if it is or has not begun."""
    if run.has_ended or run.membership.finished or status == "starting":
        return None
    if run.spec.compat:
        return ForecastView(unknown="the script does not use Shoal and reports no steps")
    if status != "training":
        return ForecastView(unknown=f"the run is {status}")
    return ForecastView(**asdict(live.forecast.time_left(now)))


def _costs(run: RunState, state: CoordinatorState, now: float) -> dict[str, Any]:
    if not run.spec.on and not any(role.on for role in run.spec.roles.values()):
        return {}
    account = provisioning.account_at(state.provisioning, now)
    return {
        "cost": _cost_view(account.of_run(run.name)),
        "costs": {pool: _cost_view(cost) for pool, cost in account.runs.get(run.name, {}).items()},
        "rate_per_h": provisioning.hourly_rate(state.provisioning, run.name),
        "budget": run.budget,
    }


def _queued(run: RunState, state: CoordinatorState, now: float) -> dict[str, Any]:
    queued = queue.queue_position(run, state, now) if not run.has_ended else None
    return {"queued": queued.position, "waits_for": queued.waits_for} if queued is not None else {}


def _cost_view(cost: MachineCost) -> CostView:
    return CostView(cost.machine_s, cost.spent, cost.saved, cost.unused, cost.lost)


def pool_views(state: provisioning.ProvisioningState, now: float) -> list[PoolView]:
    """Return the views of all configured pools."""
    account = provisioning.account_at(state, now)
    return [_pool_view(pool, state, account) for pool in state.pools.values()]


def _pool_view(pool: PoolInfo, state: provisioning.ProvisioningState, account: Account) -> PoolView:
    health = state.health.get(pool.name, provisioning.PoolHealth())
    statuses = [allocation.status for allocation in state.allocations.values() if allocation.pool == pool.name]
    blocked = health.unreachable_since is not None or health.retry_at > 0
    return PoolView(
        pool=pool.name,
        engine=pool.engine,
        limit=pool.limit,
        slots=pool.slots,
        price_per_h=pool.price_per_h,
        running=statuses.count(provisioning.RUNNING),
        waiting=statuses.count(provisioning.REQUESTED) + statuses.count(provisioning.SUBMITTED),
        trouble=health.why if blocked else "",
        until=health.retry_at or None,
        cost=_cost_view(account.of_pool(pool.name)),
        labels=dict(pool.labels),
        leaving=statuses.count(provisioning.RELEASING),
    )


def _local_path(path: str, run: str, directory: str) -> str:
    """Return the path of a checkpoint on this machine: uploaded ones are in the run's directory."""
    uploaded = f"coordinator://{run}/"
    return f"{directory}/{path.removeprefix(uploaded)}" if path.startswith(uploaded) else path


def _evaluation(run: RunState) -> EvaluationView | None:
    status = run.evaluation.status
    if status.step is None:
        return None
    return EvaluationView(
        step=status.step,
        metrics=dict(status.metrics),
        at=status.at,
        evaluations=status.evaluations,
        best=status.best,
        best_step=status.best_step,
        best_value=status.best_value,
        without=status.without,
        patience=status.patience,
        export=status.export,
    )


def _status_reason_size(run: RunState, state: CoordinatorState) -> tuple[str, str, int]:
    """Return status, reason and number of trainers; a compat run has processes instead of worlds."""
    world, desired = run.membership.world, state.fleet.runs.get(run.name)
    processes = state.fleet.of_run(run.name)
    empty = not run.has_ended and run.spec.on and not processes and not run.membership.members
    if empty and (machines := feasibility.describe_wait(state.provisioning, run.spec.on)):
        return run.shown_status, machines, 0
    if run.has_ended or not run.spec.compat or desired is None or desired.status == fl.STOPPING:
        return run.shown_status, run.reason, world.size if world is not None else trainers_of_servers(run)
    if desired.restart_reason:
        return "waiting", f"all members restart: {desired.restart_reason}", 0
    if running := sum(process.status in (fl.RUNNING, fl.DONE) for process in processes):
        return "training", f"{counted(running, 'member')} of an unmodified script, start {desired.generation}", running
    return "starting", f"waiting for at least {counted(desired.min_members, 'slot')}", 0


def _members(run: RunState, state: CoordinatorState, live: LiveRun, now: float) -> tuple[MemberView, ...]:
    processes = state.fleet.processes.of_run(run.name)
    names = list(dict.fromkeys([*run.membership.members, *processes]))
    if run.has_ended:
        names = [name for name in names if name in live.connections]
    world = run.membership.world
    ranks = world.ranks() if world is not None else {}
    samples = sum(live.heartbeats[name].share for name in ranks if name in live.heartbeats)
    views = [_member(name, ranks.get(name), samples, run, processes.get(name), live, now) for name in names]
    return tuple(sorted(views, key=lambda view: (view.rank is None, view.rank or 0, view.member)))


def _member(
    name: str, rank: int | None, samples: int, run: RunState, process: fl.ProcessState | None, live: LiveRun, now: float
) -> MemberView:
    member = run.membership.members.get(name)
    heartbeat, lease, connection = live.heartbeats.get(name), live.leases.get(name), live.connections.get(name)
    status = _member_status(run, member, process)
    age_s = max(0.0, now - lease.at) if lease else 0.0
    phase, phase_age_s = (heartbeat.phase, heartbeat.phase_age_s + age_s) if heartbeat and lease else ("", 0.0)
    if member is None and status != EVALUATING:
        # What it did last is over: it is no member any more, or its next process starts.
        phase, phase_age_s = ("silent", age_s) if status == EVICTED and lease else ("", 0.0)
    spent = heartbeat.spent if heartbeat is not None and rank is not None else StepTimes()
    return MemberView(
        member=name,
        incarnation=member.incarnation if member else process.incarnation if process else "",
        status=status,
        rank=rank,
        agent=process.agent if process else "",
        pid=(process.pid if process else 0) or (connection.pid if connection else 0),
        host=member.address.host if member else "",
        step=heartbeat.step if heartbeat else member.step if member else None,
        share=heartbeat.share if heartbeat else 0,
        phase=phase,
        phase_age_s=phase_age_s,
        heartbeat_age_s=age_s,
        samples_per_s=_member_rate(heartbeat, rank, samples, run),
        connected=connection is not None,
        data_s=spent.data_s,
        compute_s=spent.compute_s,
        wait_s=spent.wait_s,
        exchange_s=spent.exchange_s,
        role=member.role if member else fl.role_of(name),
        clock=heartbeat.clock if heartbeat else 0,
        ahead=heartbeat.ahead if heartbeat else 0,
        waits_for=heartbeat.waits_for if heartbeat else (),
    )


def _member_rate(heartbeat: HeartbeatMsg | None, rank: int | None, samples: int, run: RunState) -> float:
    """Return the samples per second of one member: its part of the world's rate. A step has `samples` in all."""
    if run.membership.placement is not None:
        return heartbeat.samples_per_s if heartbeat is not None else 0.0
    if heartbeat is None or rank is None or not samples:
        return 0.0
    return heartbeat.samples_per_s * heartbeat.share / samples


def _member_status(run: RunState, member: mb.MemberState | None, process: fl.ProcessState | None) -> str:
    if member is None:
        return _process_status(run, process)
    if member.leaving or (process is not None and process.status == fl.ENDING):
        return "leaving"
    if member.status == mb.REGROUPING:
        return "recovering"
    if member.role == SERVER and member.status == mb.TRAINING:
        return "serving"
    if member.status == mb.WAITING and (run.membership.world or run.membership.placement) is not None:
        return "spare"
    return member.status


def _process_status(run: RunState, process: fl.ProcessState | None) -> str:
    """Return the status of a process that is no member: one that starts, or the evaluator's."""
    if process is None:
        return "starting"
    if process.status == fl.RUNNING and process.role == EVALUATOR:
        evaluator = run.evaluation.members.get(process.member)
        return EVALUATING if evaluator is not None and evaluator.connected else "starting"
    if process.status == fl.RUNNING and process.unresponsive_since is not None:
        return EVICTED
    if process.status == fl.RUNNING and process.joined:
        return "rejoining"
    shown = {fl.RUNNING: "starting", fl.ENDING: "leaving", fl.BACKOFF: "waiting"}
    return shown.get(process.status, process.status)


def agent_views(state: CoordinatorState, connections: Mapping[str, AgentConnection], now: float) -> list[AgentView]:
    """Return the views of all agents, in the order in which they first connected."""
    members: dict[str, list[str]] = {}
    for process in state.fleet.processes.values():
        if process.alive:
            members.setdefault(process.agent, []).append(process.member)
    views = []
    for agent in sorted(state.fleet.agents.values(), key=lambda agent: agent.order):
        report, connection = state.machines.get(agent.name), connections.get(agent.name)
        machine = report.machine if report else None
        views.append(
            AgentView(
                agent=agent.name,
                machine=machine.name if machine else agent.name,
                cores=machine.cores if machine else 0,
                memory_bytes=machine.memory_bytes if machine else 0,
                devices=machine.devices if machine else (),
                slots=agent.slots,
                members=tuple(members.get(agent.name, ())),
                connected=connection is not None,
                heartbeat_age_s=max(0.0, now - connection.heard_at) if connection else 0.0,
                load=connection.load if connection else 0.0,
                notice=agent.notice,
                pool=agent.pool,
                via=connection.base_url if connection else "",
            )
        )
    return views
