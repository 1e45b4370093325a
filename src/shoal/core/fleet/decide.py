"""Fleet: which member processes should exist, and on which agents.

Theory of operation
===================

An agent runs on each machine and offers *slots*. A run wants between `min_members` and `max_members` trainers, and
perhaps servers and evaluators: its `DesiredRun`. The fleet compares that with the processes that exist, and starts and
stops processes until both agree, as a Kubernetes controller does. `decide(state, event, now)` is pure: events say what
agents, processes and users did, instructions say what to tell the agents. After every event that can change what should
exist, `advance` looks at all runs again. It knows processes only; `core.membership` decides which members are in a
world.

A process's status::

    STARTING ──▶ RUNNING ──exit 0──▶ DONE
        ▲           │ └──told to stop──▶ ENDING ──▶ forgotten, or restarted if it was stopped for that
        │           │ crashed
        ├─ BACKOFF ◀┤
        └─ GIVEN_UP ◀── restart limit reached: not restarted for a while, or the run fails

A run's status::

    ACTIVE ──last step committed──▶ FINISHING ──all processes ended──▶ ENDED
       └──told to stop──▶ STOPPING ──all processes ended────────────────┘          (failed: ENDED, from any status)

**Slots** (`slots`). Runs are served by priority, then age. Free slots are filled with spare members, which make room as
soon as another run misses some.

**Restarts** (`restarts`, `restart_policy`). An exit has a cause. *user*: the script raised; few restarts, then the run
fails; before the first committed step it fails as soon as a second member has the same error. *infrastructure*: killed,
crashed, agent lost; more restarts, with a growing pause, then the member is given up for a while, and the run fails
only if fewer than its minimum are left. *preempted*: the machine was taken away; unlimited. *refused*: the coordinator
rejected the member, or its script ended well without having trained with the others; not restarted. *asked* and *done*
are no failures. A hung or unresponsive process is stopped and restarted: it may hold a slot for ever otherwise.

**Agents.** A closed connection stops nothing: an agent that is cut off keeps its processes running, and when it
reconnects it says which are alive. Only after `agent_s` are they forgotten and replaced elsewhere. A process that turns
up again after that is adopted if its run still has use for it, and stopped otherwise. Nothing is started on an agent
that has notice.

**The end of a run** (`run_end`). After the last step, members run the rest of their scripts; the run is done when the
last process has ended, if at least one trainer reached the end of its script. If all of them died on the way, what the
script does after its training may be missing, and the run ends as resumable. Evaluators are waited for. A stop has a
deadline, after which the processes are killed. A run that has lost all members and all agents fails after
`no_agents_s`, or ends as resumable if its machines were preempted, unless machines can be requested for it.

**Unmodified scripts** (`group_restart`) have fixed ranks, so any change restarts all their processes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from shoal import exit_codes
from shoal.core.fleet import events as fe
from shoal.core.fleet import group_restart, restarts, run_end, slots
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
from shoal.core.nouns import counted

# A notice that did not come true is forgotten so long after its time.
NOTICE_KEPT_S = 60.0
# A script that never joins trains a copy per member; that fails the run at its end, and is said long before.
JOIN_NOTE_S = 120.0
NOT_JOINED = (
    "without joining the run: unless it still prepares its data, its script does not call shoal.join(), "
    "and every member trains a copy of its own"
)

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
    "advance",
    "decide",
    "due",
    "role_of",
]


def decide(state: FleetState, event: fe.Event, now: float) -> tuple[FleetState, tuple[fe.Instruction, ...]]:
    """Return the next state and the instructions that follow from an event."""
    draft = FleetDraft(state, now)
    _HANDLERS[type(event)](draft, event)
    if not isinstance(event, _WITHOUT_CONSEQUENCES) or _is_group_started(draft, event):
        advance(draft)
    return draft.result()


def advance(draft: FleetDraft) -> None:
    """End runs that are over, and start and stop processes until those exist that should."""
    for name in list(draft.runs):
        if draft.runs[name].status == FINISHING:
            slots.fill_evaluators(draft, draft.runs[name])
        run_end.end_if_over(draft, name)
    # The sort is stable: among equals, the older run comes first.
    active = sorted((run for run in draft.runs.values() if run.status == ACTIVE), key=lambda run: -run.priority)
    for run in active:
        if run.compat:
            group_restart.align(draft, run)
        else:
            slots.fill(draft, run)
    missing = [run for run in active if not run.compat and slots.missing_slots(draft, run)]
    if missing:
        slots.make_room(draft, missing, active)
    else:
        for run in active:
            slots.fill_spares(draft, run)


def due(state: FleetState, now: float) -> tuple[fe.FleetTimerExpired, ...]:
    """Return an event for every timer that has expired."""
    timeouts = state.timeouts
    fired = [
        fe.FleetTimerExpired("agent", agent=a.name)
        for a in state.agents.values()
        if a.disconnected_since is not None and now - a.disconnected_since > timeouts.agent_s
    ]
    fired += [
        fe.FleetTimerExpired("notice", agent=a.name) for a in state.agents.values() if a.notice and now > a.notice_until
    ]
    for run in state.runs.values():
        if run.status == STOPPING and run.end_by is not None and now >= run.end_by:
            fired.append(fe.FleetTimerExpired("grace", run.run))
        if (
            run.status == ACTIVE
            and run.no_agents_since is not None
            and now - run.no_agents_since > timeouts.no_agents_s
        ):
            fired.append(fe.FleetTimerExpired("no agents", run.run))
        if run.status == ACTIVE and run.compat and run.restart_reason and 0.0 < run.restart_at <= now:
            fired.append(fe.FleetTimerExpired("group restart", run.run))
    for p in state.processes.values():
        if p.status == RUNNING and p.unresponsive_since is None and p.missing_since is None and p.join_by is None:
            continue
        agent = state.agents.get(p.agent)
        what = _process_timer(p, now, timeouts, away=agent is None or agent.disconnected_since is not None)
        if what:
            fired.append(fe.FleetTimerExpired(what, p.run, p.member))
    return tuple(fired)


def _process_timer(p: ProcessState, now: float, timeouts: FleetTimeouts, *, away: bool) -> str:
    """Return the name of a process's timer that has expired, "" for none; `away` if its agent is disconnected."""
    if p.status in (BACKOFF, GIVEN_UP) and now >= p.until:
        return "backoff"
    # A member that is silent together with its agent is most likely only cut off, or the coordinator is.
    silent_s = now - p.unresponsive_since if p.unresponsive_since is not None else 0.0
    if p.status == RUNNING and not away and silent_s > timeouts.unresponsive_s:
        return "unresponsive"
    if p.alive and p.missing_since is not None and now - p.missing_since > timeouts.missing_s:
        return "missing"
    if p.status == RUNNING and p.join_by is not None and now >= p.join_by:
        return "not joined"
    return ""


