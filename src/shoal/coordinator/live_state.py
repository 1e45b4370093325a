"""What the coordinator knows, as the API shows it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import astuple
from typing import Any

from shoal.coordinator.connections import AgentConnection, MemberConnection
from shoal.core.fleet import decide as fl
from shoal.core.membership import decide as mb
from shoal.core.membership.leases import CoordinatorReachability
from shoal.core.membership.state import EVALUATOR, SERVER, TRAINER
from shoal.core.provisioning import decide as provisioning
from shoal.core.provisioning import feasibility
from shoal.core.provisioning.costs import Account, MachineCost
from shoal.core.provisioning.events import PoolInfo
from shoal.core.runs import events as runs_events
from shoal.core.runs import queue
from shoal.core.runs.state import CoordinatorState, RunState
from shoal.wire.api import AdjustmentView, AgentView, CostView, ErrorView, EvaluationView, MemberView, PoolView, RunView
from shoal.wire.member_messages import HeartbeatMsg, StepTimes


class LiveRun:
    """What a run's members said lately; it is not journaled."""

    __slots__ = ("beats", "hearing", "links", "measured", "measured_at", "said")

    def __init__(self) -> None:
        self.links: dict[str, MemberConnection] = {}
        self.beats: dict[str, mb.LastHeartbeat] = {}
        self.hearing: CoordinatorReachability | None = None
        self.said: dict[str, HeartbeatMsg] = {}
        self.measured: runs_events.ProgressMeasured | None = None
        self.measured_at = 0.0


def measure(run: RunState, live: LiveRun) -> runs_events.ProgressMeasured | None:
    """How the training goes, from the latest beats of the world's members."""
    world, members = run.membership.world, run.membership.members
    names = [seat.member for seat in world.seats] if world is not None else []
    served = run.membership.placement is not None
    if served:
        names = [m.name for m in members.values() if m.role == TRAINER and m.status == mb.TRAINING]
    if run.membership.finished:
        names = [m.name for m in members.values() if m.role == TRAINER and m.status == mb.DONE]
    said = [live.said[name] for name in names if name in live.said]
    said = [beat for beat in said if beat.step is not None]
    if not said:
        return None
    # Members beat at different times: of those that know the loss, the last to have made a step knows it best.
    first = max(said, key=lambda beat: beat.step or 0)
    loss = max((beat for beat in said if beat.loss is not None), key=lambda beat: beat.step or 0, default=first).loss
    return runs_events.ProgressMeasured(
        step=max(beat.step or 0 for beat in said),
        epoch=first.epoch,
        total_steps=first.total_steps,
        loss=loss,
        # Members of a world measure the rate of the whole of it, because they know everybody's share from the pulse.
        samples_per_s=(sum if served else max)(beat.samples_per_s for beat in said),
        metrics=next((finite for beat in said if (finite := _finite(beat.metrics))), {}),
        batch=first.batch,
        noise=first.noise,
        idle=first.idle,
    )


