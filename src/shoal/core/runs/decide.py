"""Decisions of a coordinator: one event, the state machines it reaches, and the instructions that result.

The package docstring explains the whole. In this module `_Cascade` works one journaled event off: the tables at the end
name the handler of each event, a handler gives instructions with `_instruct` and hands follow-ups on with `_then`.

The order matters in one place. When a process exits, the membership decides first, because the other members wait for
it, while a restart can wait; only then is the fleet told.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Union

from shoal import exit_codes
from shoal.core.fleet import decide as fleet
from shoal.core.fleet import events as fe
from shoal.core.fleet import launcher_env
from shoal.core.membership import decide as membership
from shoal.core.membership import events as ev
from shoal.core.membership.state import EVALUATOR, MembershipState
from shoal.core.parameter_server import decide as parameter_server
from shoal.core.provisioning import decide as provisioning
from shoal.core.provisioning import events as pe
from shoal.core.runs import evaluation, exits
from shoal.core.runs import events as run_events
from shoal.core.runs.demand import machine_demands
from shoal.core.runs.settings import (
    machine_requirements,
    membership_settings,
    no_machines,
    restart_limits,
    server_count,
)
from shoal.core.runs.spec import Problem
from shoal.core.runs.state import DONE, FAILED, RESUMABLE, CoordinatorState, RunState

Instruction = Union[
    ev.Instruction,
    fe.Instruction,
    pe.Instruction,
    evaluation.Instruction,
    evaluation.AnnounceCheckpoint,
    evaluation.AnnounceTrainingFinished,
]
Instructions = list[tuple[str, Instruction]]

STOP_GRACE_S = 30.0
EARLY_STOP_GRACE_S = 600.0
# Exceptions this soon after the first are taken for its consequences.
SAME_FAILURE_S = 10.0
_WORLD_CHANGES = (ev.FormWorld, ev.ProposeWorld, ev.DissolveWorld, ev.PublishPlacement)
# Errors of members that only lost a peer: another member has the cause.
_CONSEQUENCES = ("S204", "S207")


def apply(state: CoordinatorState, run: str, event: Any, now: float) -> Instructions:
    """Change the state by one event and return the instructions to carry out, in order, each with its run."""
    return _Cascade(state, now).handle(run, event)


class _Cascade:
    """One event and everything that follows from it."""

    def __init__(self, state: CoordinatorState, now: float) -> None:
        self._state, self._now = state, now
        self._instructions: Instructions = []
        self._queue: deque[Callable[[], None]] = deque()
        self._follow_ups: list[Callable[[], None]] = []

    def handle(self, name: str, event: Any) -> Instructions:
        """Work off the event and its follow-ups; then tell provisioning if the demand for machines has changed."""
        self._work_off(partial(self._dispatch, name, event))
        demands = machine_demands(self._state)
        if demands != self._state.provisioning.demands:
            self._work_off(partial(self._provisioning, pe.DemandChanged(demands)))
        self._state.at = self._now
        return self._instructions

    def _work_off(self, first: Callable[[], None]) -> None:
        self._queue.append(first)
        while self._queue:
            self._queue.popleft()()
            # To the front: what follows from this event comes before what was to happen after it.
            self._queue.extendleft(reversed(self._follow_ups))
            self._follow_ups.clear()

    def _then(self, handler: Callable[..., None], *arguments: Any) -> None:
        self._follow_ups.append(partial(handler, *arguments))

    def _instruct(self, run: str, instruction: Instruction) -> None:
        self._instructions.append((run, instruction))

    def _dispatch(self, name: str, event: Any) -> None:
        kind, run = type(event), self._state.runs.get(name)
        if kind is run_events.RunCreated:
            self._create(name, event)
        elif kind in _COORDINATOR_EVENTS:
            _COORDINATOR_EVENTS[kind](self, event)
        elif run is not None and (not run.has_ended or kind in _AFTER_THE_END):
            _RUN_EVENTS.get(kind, _Cascade._member_event)(self, run, event)

    # --- the run as a whole

    def _create(self, name: str, event: run_events.RunCreated) -> None:
        low, high = event.spec.members
        settings = membership_settings(event.settings, low, high, pools=bool(event.spec.on))
        members = MembershipState(settings=settings, started=event.spec.resume)
        run = RunState(name, event.spec, event.settings, members, created=self._now, since=self._now)
        run.reason, run.user, run.budget = members.reason, event.user, event.spec.budget
        self._state.runs[name] = run
        self._request_processes(run, low, high)

    def _request_processes(self, run: RunState, low: int, high: int) -> None:
        request = fe.RunRequested(
            run.name,
            low,
            high,
            run.spec.compat,
            restart_limits(run.settings),
            _server_processes(run),
            int(bool(run.settings.get("evaluator", False))),
            machine_requirements(run.spec),
            run.spec.priority,
        )
        self._then(self._fleet, replace(request, ports=str(run.settings.get("ports", ""))))

    def _resume(self, run: RunState, event: run_events.RunResumed) -> None:
        """Start a run again. Worlds keep counting and the checkpoint stays; members and claims are forgotten."""
        old, low, high = run.membership, event.min_members, event.max_members
        run.membership = MembershipState(
            settings=membership_settings(run.settings, low, high, pools=bool(run.spec.on)),
            number=old.number,
            generation=old.generation,
            order=old.order,
            started=old.started or old.checkpoint_step is not None,
            step=old.step,
            checkpoint_step=old.checkpoint_step,
            checkpoint_path=old.checkpoint_path,
            losses=old.losses,
            joins=old.joins,
            reason="resumed: waiting for members",
        )
        run.ended_at, run.status, run.exit_code, run.failure = None, "", None, None
        run.since, run.reason, run.status_if_stopped = self._now, run.membership.reason, RESUMABLE
        run.stop_requested, run.problem = False, None
        run.evaluation = replace(run.evaluation, members={})
        self._request_processes(run, low, high)

    def _resume_ended(self, run: RunState, event: run_events.RunResumed) -> None:
        if run.has_ended:
            self._resume(run, event)

    def _set_budget(self, run: RunState, event: run_events.BudgetSet) -> None:
        run.budget = event.budget

    def _stop(self, run: RunState, event: run_events.UserStopRequested) -> None:
        run.status_if_stopped, run.stop_requested = event.status, True
        stop = ev.StopRequested(event.reason, event.checkpoint, exit_codes.RESUMABLE)
        self._then(self._membership, run, stop, event.grace_s)

    def _note_failure(self, run: RunState, event: run_events.ExceptionReported) -> None:
        """Keep the first cause: members that lost a peer, or raised shortly after another, only suffered from it."""
        if fleet.role_of(event.member) == EVALUATOR or event.code in _CONSEQUENCES:
            return
        if run.failure is None or self._now - run.failed_at >= SAME_FAILURE_S:
            run.failure, run.failed_at = event, self._now

    def _end(self, run: RunState, status: str, reason: str, exit_code: int) -> None:
        run.status, run.exit_code, run.ended_at, run.since = status, exit_code, self._now, self._now
        run.reason = run.last_change = reason

    def _ignore(self, run: RunState, event: object) -> None:
        """Do nothing: the event is in the journal for the views only."""

    def _skip(self, event: run_events.EventSkipped) -> None:
        """Do nothing: what the event was is not known."""

    # --- evaluators, which no other member waits for

    def _evaluation(self, run: RunState, event: Any) -> None:
        if isinstance(event, evaluation.EvaluationReported) and run.membership.stopping is not None:
            return  # the run is about to end; its last checkpoint is evaluated again if it is resumed
        before = run.evaluation
        run.evaluation, instructions = evaluation.decide(before, event, self._now)
        active = run.membership.stopping is None and not run.membership.finished
        for instruction in instructions:
            self._instruct(run.name, instruction)
            if isinstance(instruction, evaluation.StopEarly) and active:
                stop = ev.StopRequested(instruction.reason, checkpoint=True, exit_code=exit_codes.OK)
                self._then(self._membership, run, stop, EARLY_STOP_GRACE_S)
        if isinstance(event, ev.MemberLost) and event.member in before.members:
            self._then(self._fleet, fe.MemberUnresponsive(run.name, event.member))
        elif isinstance(event, ev.MemberConnected):
            self._then(self._fleet, fe.MemberResponsive(run.name, event.member))
            if self._state.fleet.runs[run.name].trained:
                self._announce_training_finished(run, (event.member,))

    def _announce_training_finished(self, run: RunState, evaluators: tuple[str, ...]) -> None:
        self._instruct(run.name, evaluation.AnnounceTrainingFinished(evaluators, run.membership.step))

    # --- membership

    def _member_event(self, run: RunState, event: Any) -> None:
        if fleet.role_of(getattr(event, "member", "")) == EVALUATOR:
            self._evaluation(run, event)
        else:
            self._membership(run, event)

    def _coordinator_restarted(self, run: RunState, event: ev.CoordinatorRestarted) -> None:
        run.evaluation, _ = evaluation.decide(run.evaluation, event, self._now)
        self._membership(run, event)

    def _membership(self, run: RunState, event: ev.Event, grace_s: float = STOP_GRACE_S) -> None:
        if run.has_ended:
            return
        before = run.membership
        decide = parameter_server.decide if before.settings.servers else membership.decide
        run.membership, instructions = decide(before, event, self._now)
        after = run.membership
        if after.reason != before.reason:
            run.reason, run.since = after.reason, self._now
        for instruction in instructions:
            self._instruct(run.name, instruction)
            if isinstance(instruction, _WORLD_CHANGES):
                run.last_change = instruction.reason
        self._tell_fleet(run, event, before)
        self._then(self._update_unmanaged, run)
        if after.stopping is not None and (before.stopping is None or isinstance(event, ev.StopRequested)):
            self._then(self._stop_processes, run.name, after, grace_s)
        if after.finished and not before.finished:
            self._then(self._fleet, fe.RunFinished(run.name))

    def _tell_fleet(self, run: RunState, event: ev.Event, before: MembershipState) -> None:
        match event:
            case ev.MemberLost(member, reason) if member in before.members:
                self._then(self._fleet, fe.MemberUnresponsive(run.name, member, reason if event.hung else ""))
            case ev.MemberConnected(member):
                self._then(self._fleet, fe.MemberResponsive(run.name, member))
            case ev.ScaleRequested(low, high):
                self._then(self._fleet, fe.RunScaled(run.name, low, high, _holders(before)[:high]))
            case ev.CheckpointWritten(_, step, path) if run.evaluation.members:
                self._instruct(run.name, evaluation.AnnounceCheckpoint(tuple(run.evaluation.members), step, path))

    def _stop_processes(self, run: str, state: MembershipState, grace_s: float) -> None:
        """Tell the fleet to stop a run; processes that hold no state yet may be killed without a loss."""
        busy = {name for name, member in state.members.items() if member.status != membership.STARTING}
        idle = tuple(name for name in self._state.fleet.processes.of_run(run) if name not in busy)
        assert state.stopping is not None
        self._fleet(fe.RunStopping(run, state.stopping.exit_code, grace_s, state.stopping.reason, idle))

    def _update_unmanaged(self, run: RunState) -> None:
        """Tell the fleet which members it did not start, if that has changed."""
        desired = self._state.fleet.runs.get(run.name)
        if desired is None:
            return
        members, managed = run.membership.members, self._state.fleet.processes.of_run(run.name)
        unmanaged = tuple(
            member.name
            for member in members.values()
            if member.name not in managed and (member.connected or not run.membership.finished)
        )
        if unmanaged != desired.unmanaged:
            self._fleet(fe.UnmanagedMembersChanged(run.name, unmanaged))

    # --- processes and agents

    def _fleet(self, event: fe.Event) -> None:
        self._state.fleet, instructions = fleet.decide(self._state.fleet, event, self._now)
        for instruction in instructions:
            run = self._state.runs.get(instruction.run)
            if run is not None and isinstance(instruction, fe.MarkRunEnded) and _awaits_machines(run):
                self._then(self._await_machines, run, instruction.reason)
                continue
            self._instruct(instruction.run, instruction)
            if run is None or run.has_ended:
                continue
            match instruction:
                case fe.MarkRunFailed(_, reason, exit_code):
                    self._end(run, FAILED, _blame(run, reason) if exit_code == exit_codes.FAILED else reason, exit_code)
                case fe.MarkTrainingFinished():
                    self._announce_training_finished(run, tuple(run.evaluation.members))
                case fe.MarkRunEnded(_, reason, exit_code):
                    self._end(run, run.status_if_stopped if exit_code else DONE, reason, exit_code)

    def _await_machines(self, run: RunState, reason: str) -> None:
        """Resume at once: all machines went before replacements came, and those continue from the checkpoint."""
        self._instruct(run.name, fe.FleetNote(run.name, f"{reason}; waiting for replacement machines"))
        settings = run.membership.settings
        self._resume(run, run_events.RunResumed(settings.min_members, settings.max_members))

    def _process_exited(self, event: fe.ProcessExited) -> None:
        run = self._state.runs.get(event.run)
        if run is None:
            self._then(self._fleet, event)
            return
        evaluator = run.evaluation.members.get(event.member)
        if evaluator is not None and evaluator.incarnation == event.incarnation:
            run.evaluation, _ = evaluation.decide(run.evaluation, ev.MemberLeft(event.member, None), self._now)
        left_loop = exits.left_its_loop(run, event)
        done = ev.MemberDone(event.member, run.membership.step, early=True)
        if left_loop and not run.membership.settings.servers:
            self._then(self._membership, run, done)
        self._then(self._process_of_member_exited, run, event)
        if left_loop and run.membership.settings.servers:
            # Servers first have to hear that the trainer is lost, with its ticket.
            self._then(self._membership, run, done)

    def _process_of_member_exited(self, run: RunState, event: fe.ProcessExited) -> None:
        member, finished = run.membership.members.get(event.member), run.membership.finished
        if member is not None and member.incarnation == event.incarnation:
            if member.status != membership.DONE:
                lost = ev.MemberLost(event.member, f"its process ended: {event.detail or event.cause}")
                self._then(self._membership, run, lost)
                if finished:
                    # It had no part in the last step, so it was not to reach the end of the script.
                    event = replace(event, cause="idle")
            elif finished and member.connected:
                self._then(self._membership, run, ev.MemberDisconnected(event.member))
        problem = exits.problem_of(self._state, run, event)
        event = exits.explain(run, event, problem)
        self._then(self._fleet, event)
        self._then(self._after_exit, run, problem)

    def _after_exit(self, run: RunState, problem: Problem | None) -> None:
        if not run.has_ended:
            self._update_unmanaged(run)
        elif run.status == FAILED:
            run.problem = run.problem or problem

    def _coordinator_started(self, event: fe.CoordinatorStarted) -> None:
        self._then(self._fleet, event)
        self._then(self._provisioning, pe.CoordinatorWasDown(self._now - self._state.at))

    def _agent_connected(self, event: fe.AgentConnected) -> None:
        self._then(self._fleet, event)
        self._then(self._provisioning, pe.AgentArrived(event.agent))

    def _agent_notice(self, event: fe.AgentNotice) -> None:
        for process in self._state.fleet.processes.values():
            run = self._state.runs.get(process.run)
            if process.agent == event.agent and process.alive and run is not None:
                notice = ev.NoticeReceived(process.member, event.within_s, event.cause)
                self._then(self._membership, run, notice)
        self._then(self._fleet, event)
        self._then(self._provisioning, pe.AgentLeaving(event.agent, event.cause))

    def _fleet_timer(self, event: fe.FleetTimerExpired) -> None:
        self._then(self._fleet, event)
        if event.what == "agent":
            self._then(self._release_lost_agent, event.agent)

    def _release_lost_agent(self, agent: str) -> None:
        if agent not in self._state.fleet.agents:
            self._provisioning(pe.AgentLost(agent, "its agent did not come back"))

    # --- machines

    def _machine_reported(self, event: run_events.MachineReported) -> None:
        self._state.machines[event.agent] = event

    def _provisioning(self, event: pe.Event) -> None:
        self._state.provisioning, instructions = provisioning.decide(self._state.provisioning, event, self._now)
        active = [run.name for run in self._state.runs.values() if not run.has_ended]
        for instruction in instructions:
            match instruction:
                case pe.StopRunOverBudget():
                    self._stop_over_budget(instruction)
                case pe.FailInfeasibleRun():
                    self._fail_infeasible(instruction)
                case pe.ProvisioningNote(run=""):
                    # News of a pool concerns every run that may use it.
                    for name in active:
                        self._instruct(name, instruction)
                case pe.ProvisioningNote(run=name):
                    self._instruct(name, instruction)
                case _:
                    self._instruct("", instruction)

    def _stop_over_budget(self, instruction: pe.StopRunOverBudget) -> None:
        run = self._state.runs.get(instruction.run)
        if run is not None and not run.has_ended and run.membership.stopping is None:
            run.status_if_stopped = RESUMABLE
            self._instruct(run.name, instruction)
            stop = ev.StopRequested(instruction.reason, checkpoint=True, exit_code=exit_codes.BUDGET_REACHED)
            self._then(self._membership, run, stop)

    def _fail_infeasible(self, instruction: pe.FailInfeasibleRun) -> None:
        run = self._state.runs[instruction.run]
        self._instruct(run.name, instruction)
        run.problem = no_machines(run.name, instruction.problems)
        self._then(self._fleet, fe.RunInfeasible(run.name, f"{run.problem.what}: {run.problem.why}"))


_COORDINATOR_EVENTS: dict[type, Callable[[_Cascade, Any], None]] = {
    **dict.fromkeys(fe.Event.__args__, _Cascade._fleet),  # type: ignore[attr-defined]
    **dict.fromkeys(pe.Event.__args__, _Cascade._provisioning),  # type: ignore[attr-defined]
    fe.CoordinatorStarted: _Cascade._coordinator_started,
    fe.AgentConnected: _Cascade._agent_connected,
    fe.AgentNotice: _Cascade._agent_notice,
    fe.FleetTimerExpired: _Cascade._fleet_timer,
    fe.ProcessExited: _Cascade._process_exited,
    run_events.MachineReported: _Cascade._machine_reported,
    run_events.EventSkipped: _Cascade._skip,
}

# Every other event of a run is its membership's, or its evaluation's if the member is an evaluator.
_RUN_EVENTS: dict[type, Callable[[_Cascade, RunState, Any], None]] = {
    run_events.RunResumed: _Cascade._resume_ended,
    run_events.BudgetSet: _Cascade._set_budget,
    run_events.UserStopRequested: _Cascade._stop,
    run_events.ExceptionReported: _Cascade._note_failure,
    run_events.ProgressMeasured: _Cascade._ignore,
    ev.CoordinatorRestarted: _Cascade._coordinator_restarted,
}
_AFTER_THE_END = (run_events.RunResumed, run_events.BudgetSet)


def _awaits_machines(run: RunState) -> bool:
    """Return whether a run stops only because its machines went, and goes on when others come."""
    state = run.membership
    interrupted = state.stopping is not None and state.stopping.until_replaced and not state.finished
    return interrupted and not run.has_ended and not run.stop_requested


def _blame(run: RunState, reason: str) -> str:
    failure = run.failure
    return reason if failure is None else f"{failure.member} raised {failure.kind}: {failure.text}"


def _server_processes(run: RunState) -> int:
    """Return how many processes hold parameters: Shoal's servers or TensorFlow's."""
    return server_count(run.settings) if run.spec.compat == launcher_env.PS else run.membership.settings.servers


def _holders(state: MembershipState) -> tuple[str, ...]:
    """Return the members of the world; without a world those that train with servers or hold the state, by rank."""
    if state.world is not None:
        return tuple(seat.member for seat in state.world.seats)
    held = [
        m
        for m in state.members.values()
        if m.status in (membership.TRAINING, membership.REGROUPING) or m.step is not None
    ]
    return tuple(m.name for m in sorted(held, key=lambda m: m.rank))
