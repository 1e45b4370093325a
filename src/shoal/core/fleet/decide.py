"""Which member processes should exist, and on which agents.

`decide(state, event, now)` returns the next state and what to tell which agent; `due(state, now)` says which waits are
over, as events. It knows processes only: whether their members are in a world is decided in `membership`.

A process's life::

    starting ──▶ running ──exit 0──▶ done
        ▲           │ └──asked──▶ ending ──▶ forgotten
        └─ backoff ◀┘ crash            budget spent: given up for a while, or the run fails
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from shoal import exit_codes
from shoal.core.fleet import events as fe
from shoal.core.fleet.draft import FleetDraft
from shoal.core.fleet.state import (
    ACTIVE,
    BACKOFF,
    DONE,
    ENDED,
    ENDING,
    FINISHING,
    GIVEN_UP,
    RUNNING,
    STARTING,
    STOPPING,
    AgentState,
    DesiredRun,
    FleetState,
    FleetTimeouts,
    ProcessState,
    role_of,
)
from shoal.core.membership.state import EVALUATOR, TRAINER

__all__ = [
    "ACTIVE",
    "BACKOFF",
    "DONE",
    "ENDED",
    "ENDING",
    "FINISHING",
    "GIVEN_UP",
    "RUNNING",
    "STARTING",
    "STOPPING",
    "FleetState",
    "ProcessState",
    "decide",
    "due",
    "role_of",
]


def decide(state: FleetState, event: fe.Event, now: float) -> tuple[FleetState, tuple[fe.Instruction, ...]]:
    """The next state, and what to tell which agent."""
    draft = FleetDraft(state, now)
    _HANDLERS[type(event)](draft, event)
    if not isinstance(event, _KNOWN_PLACES):
        draft.advance()
    return draft.freeze(), tuple(draft.asked)


def due(state: FleetState, now: float) -> tuple[fe.FleetTimerExpired, ...]:
    """The waits that are over."""
    limits = state.timeouts
    fired = [
        fe.FleetTimerExpired("agent", agent=a.name)
        for a in state.agents.values()
        if a.disconnected_since is not None and now - a.disconnected_since > limits.agent_s
    ]
    fired += [
        fe.FleetTimerExpired("notice", agent=a.name) for a in state.agents.values() if a.notice and now > a.notice_until
    ]
    for run in state.runs.values():
        if run.status == STOPPING and run.end_by is not None and now >= run.end_by:
            fired.append(fe.FleetTimerExpired("grace", run.run))
        if run.status == ACTIVE and run.no_agents_since is not None and now - run.no_agents_since > limits.no_agents_s:
            fired.append(fe.FleetTimerExpired("no agents", run.run))
        if run.status == ACTIVE and run.compat and run.restart_reason and 0.0 < run.restart_at <= now:
            fired.append(fe.FleetTimerExpired("group restart", run.run))
    for p in state.processes.values():
        if p.status == RUNNING and p.unresponsive_since is None and p.missing_since is None:
            continue
        agent = state.agents.get(p.agent)
        what = _process_due(p, now, limits, away=agent is None or agent.disconnected_since is not None)
        if what:
            fired.append(fe.FleetTimerExpired(what, p.run, p.member))
    return tuple(fired)


def _process_due(p: ProcessState, now: float, limits: FleetTimeouts, *, away: bool) -> str:
    if p.status in (BACKOFF, GIVEN_UP) and now >= p.until:
        return "backoff"
    # A member that is silent together with its agent is most likely only cut off, and so may be we ourselves.
    if (
        p.status == RUNNING
        and not away
        and p.unresponsive_since is not None
        and now - p.unresponsive_since > limits.unresponsive_s
    ):
        return "unresponsive"
    if p.alive and p.missing_since is not None and now - p.missing_since > limits.missing_s:
        return "missing"
    return ""


def _on_opened(draft: FleetDraft, event: fe.CoordinatorStarted) -> None:
    draft.base = replace(draft.base, salt=event.salt)
    for name, agent in draft.agents.items():
        draft.agents[name] = replace(agent, disconnected_since=draft.now)
    for p in list(draft.processes.values()):
        draft.update(p, unresponsive_since=None)


def _on_agent_joined(draft: FleetDraft, event: fe.AgentConnected) -> None:
    known = draft.agents.get(event.agent)
    order = known.order if known else 1 + max((a.order for a in draft.agents.values()), default=0)
    notice = (known.notice, known.notice_until) if known else ("", 0.0)
    draft.agents[event.agent] = AgentState(
        event.agent, event.slots, event.host, order, None, *notice, event.pool, event.size
    )
    living = set(event.members)
    for p in [p for p in draft.processes.values() if p.agent == event.agent and p.alive]:
        if (p.run, p.member, p.incarnation) not in living and event.successor:
            detail = "its agent died, and it with it"
            _on_exited(draft, fe.ProcessExited(p.run, p.member, p.incarnation, "infrastructure", detail))
        elif (p.run, p.member, p.incarnation) not in living:
            draft.update(p, missing_since=draft.now)
        elif p.status == ENDING:
            draft.asked.append(fe.StopProcess(p.agent, p.run, p.member, p.incarnation, 5.0, "it was asked to end"))
        else:
            since = draft.now if p.unresponsive_since is not None else None
            draft.update(p, status=RUNNING, missing_since=None, unresponsive_since=since)
    for run, member, incarnation in event.members:
        if not _is_known(draft, run, member, incarnation):
            _adopt_or_end(draft, event.agent, run, member, incarnation)


def _is_known(draft: FleetDraft, run: str, member: str, incarnation: str) -> bool:
    p = draft.processes.get((run, member))
    return p is not None and p.incarnation == incarnation and p.alive


def _adopt_or_end(draft: FleetDraft, agent: str, run: str, member: str, incarnation: str) -> None:
    """A process that nobody counted on any more: it may go on if there is room for it."""
    wanted = draft.runs.get(run)
    p = draft.processes.get((run, member))
    free = p is None or not p.alive
    if wanted is not None and wanted.status == ACTIVE and not wanted.compat and free:
        draft.processes.pop((run, member), None)
        if draft.wants(draft.agents[agent], wanted, role_of(member)):
            order, _ = draft.next_incarnation()
            draft.processes[run, member] = ProcessState(run, member, incarnation, agent, RUNNING, order)
            draft.set_run(run, seen=True, no_agents_since=None)
            return
    draft.asked.append(fe.StopProcess(agent, run, member, incarnation, 5.0, "nobody counts on it any more"))


def _on_agent_away(draft: FleetDraft, event: fe.AgentDisconnected) -> None:
    agent = draft.agents.get(event.agent)
    if agent is not None and agent.disconnected_since is None:
        draft.agents[event.agent] = replace(agent, disconnected_since=draft.now)


def _on_agent_notice(draft: FleetDraft, event: fe.AgentNotice) -> None:
    agent = draft.agents.get(event.agent)
    if agent is not None:
        until = draft.now + event.within_s + 60.0
        draft.agents[event.agent] = replace(agent, notice=event.cause or "a notice", notice_until=until)
        for p in [p for p in draft.processes.values() if p.agent == event.agent and p.status in (BACKOFF, GIVEN_UP)]:
            del draft.processes[p.run, p.member]


def _on_run_wanted(draft: FleetDraft, event: fe.RunRequested) -> None:
    wanted = DesiredRun(event.run, event.min_members, event.max_members, event.compat, event.restarts, event.servers)
    wanted = replace(wanted, evaluators=event.evaluators, requirements=event.requirements, priority=event.priority)
    draft.runs[event.run] = replace(wanted, ports=event.ports)


def _on_started(draft: FleetDraft, event: fe.ProcessStarted) -> None:
    p = draft.processes.get((event.run, event.member))
    if p is not None and p.incarnation == event.incarnation:
        draft.update(p, pid=event.pid, status=RUNNING if p.status == STARTING else p.status)


def _on_exited(draft: FleetDraft, event: fe.ProcessExited) -> None:
    p = draft.processes.get((event.run, event.member))
    if p is None or p.incarnation != event.incarnation or not p.alive:
        return
    run = draft.runs[event.run]
    trained = run.status == FINISHING and p.role == TRAINER
    # Whoever was asked to end may have come to the end of its script first.
    came_to_the_end = event.cause == "done" or (trained and event.exit_code == exit_codes.OK)
    if event.cause == "idle" or (p.status == ENDING and not p.restart_reason):
        del draft.processes[p.run, p.member]
    elif came_to_the_end and not p.restart_reason and (run.finished or run.status in (ACTIVE, FINISHING)):
        draft.update(p, status=DONE)
        if run.compat and p.is_chief:
            draft.dismiss(run)
    elif run.compat:
        draft.lose_of_group(run, p, event.cause, event.detail)
    elif event.cause == "asked" and not p.restart_reason and not trained:
        # Somebody else ended it, most likely the agent on its way out: a breath shows which.
        draft.update(p, status=BACKOFF, until=draft.now + 1.0)
    else:
        draft.lose(p, "infrastructure" if p.restart_reason else event.cause, p.restart_reason or event.detail)


def _on_silent(draft: FleetDraft, event: fe.MemberUnresponsive) -> None:
    p = draft.processes.get((event.run, event.member))
    if p is None or not p.alive:
        return
    if event.hung and p.status != ENDING:
        draft.end(p, event.hung, grace_s=1.0, restart_reason=event.hung)
    elif p.unresponsive_since is None:
        draft.update(p, unresponsive_since=draft.now)


def _on_back(draft: FleetDraft, event: fe.MemberResponsive) -> None:
    p = draft.processes.get((event.run, event.member))
    if p is not None:
        draft.update(p, unresponsive_since=None)


def _on_guests(draft: FleetDraft, event: fe.UnmanagedMembersChanged) -> None:
    draft.set_run(event.run, unmanaged=event.unmanaged)


def _on_scaled(draft: FleetDraft, event: fe.RunScaled) -> None:
    run = draft.set_run(event.run, min_members=event.min_members, max_members=event.max_members)
    if run.compat or run.status != ACTIVE:
        return
    staying = [p for p in draft.of_run(event.run) if p.status != ENDING and draft.is_usable(p.agent)]
    staying = [p for p in staying if p.role == TRAINER]
    elastic = [p for p in staying if draft.agents[p.agent].slots is None]
    extra = max(0, len(staying) - event.max_members)
    elastic.sort(key=lambda p: (p.status in (STARTING, RUNNING), p.member in event.keep, -p.order))
    for p in elastic[:extra]:
        draft.end(p, f"scaled to at most {event.max_members} members", draft.base.timeouts.grace_s)


def _on_stopping(draft: FleetDraft, event: fe.RunStopping) -> None:
    run = draft.runs[event.run]
    end_by = draft.now + event.grace_s
    if run.status == STOPPING and run.end_by is not None:
        # Asked again by somebody in a greater hurry.
        draft.set_run(event.run, end_by=min(run.end_by, end_by))
    if run.status not in (ACTIVE, FINISHING):
        return
    draft.set_run(event.run, status=STOPPING, exit_code=event.exit_code, reason=event.reason, end_by=end_by)
    for p in draft.of_run(event.run):
        if run.compat or not p.alive or p.member in event.idle:
            draft.end(p, event.reason, event.grace_s)


def _on_finished(draft: FleetDraft, event: fe.RunFinished) -> None:
    run = draft.set_run(event.run, finished=True)
    if run.status == ACTIVE:
        draft.set_run(event.run, status=FINISHING)
        for p in draft.of_run(event.run):
            if p.status in (BACKOFF, GIVEN_UP) and p.role != EVALUATOR:
                del draft.processes[p.run, p.member]


def _on_hopeless(draft: FleetDraft, event: fe.RunInfeasible) -> None:
    if draft.runs[event.run].status == ACTIVE:
        draft.fail(event.run, event.reason, exit_codes.UNAVAILABLE)


def _on_wait_over(draft: FleetDraft, event: fe.FleetTimerExpired) -> None:
    if event.what == "agent":
        _forget_agent(draft, event.agent)
    elif event.what == "notice" and event.agent in draft.agents:
        draft.agents[event.agent] = replace(draft.agents[event.agent], notice="")
    elif event.what == "grace":
        for p in draft.of_run(event.run):
            draft.end(p, "it did not stop in time", grace_s=5.0)
        draft.set_run(event.run, end_by=None)
    elif event.what == "no agents" and draft.runs[event.run].preempted:
        draft.over(event.run)
        draft.asked.append(
            fe.MarkRunEnded(
                event.run, "every machine went away after a notice, and no other came", exit_codes.RESUMABLE
            )
        )
    elif event.what == "no agents":
        draft.fail(event.run, "all members are lost and no agent is left to start others", exit_codes.MEMBERS_LOST)
    elif event.what == "group restart":
        draft.set_run(event.run, restart_at=0.0)
    else:
        _process_wait_over(draft, event)


def _process_wait_over(draft: FleetDraft, event: fe.FleetTimerExpired) -> None:
    p = draft.processes.get((event.run, event.member))
    if p is None:
        return
    if event.what == "backoff":
        if p.agent in draft.agents and draft.agents[p.agent].usable:
            draft.start_again(p, "its back-off is over")
        else:
            draft.update(p, until=draft.now + 1.0)
    elif event.what == "unresponsive":
        why = f"its member was silent for {draft.base.timeouts.unresponsive_s:g} s"
        draft.end(p, why, grace_s=1.0, restart_reason=why)
    elif event.what == "missing":
        detail = "it was gone when its agent came back"
        _on_exited(draft, fe.ProcessExited(p.run, p.member, p.incarnation, "infrastructure", detail))


def _forget_agent(draft: FleetDraft, name: str) -> None:
    """The agent did not come back: its processes are not counted on any more."""
    if draft.agents.pop(name, None) is None:
        return
    for p in [p for p in draft.processes.values() if p.agent == name]:
        run = draft.runs[p.run]
        if p.status == DONE:
            continue
        if run.compat and p.alive and p.status != ENDING:
            draft.lose_of_group(run, p, "preempted", f"agent {name} is lost")
        else:
            if run.status == FINISHING and p.alive and p.role == TRAINER:
                draft.set_run(p.run, died_after_training=f"{p.member}: agent {name} is lost")
            draft.processes.pop((p.run, p.member), None)
    for run in draft.runs.values():
        if run.status != ENDED:
            draft.asked.append(
                fe.FleetNote(
                    run.run, f"agent {name} is lost: it did not come back within {draft.base.timeouts.agent_s:g} s"
                )
            )


# What these say of a process that is counted on already changes nothing about who should exist.
_KNOWN_PLACES = (fe.ProcessStarted, fe.MemberUnresponsive, fe.MemberResponsive)
_HANDLERS: dict[type, Callable[[FleetDraft, Any], None]] = {
    fe.CoordinatorStarted: _on_opened,
    fe.AgentConnected: _on_agent_joined,
    fe.AgentDisconnected: _on_agent_away,
    fe.AgentNotice: _on_agent_notice,
    fe.RunRequested: _on_run_wanted,
    fe.ProcessStarted: _on_started,
    fe.ProcessExited: _on_exited,
    fe.MemberUnresponsive: _on_silent,
    fe.MemberResponsive: _on_back,
    fe.UnmanagedMembersChanged: _on_guests,
    fe.RunScaled: _on_scaled,
    fe.RunStopping: _on_stopping,
    fe.RunFinished: _on_finished,
    fe.RunInfeasible: _on_hopeless,
    fe.FleetTimerExpired: _on_wait_over,
}