def _finite(metrics: dict[str, float]) -> dict[str, float]:
    """The journal has no words for what is not finite."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def is_news(found: runs_events.ProgressMeasured, last: runs_events.ProgressMeasured | None) -> bool:
    """Whether there was a step since, or the script has said something."""
    return last is None or (found.step, found.metrics) != (last.step, last.metrics)


def step_s(live: LiveRun) -> float:
    """The seconds of a usual step, 0 if nobody has told."""
    return max((beat.usual_step_s for beat in live.said.values()), default=0.0)


def run_view(run: RunState, runs: CoordinatorState, live: LiveRun, directory: str, now: float) -> RunView:
    state = run.membership
    latest = (measure(run, live) if not run.over else None) or live.measured
    status, reason, size = _now(run, runs)
    before, now_idle = (latest.idle if latest else None) or (None, None)
    return RunView(
        run=run.name,
        name=run.spec.name,
        status=status,
        reason=reason,
        since=run.since,
        started=run.created,
        ended=run.ended,
        exit_code=run.exit_code,
        argv=run.spec.argv,
        members_min=state.settings.min_members,
        members_max=state.settings.max_members,
        world=state.world.number if state.world is not None else None,
        world_size=size,
        step=max(state.step, latest.step if latest else 0, state.checkpoint_step or 0),
        total_steps=latest.total_steps if latest else None,
        epoch=latest.epoch if latest else 0,
        loss=latest.loss if latest else None,
        samples_per_s=latest.samples_per_s if latest and not run.over else 0.0,
        metrics=dict(latest.metrics) if latest else {},
        members=_members(run, runs, live, now),
        losses=state.losses,
        joins=state.joins,
        last_change=run.last_change,
        checkpoint_step=state.checkpoint_step,
        checkpoint_path=_seen_from_here(state.checkpoint_path, run.name, directory),
        directory=directory,
        batch=latest.batch if latest else 0,
        noise=latest.noise if latest else None,
        idle_before=before,
        idle_now=now_idle,
        decided=tuple(AdjustmentView(d.what, d.step, dict(d.values), d.reason) for d in state.adjustments.values()),
        evaluation=_evaluation(run),
        user=run.user,
        problem=ErrorView(*astuple(run.problem)) if run.problem is not None else None,
        priority=run.spec.priority,
        **_money(run, runs, now),
        **_queued(run, runs, now),
        cwd=run.spec.cwd,
        settings=dict(run.spec.settings),
    )


def _money(run: RunState, runs: CoordinatorState, now: float) -> dict[str, Any]:
    if not run.spec.on and not any(role.on for role in run.spec.roles.values()):
        return {}
    account = provisioning.account_at(runs.supply, now)
    return {
        "cost": _shown(account.of_run(run.name)),
        "costs": {pool: _shown(cost) for pool, cost in account.runs.get(run.name, {}).items()},
        "rate_per_h": provisioning.hourly_rate(runs.supply, run.name),
        "budget": run.budget,
    }


def _queued(run: RunState, runs: CoordinatorState, now: float) -> dict[str, Any]:
    if run.over:
        return {}
    found = queue.waiting_of(run, runs, now)
    return {"queued": found.place, "waits_for": found.what} if found is not None else {}


def _shown(cost: MachineCost) -> CostView:
    return CostView(cost.machine_s, cost.spent, cost.saved, cost.unused, cost.lost)


def pool_views(runs: CoordinatorState, now: float) -> list[PoolView]:
    state, account = runs.supply, provisioning.account_at(runs.supply, now)
    return [_pool_view(pool, state, account) for pool in state.pools.values()]


def _pool_view(pool: PoolInfo, state: provisioning.ProvisioningState, account: Account) -> PoolView:
    standing = state.health.get(pool.name, provisioning.PoolHealth())
    statuses = [hire.status for hire in state.allocations.values() if hire.pool == pool.name]
    blocked = standing.unreachable_since is not None or standing.retry_at > 0
    return PoolView(
        pool=pool.name,
        engine=pool.engine,
        limit=pool.limit,
        slots=pool.slots,
        price_per_h=pool.price_per_h,
        here=statuses.count(provisioning.RUNNING),
        waiting=statuses.count(provisioning.REQUESTED) + statuses.count(provisioning.SUBMITTED),
        trouble=standing.why if blocked else "",
        until=standing.retry_at or None,
        cost=_shown(account.of_pool(pool.name)),
        labels=dict(pool.labels),
        leaving=statuses.count(provisioning.RELEASING),
    )


def _seen_from_here(path: str, run: str, directory: str) -> str:
    """Where a checkpoint is: what members send to the coordinator is in the run's own directory."""
    sent = f"coordinator://{run}/"
    return f"{directory}/{path.removeprefix(sent)}" if path.startswith(sent) else path


def _evaluation(run: RunState) -> EvaluationView | None:
    standing = run.evaluation.standing
    if standing.step is None:
        return None
    return EvaluationView(
        step=standing.step,
        metrics=dict(standing.metrics),
        at=standing.at,
        evaluations=standing.evaluations,
        best=standing.best,
        best_step=standing.best_step,
        best_value=standing.best_value,
        without=standing.without,
        patience=standing.patience,
        export=standing.export,
    )


def _now(run: RunState, runs: CoordinatorState) -> tuple[str, str, int]:
    """Status, reason and size; a compat run has processes instead of worlds."""
    world, wanted = run.membership.world, runs.fleet.runs.get(run.name)
    nobody = not run.over and run.spec.on and not runs.fleet.of_run(run.name) and not run.membership.members
    if nobody and (machines := feasibility.describe_wait(runs.supply, run.spec.on)):
        return run.state_name, machines, 0
    if run.over or not run.spec.compat or wanted is None or wanted.status == fl.STOPPING:
        return run.state_name, run.reason, world.size if world is not None else _trainers(run)
    running = [p for p in runs.fleet.of_run(run.name) if p.status in (fl.RUNNING, fl.DONE)]
    if wanted.restart_reason:
        return "waiting", f"all members restart: {wanted.restart_reason}", 0
    if running:
        return "training", f"{len(running)} members of an unmodified script, start {wanted.generation}", len(running)
    return "starting", f"waiting for at least {wanted.min_members} places", 0