# --- agents


def _on_coordinator_started(draft: FleetDraft, event: fe.CoordinatorStarted) -> None:
    draft.set(salt=event.salt)
    for name, agent in draft.agents.items():
        draft.agents[name] = replace(agent, disconnected_since=draft.now)
    for p in list(draft.processes.values()):
        draft.update(p, unresponsive_since=None)


def _on_agent_connected(draft: FleetDraft, event: fe.AgentConnected) -> None:
    before = draft.agents.get(event.agent)
    order = before.order if before else 1 + max((a.order for a in draft.agents.values()), default=0)
    notice = (before.notice, before.notice_until) if before else ("", 0.0)
    draft.agents[event.agent] = AgentState(
        event.agent, event.slots, event.host, order, None, *notice, event.pool, event.size
    )
    living = set(event.members)
    for p in [p for p in draft.processes.values() if p.agent == event.agent and p.alive]:
        if (p.run, p.member, p.incarnation) not in living and event.successor:
            _lose(draft, p, "its agent died and its processes with it")
        elif (p.run, p.member, p.incarnation) not in living:
            draft.update(p, missing_since=draft.now)
        elif p.status == ENDING:
            draft.instruct(fe.StopProcess(p.agent, p.run, p.member, p.incarnation, 5.0, "it was told to stop before"))
        else:
            since = draft.now if p.unresponsive_since is not None else None
            draft.update(p, status=RUNNING, missing_since=None, unresponsive_since=since)
    for run, member, incarnation in event.members:
        counted = draft.processes.get((run, member))
        if counted is None or counted.incarnation != incarnation or not counted.alive:
            _adopt_or_stop(draft, event.agent, run, member, incarnation)


