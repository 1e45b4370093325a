"""Member handler: turns the messages of members into events of their runs.

The first message of a connection is a hello. It is checked, journaled and answered with a welcome, in this order, so a
member that was welcomed is known even if the coordinator crashes at once. Heartbeats renew the lease and are kept as
live state; once a second the progress that they report is shown in the views. A member whose lease has expired may
still be running: it is told that it was evicted, and has to say hello again. A message that the journal cannot hold
closes its connection with the reason, rather than leave the member waiting for an answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from shoal.coordinator import dispatch
from shoal.coordinator.connections import MemberConnection, accept_version, reject_unstorable
from shoal.coordinator.live_state import LiveRun, has_progressed, measure_progress, trainers_of_servers
from shoal.coordinator.service import CoordinatorService
from shoal.core.fleet import decide as fl
from shoal.core.membership import decide as mb
from shoal.core.membership import events as ev
from shoal.core.membership.state import EVALUATOR
from shoal.core.runs import events as run_events
from shoal.core.runs.evaluation import EvaluatorState
from shoal.core.runs.state import RunState
from shoal.errors import AlreadyJoined, BadMessage, NameTaken, UnknownRunForMember
from shoal.wire import member_messages as ms

MEASURE_EVERY_S = 1.0
RECORD_STEP_S = 60.0
MAX_NAME = 200
MAX_TRACEBACK = 20_000


class MemberHandler:
    """Handles the messages and connections of all members."""

    def __init__(self, service: CoordinatorService) -> None:
        self._service = service

    def on_message(self, connection: MemberConnection, message: ms.FromMember) -> None:
        self._service.live.received(connection)
        if isinstance(message, ms.MemberHelloMsg):
            self._attempt(connection, partial(self._on_hello, connection, message))
        elif not connection.member:
            connection.reject(BadMessage.code, "the first message was not a hello")
        elif isinstance(message, ms.HeartbeatMsg):
            self._on_heartbeat(connection, message)
        else:
            self._attempt(connection, partial(self._on_event, connection, message))

    def _attempt(self, connection: MemberConnection, action: Callable[[], None]) -> None:
        self._service.attempt(partial(reject_unstorable, connection, action))

    def on_close(self, connection: MemberConnection) -> None:
        self._service.live.closed(connection)
        live = self._service.live.run(connection.run) if connection.run else None
        if live is not None and live.connections.get(connection.member) is connection:
            del live.connections[connection.member]
            self._service.attempt(partial(self._record_disconnect, connection))

    # --- hello

    def _on_hello(self, connection: MemberConnection, hello: ms.MemberHelloMsg) -> None:
        if connection.closed or not self._may_join(connection, hello):
            return
        connection.run, connection.member = hello.run, hello.member
        connection.incarnation, connection.pid = hello.incarnation, hello.pid
        event = ev.MemberConnected(
            hello.member,
            hello.incarnation,
            hello.address,
            hello.world,
            hello.step,
            hello.broken,
            hello.done,
            hello.role,
            hello.early,
        )
        instructions = self._service.record(hello.run, event)
        for _, instruction in instructions:
            if isinstance(instruction, ev.RejectMember) and instruction.incarnation == hello.incarnation:
                connection.reject(instruction.code, instruction.what, instruction.why, instruction.do)
                return
        self._welcome(connection, hello)
        self._service.carry_out(instructions)

    def _welcome(self, connection: MemberConnection, hello: ms.MemberHelloMsg) -> None:
        live, run = self._service.live.run(hello.run), self._service.state.runs[hello.run]
        old = live.connections.get(hello.member)
        if old is not None and old is not connection:
            old.close()
        live.connections[hello.member] = connection
        live.leases[hello.member] = mb.LastHeartbeat(self._service.clock.now(), hello.world, hello.step)
        live.heartbeats.pop(hello.member, None)
        connection.evicted = False
        lease_s, started = run.membership.settings.lease_s, run.membership.started
        memory = run.membership.adjustments.get(f"memory of {hello.member}")
        connection.send(
            ms.WelcomeMsg(
                run.heartbeat_s,
                lease_s,
                self._service.name,
                started,
                run.membership.settings.min_members,
                max(0, memory.values.get(hello.member, 0)) if memory is not None else 0,
            )
        )

    def _may_join(self, connection: MemberConnection, hello: ms.MemberHelloMsg) -> bool:
        """Return whether a hello is acceptable; reject the connection otherwise."""
        run = self._service.state.runs.get(hello.run)
        process = self._service.state.fleet.processes.get((hello.run, hello.member))
        if not accept_version(connection, hello.protocol, hello.version):
            return False
        if run is None or run.has_ended:
            what = f"run {hello.run} has ended" if run else f"unknown run {hello.run}"
            connection.reject(UnknownRunForMember.code, what, run.reason if run else "", "shoal ps lists the runs")
        elif process is not None and process.alive and process.incarnation != hello.incarnation:
            why = f"agent {process.agent} runs another process of that name"
            connection.reject(NameTaken.code, f"a member named {hello.member} is already in this run", why)
        elif (other := self._other_process(connection, hello)) is not None:
            connection.reject(
                AlreadyJoined.code,
                f"another process of {hello.member} has joined this run already",
                f"process {other} and process {hello.pid} were started with the same environment",
                "call join() in one process of each member; shoal run -n starts more members",
            )
        elif not re.fullmatch(r"[\w.:-]+(/[\w.:-]+)*", hello.member) or len(hello.member) > MAX_NAME:
            connection.reject(BadMessage.code, "invalid member name", repr(hello.member[:80]))
        elif connection.member not in ("", hello.member) or connection.run not in ("", hello.run):
            connection.reject(BadMessage.code, f"{connection.member} cannot become {hello.member} of {hello.run}")
        elif (hello.role == EVALUATOR) != (fl.role_of(hello.member) == EVALUATOR):
            connection.reject(BadMessage.code, f"invalid name {hello.member} for a member with the role {hello.role}")
        else:
            return True
        return False

    def _other_process(self, connection: MemberConnection, hello: ms.MemberHelloMsg) -> int | None:
        """Return the id of another process that is connected with the identity of this hello, None if there is none."""
        present = self._service.live.run(hello.run).connections.get(hello.member)
        if present is None or present is connection or present.closed:
            return None
        same = present.incarnation == hello.incarnation and present.pid != hello.pid
        return present.pid if same else None

    # --- events

    def _on_event(self, connection: MemberConnection, message: ms.FromMember) -> None:
        run = self._service.state.runs.get(connection.run)
        if isinstance(message, ms.ExceptionRaisedMsg) and run is not None and not run.has_ended:
            if message.step and fl.role_of(connection.member) != EVALUATOR:
                # Newer than its last heartbeat; whether a member is restarted depends on the first committed step.
                self._service.handle(connection.run, ev.ProgressRecorded(message.step))
            traceback = message.traceback[-MAX_TRACEBACK:]
            raised = run_events.ExceptionReported(
                connection.member, message.kind, message.text, traceback, message.code
            )
            self._service.handle(connection.run, raised)
            return
        if isinstance(message, ms.EvaluatedMsg) and fl.role_of(connection.member) != EVALUATOR:
            connection.reject(BadMessage.code, f"{connection.member} is not an evaluator")
            return
        run = self._run_of(connection)
        event = dispatch.event_of(connection.member, message)
        if run is None or event is None or run.has_ended:
            return
        self._renew_lease(connection)
        world = run.membership.world
        if isinstance(message, ms.WorldEnteredMsg) and world is not None and message.world == world.number:
            return  # the first member that entered the world has reported it already
        self._service.handle(connection.run, event)
        if isinstance(message, ms.LeftMsg):
            connection.evicted = True

    def _run_of(self, connection: MemberConnection) -> RunState | None:
        """Return the run of a member that is still in it; tell the others, once, that they were evicted."""
        run = self._service.state.runs.get(connection.run)
        member = _member_of(run, connection.member) if run is not None else None
        if connection.evicted or run is None:
            return None
        if run.has_ended and run.membership.finished:
            return run
        if member is None or member.incarnation != connection.incarnation:
            connection.evicted = True
            connection.send(ms.EvictedMsg("its lease has expired, or it has left"))
            return None
        return run

    def _renew_lease(self, connection: MemberConnection) -> None:
        leases, now = self._service.live.run(connection.run).leases, self._service.clock.now()
        lease = leases.get(connection.member)
        leases[connection.member] = mb.LastHeartbeat(now) if lease is None else replace(lease, at=now)

    # --- heartbeats

    def _on_heartbeat(self, connection: MemberConnection, heartbeat: ms.HeartbeatMsg) -> None:
        run = self._run_of(connection)
        if run is None or run.has_ended:
            return
        now, live = self._service.clock.now(), self._service.live.run(connection.run)
        live.leases[connection.member] = mb.LastHeartbeat(
            now,
            heartbeat.world,
            heartbeat.step,
            heartbeat.phase,
            heartbeat.phase_age_s,
            heartbeat.usual_step_s,
            heartbeat.waits_for,
        )
        live.heartbeats[connection.member] = heartbeat
        if heartbeat.phase == ms.OUTSIDE_THE_LOOP:
            self._record_step_outside(run, connection.member, heartbeat.step or 0)
        if run.membership.finished or now - live.measured_at >= MEASURE_EVERY_S:
            self._record_progress(run, live, now)

    def _record_step_outside(self, run: RunState, name: str, step: int) -> None:
        """Journal the step at which a script left its loop: training ends there if its process exits with code 0."""
        member = run.membership.members.get(name)
        trains = member is not None and member.status in (mb.TRAINING, mb.REGROUPING)
        if trains and step > run.membership.step:
            self._service.attempt(partial(self._service.handle, run.name, ev.ProgressRecorded(step)))

    def _record_progress(self, run: RunState, live: LiveRun, now: float) -> None:
        progress = measure_progress(run, live)
        live.measured_at = now
        if progress is not None:
            world = run.membership.world
            size = world.size if world is not None else trainers_of_servers(run)
            live.forecast.observe(now, progress.step, progress.total_steps, world.number if world else None, size)
        if progress is None or not has_progressed(progress, live.progress):
            return
        self._service.measured(run.name, progress)
        # Whether a member is restarted depends on the first committed step.
        if run.membership.step == 0 or now - live.step_recorded_at >= RECORD_STEP_S:
            self._service.attempt(partial(self._service.record_step, run.name))

    def _record_disconnect(self, connection: MemberConnection) -> None:
        run = self._service.state.runs.get(connection.run)
        member = _member_of(run, connection.member) if run is not None and not run.has_ended else None
        reconnected = connection.member in self._service.live.run(connection.run).connections
        if member is not None and member.incarnation == connection.incarnation and not reconnected:
            self._service.handle(connection.run, ev.MemberDisconnected(connection.member))


def _member_of(run: RunState, name: str) -> mb.MemberState | EvaluatorState | None:
    return run.membership.members.get(name) or run.evaluation.members.get(name)