def _trainers(run: RunState) -> int:
    """How many train in a run that has servers instead of worlds."""
    if run.membership.placement is None:
        return 0
    return sum(m.role == TRAINER and m.status == mb.TRAINING for m in run.membership.members.values())


def _members(run: RunState, runs: CoordinatorState, live: LiveRun, now: float) -> tuple[MemberView, ...]:
    processes = runs.fleet.processes.of_run(run.name)
    names = list(dict.fromkeys([*run.membership.members, *processes]))
    if run.over:
        names = [name for name in names if name in live.links]
    world = run.membership.world
    ranks = world.ranks() if world is not None else {}
    samples = sum(live.said[name].share for name in ranks if name in live.said)
    found = [_member(name, ranks.get(name), samples, run, processes.get(name), live, now) for name in names]
    return tuple(sorted(found, key=lambda view: (view.rank is None, view.rank or 0, view.member)))


def _member(
    name: str, rank: int | None, samples: int, run: RunState, process: fl.ProcessState | None, live: LiveRun, now: float
) -> MemberView:
    member = run.membership.members.get(name)
    said, beat, link = live.said.get(name), live.beats.get(name), live.links.get(name)
    spent = said.spent if said is not None and rank is not None else StepTimes()
    return MemberView(
        member=name,
        incarnation=member.incarnation if member else process.incarnation if process else "",
        status=_status(run, member, process),
        rank=rank,
        agent=process.agent if process else "",
        pid=(process.pid if process else 0) or (link.pid if link else 0),
        host=member.address.host if member else "",
        step=said.step if said else member.step if member else None,
        share=said.share if said else 0,
        phase=said.phase if said else "",
        phase_age_s=said.phase_age_s + max(0.0, now - beat.at) if said and beat else 0.0,
        beat_age_s=max(0.0, now - beat.at) if beat else 0.0,
        samples_per_s=_own_rate(said, rank, samples, run),
        connected=link is not None,
        data_s=spent.data_s,
        compute_s=spent.compute_s,
        wait_s=spent.wait_s,
        exchange_s=spent.exchange_s,
        role=member.role if member else fl.role_of(name),
        clock=said.clock if said else 0,
        ahead=said.ahead if said else 0,
        waits_for=said.waits_for if said else (),
    )


def _own_rate(mine: HeartbeatMsg | None, rank: int | None, samples: int, run: RunState) -> float:
    """A member's part of the samples that its world trains on a second; `samples` are those of one step."""
    if run.membership.placement is not None:
        return mine.samples_per_s if mine is not None else 0.0
    if mine is None or rank is None or not samples:
        return 0.0
    return mine.samples_per_s * mine.share / samples


def _status(run: RunState, member: mb.MemberState | None, process: fl.ProcessState | None) -> str:
    if member is None:
        status = process.status if process else ""
        if process is not None and status == fl.RUNNING and process.role == EVALUATOR:
            known = run.evaluation.members.get(process.member)
            return "evaluating" if known is not None and known.connected else "starting"
        return {fl.RUNNING: "starting", fl.ENDING: "leaving", fl.BACKOFF: "waiting"}.get(status, status or "starting")
    if member.leaving or (process is not None and process.status == fl.ENDING):
        return "leaving"
    if member.status == mb.REGROUPING:
        return "recovering"
    if member.role == SERVER and member.status == mb.TRAINING:
        return "serving"
    if member.status == mb.WAITING and (run.membership.world or run.membership.placement) is not None:
        return "spare"
    return member.status


def agent_views(runs: CoordinatorState, links: Mapping[str, AgentConnection], now: float) -> list[AgentView]:
    found = []
    living: dict[str, list[str]] = {}
    for p in runs.fleet.processes.values():
        if p.alive:
            living.setdefault(p.agent, []).append(p.member)
    for agent in sorted(runs.fleet.agents.values(), key=lambda a: a.order):
        known, link = runs.machines.get(agent.name), links.get(agent.name)
        machine = known.machine if known else None
        found.append(
            AgentView(
                agent=agent.name,
                machine=machine.name if machine else agent.name,
                cores=machine.cores if machine else 0,
                memory_bytes=machine.memory_bytes if machine else 0,
                devices=machine.devices if machine else (),
                slots=agent.slots,
                members=tuple(living.get(agent.name, ())),
                connected=link is not None,
                beat_age_s=max(0.0, now - link.heard_at) if link else 0.0,
                load=link.load if link else 0.0,
                notice=agent.notice,
                pool=agent.pool,
                via=link.base_url if link else "",
            )
        )
    return found