def _adopt_or_stop(draft: FleetDraft, agent: str, run: str, member: str, incarnation: str) -> None:
    """Keep an unexpected process if its run has use for it, or stop it."""
    desired = draft.runs.get(run)
    p = draft.processes.get((run, member))
    name_is_free = p is None or not p.alive
    if desired is not None and desired.status == ACTIVE and not desired.compat and name_is_free:
        draft.processes.pop((run, member), None)
        if slots.has_use_for(draft, draft.agents[agent], desired, role_of(member)):
            order, _ = draft.next_incarnation()
            draft.processes[run, member] = ProcessState(run, member, incarnation, agent, RUNNING, order, joined=True)
            draft.set_run(run, seen=True, no_agents_since=None)
            return
    draft.instruct(fe.StopProcess(agent, run, member, incarnation, 5.0, "it is no longer assigned to the run"))


def _on_agent_disconnected(draft: FleetDraft, event: fe.AgentDisconnected) -> None:
    agent = draft.agents.get(event.agent)
    if agent is not None and agent.disconnected_since is None:
        draft.agents[event.agent] = replace(agent, disconnected_since=draft.now)


def _on_agent_notice(draft: FleetDraft, event: fe.AgentNotice) -> None:
    agent = draft.agents.get(event.agent)
    if agent is not None:
        until = draft.now + event.within_s + NOTICE_KEPT_S
        draft.agents[event.agent] = replace(agent, notice=event.cause or "a notice", notice_until=until)
        for p in [p for p in draft.processes.values() if p.agent == event.agent and p.status in (BACKOFF, GIVEN_UP)]:
            draft.remove(p)


def _forget_agent(draft: FleetDraft, name: str) -> None:
    """Forget an agent that did not reconnect, and its processes."""
    if draft.agents.pop(name, None) is None:
        return
    for p in [p for p in draft.processes.values() if p.agent == name]:
        run = draft.runs[p.run]
        if p.status == DONE:
            continue
        if run.compat and p.alive and p.status != ENDING:
            group_restart.on_exit(draft, run, p, "preempted", f"agent {name} is lost")
        else:
            if run.status == FINISHING and p.alive and p.role == TRAINER:
                draft.set_run(p.run, died_after_training=f"{p.member}: agent {name} is lost")
            draft.processes.pop((p.run, p.member), None)
    text = f"agent {name} is lost: it did not reconnect within {draft.state.timeouts.agent_s:g} s"
    for run in draft.runs.values():
        if run.status != ENDED:
            draft.instruct(fe.FleetNote(run.run, text, kind="AgentLost"))


# --- processes and members


def _on_process_started(draft: FleetDraft, event: fe.ProcessStarted) -> None:
    p = draft.processes.get((event.run, event.member))
    if p is not None and p.incarnation == event.incarnation:
        run = draft.runs[p.run]
        copies = run.max_members > 1 and not run.compat and p.role == TRAINER
        join_by = draft.now + JOIN_NOTE_S if copies and not p.joined else None
        draft.update(p, pid=event.pid, status=RUNNING if p.status == STARTING else p.status, join_by=join_by)


def _is_group_started(draft: FleetDraft, event: fe.Event) -> bool:
    """Return whether a started process makes way for the next group of its agent."""
    p = draft.processes.get((event.run, event.member)) if isinstance(event, fe.ProcessStarted) else None
    return p is not None and slots.awaits_next_group(draft, p.agent)


def _on_process_exited(draft: FleetDraft, event: fe.ProcessExited) -> None:
    p = draft.processes.get((event.run, event.member))
    if p is None or p.incarnation != event.incarnation or not p.alive:
        return
    run = draft.runs[event.run]
    trained = run.status == FINISHING and p.role == TRAINER
    # A process that was told to stop may have reached the end of its script first.
    reached_end = event.cause == "done" or (trained and event.exit_code == exit_codes.OK)
    if event.cause == "idle" or (p.status == ENDING and not p.restart_reason):
        draft.remove(p)
    elif event.trained_nothing and run.max_members > 1 and run.status == ACTIVE and not p.restart_reason:
        draft.instruct(fe.FleetNote(p.run, f"{p.member} has not trained: {event.trained_nothing}", p.member))
        restarts.on_unplanned_exit(draft, p, replace(event, cause="refused", detail=event.trained_nothing))
    elif reached_end and not p.restart_reason and (run.finished or run.status in (ACTIVE, FINISHING)):
        draft.update(p, status=DONE)
        if run.compat and p.is_chief:
            group_restart.on_chief_done(draft, run)
    elif run.compat:
        group_restart.on_exit(draft, run, p, event.cause, event.detail)
    elif event.cause == "asked" and not p.restart_reason and not trained:
        # Something else stopped it, most likely its agent, which is about to disconnect: wait until that is known.
        draft.update(p, status=BACKOFF, until=draft.now + 1.0)
    else:
        event = replace(event, cause="infrastructure" if p.restart_reason else event.cause)
        restarts.on_unplanned_exit(draft, p, replace(event, detail=p.restart_reason or event.detail))


def _lose(draft: FleetDraft, p: ProcessState, detail: str) -> None:
    """Handle a process whose exit was not reported as if its machine had killed it."""
    _on_process_exited(draft, fe.ProcessExited(p.run, p.member, p.incarnation, "infrastructure", detail))


def _on_unresponsive(draft: FleetDraft, event: fe.MemberUnresponsive) -> None:
    p = draft.processes.get((event.run, event.member))
    if p is None or not p.alive:
        return
    if event.hung and p.status != ENDING:
        draft.stop(p, event.hung, grace_s=1.0, restart_reason=event.hung)
    elif p.unresponsive_since is None:
        draft.update(p, unresponsive_since=draft.now)


def _on_responsive(draft: FleetDraft, event: fe.MemberResponsive) -> None:
    p = draft.processes.get((event.run, event.member))
    if p is not None:
        draft.update(p, unresponsive_since=None, joined=True, join_by=None)


# --- runs


def _on_run_requested(draft: FleetDraft, event: fe.RunRequested) -> None:
    draft.runs[event.run] = DesiredRun(
        event.run,
        event.min_members,
        event.max_members,
        event.compat,
        event.restarts,
        event.servers,
        event.evaluators,
        event.ports,
        requirements=event.requirements,
        priority=event.priority,
    )


def _on_unmanaged_changed(draft: FleetDraft, event: fe.UnmanagedMembersChanged) -> None:
    draft.set_run(event.run, unmanaged=event.unmanaged)


def _on_run_scaled(draft: FleetDraft, event: fe.RunScaled) -> None:
    run = draft.set_run(event.run, min_members=event.min_members, max_members=event.max_members)
    if run.compat or run.status != ACTIVE:
        return
    staying = [p for p in draft.of_run(event.run) if p.status != ENDING and draft.is_usable(p.agent)]
    staying = [p for p in staying if p.role == TRAINER]
    # Agents with a fixed number of slots keep them filled with spares, which do not replace a member that trains.
    elastic = [p for p in staying if draft.agents[p.agent].slots is None and p.member not in event.keep]
    extra = max(0, len(staying) - event.max_members)
    elastic.sort(key=lambda p: (p.status in (STARTING, RUNNING), -p.order))
    for p in elastic[:extra]:
        draft.stop(p, f"scaled to at most {counted(event.max_members, 'member')}", draft.state.timeouts.grace_s)


def _on_run_stopping(draft: FleetDraft, event: fe.RunStopping) -> None:
    run = draft.runs[event.run]
    end_by = draft.now + event.grace_s
    if run.status == STOPPING and run.end_by is not None:
        # A second request may only shorten the time.
        draft.set_run(event.run, end_by=min(run.end_by, end_by))
    if run.status not in (ACTIVE, FINISHING):
        return
    draft.set_run(event.run, status=STOPPING, exit_code=event.exit_code, reason=event.reason, end_by=end_by)
    for p in draft.of_run(event.run):
        if run.compat or not p.alive or p.member in event.idle:
            draft.stop(p, event.reason, event.grace_s)


def _on_run_finished(draft: FleetDraft, event: fe.RunFinished) -> None:
    run = draft.set_run(event.run, finished=True)
    if run.status == ACTIVE:
        draft.set_run(event.run, status=FINISHING)
        for p in draft.of_run(event.run):
            if p.status in (BACKOFF, GIVEN_UP) and p.role != EVALUATOR:
                draft.remove(p)


def _on_run_infeasible(draft: FleetDraft, event: fe.RunInfeasible) -> None:
    if draft.runs[event.run].status == ACTIVE:
        run_end.fail(draft, event.run, event.reason, exit_codes.UNAVAILABLE)


# --- timers


def _on_timer(draft: FleetDraft, event: fe.FleetTimerExpired) -> None:
    if event.what == "agent":
        _forget_agent(draft, event.agent)
    elif event.what == "notice" and event.agent in draft.agents:
        draft.agents[event.agent] = replace(draft.agents[event.agent], notice="")
    elif event.what == "grace":
        for p in draft.of_run(event.run):
            draft.stop(p, "it did not stop in time", grace_s=5.0)
        draft.set_run(event.run, end_by=None)
    elif event.what == "no agents" and draft.runs[event.run].preempted:
        reason = "all machines were taken away, and no replacement came"
        run_end.end(draft, event.run, reason, exit_codes.RESUMABLE)
    elif event.what == "no agents":
        reason = "all members are lost, and no agent is left to start others"
        run_end.fail(draft, event.run, reason, exit_codes.MEMBERS_LOST)
    elif event.what == "group restart":
        draft.set_run(event.run, restart_at=0.0)
    elif (process := draft.processes.get((event.run, event.member))) is not None:
        _on_process_timer(draft, process, event.what)


def _on_process_timer(draft: FleetDraft, p: ProcessState, what: str) -> None:
    if what == "backoff":
        if p.agent in draft.agents and draft.agents[p.agent].usable:
            draft.restart(p, "its back-off ended")
        else:
            draft.update(p, until=draft.now + 1.0)
    elif what == "unresponsive":
        why = f"its member was silent for {draft.state.timeouts.unresponsive_s:g} s"
        draft.stop(p, why, grace_s=1.0, restart_reason=why)
    elif what == "not joined":
        draft.update(p, join_by=None)
        draft.instruct(fe.FleetNote(p.run, f"{p.member} has run for {JOIN_NOTE_S:g} s {NOT_JOINED}", p.member))
    elif what == "missing":
        _lose(draft, p, "it no longer ran when its agent reconnected")


# These events change nothing about which processes should exist.
_WITHOUT_CONSEQUENCES = (fe.ProcessStarted, fe.MemberUnresponsive, fe.MemberResponsive)
_HANDLERS: dict[type, Callable[[FleetDraft, Any], None]] = {
    fe.CoordinatorStarted: _on_coordinator_started,
    fe.AgentConnected: _on_agent_connected,
    fe.AgentDisconnected: _on_agent_disconnected,
    fe.AgentNotice: _on_agent_notice,
    fe.RunRequested: _on_run_requested,
    fe.ProcessStarted: _on_process_started,
    fe.ProcessExited: _on_process_exited,
    fe.MemberUnresponsive: _on_unresponsive,
    fe.MemberResponsive: _on_responsive,
    fe.UnmanagedMembersChanged: _on_unmanaged_changed,
    fe.RunScaled: _on_run_scaled,
    fe.RunStopping: _on_run_stopping,
    fe.RunFinished: _on_run_finished,
    fe.RunInfeasible: _on_run_infeasible,
    fe.FleetTimerExpired: _on_timer,
}
