"""The coordinator's service: the one way from an event to its effects.

An event is journaled, applied to the state, shown in the views and carried out, to its end, before the next. Everything
here runs on the event loop, so there is no lock and no queue of events, except while the journal cannot be written.

Measurements are the exception: they come every second, decide nothing, and go to the views only. Two things of them
are journaled, since decisions and the end depend on them: the step, before the next event of its run and at least once
a minute, and the whole measurement once, when its run has ended.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from shoal.coordinator import dispatch
from shoal.coordinator.live_state import LiveState, MonotonicWallClock
from shoal.coordinator.storage import state_snapshot
from shoal.coordinator.storage.logs import Logs
from shoal.coordinator.view_writer import ViewWriter
from shoal.core.fleet import events as fe
from shoal.core.membership import events as ev
from shoal.core.provisioning import events as pe
from shoal.core.runs import events as run_events
from shoal.core.runs.decide import Instructions, apply
from shoal.core.runs.state import CoordinatorState
from shoal.errors import EventUnstorable, JournalUnwritable, ShoalError
from shoal.store.journal import Journal, JournalEntry, JournalSnapshot, decode_event
from shoal.store.sqlite_views import SqliteViews
from shoal.wire import codec
from shoal.wire import member_messages as ms

log = logging.getLogger("shoal.coordinator")

MAX_WAITING = 100_000


class CoordinatorService:
    """The state of one coordinator, and the way from an event to its effects.

    `provision` carries out instructions to pools; without pools there are none.
    """

    def __init__(self, directory: Path, journal: Journal, views: SqliteViews, name: str) -> None:
        self.directory = directory
        self.name = name
        self.state = CoordinatorState()
        self.clock = MonotonicWallClock(journal.last_at)
        self.live = LiveState(self.clock)
        self.logs = Logs(directory)
        self.views = ViewWriter(self.state, self.live, self.run_dir, views, self.logs)
        self.provision: Callable[[pe.Instruction], None] = lambda _instruction: None
        self._journal = journal
        self._journal_error: JournalUnwritable | None = None
        self._waiting: deque[Callable[[], object]] = deque()

    def run_dir(self, run: str) -> str:
        """Return the directory of a run."""
        return str(self.directory / "runs" / run)

    # --- events

    def handle(self, run: str, event: Any) -> None:
        """Record an event and carry out its instructions; raise JournalUnwritable or EventUnstorable."""
        self.carry_out(self.record(run, event))

    def record(self, run: str, event: Any) -> Instructions:
        """Journal an event, apply it and return the instructions for the caller to carry out."""
        self.record_step(run)
        instructions = self._record(run, event)
        for name, instruction in instructions:
            if isinstance(instruction, (fe.MarkRunEnded, fe.MarkRunFailed)):
                self._record_last_progress(name)
        return instructions

    def _record(self, run: str, event: Any) -> Instructions:
        return self._apply(self._journal.append(run, event, self.clock.now()), event)

    def measured(self, run: str, progress: run_events.ProgressMeasured) -> None:
        """Show new measurements of a run, and keep its step for the next event."""
        live = self.live.run(run)
        live.progress, live.unrecorded_step = progress, progress.step
        self.views.add_metric(run, self.clock.now(), progress)

    def record_step(self, run: str) -> None:
        """Journal the latest measured step of a run, unless the state has it: what follows may depend on it."""
        live, state = self.live.run(run), self.state.runs.get(run)
        step, live.unrecorded_step = live.unrecorded_step, 0
        if state is None or state.has_ended or step <= state.membership.step:
            return
        try:
            instructions = self._record(run, ev.ProgressRecorded(step))
        except JournalUnwritable:
            live.unrecorded_step = step
            raise
        live.step_recorded_at = self.clock.now()
        self.carry_out(instructions)

    def _record_last_progress(self, run: str) -> None:
        """Journal the last measurement of a run, which rebuilt views show; without it they lack only that."""
        progress = self.live.run(run).progress
        if progress is not None:
            with contextlib.suppress(JournalUnwritable, EventUnstorable):
                self._record(run, progress)

    def _apply(self, entry: JournalEntry, event: Any, *, shown: bool = False) -> Instructions:
        instructions = apply(self.state, entry.run, event, entry.at)
        if isinstance(event, run_events.ProgressMeasured):
            self.live.run(entry.run).progress = event
        self.views.add(entry, event, instructions, shown=shown)
        return instructions

    def replay(self) -> None:
        """Replay the journal and mark every connection as closed."""
        snapshot = self._journal.snapshot
        shown = self.views.shown_up_to(self._journal.seq, snapshot.seq if snapshot is not None else 0)
        if snapshot is not None:
            self._restore(snapshot)
            self.views.show_again(snapshot.seq, snapshot.at, complete=shown >= snapshot.seq)
        for entry in self._journal.entries():
            event = decode_event(entry, run_events.KINDS, self.directory)
            # An event that could not be handled when it happened is skipped here in the same way.
            self._try(partial(self._apply, entry, event, shown=entry.seq <= shown))
        for name, progress in self.views.stored_progress().items():
            self.live.run(name).progress = self.live.run(name).progress or progress
        self.handle("", fe.CoordinatorStarted(secrets.token_hex(4)))
        for run in self.state.runs.values():
            if not run.has_ended:
                self.handle(run.name, ev.CoordinatorRestarted())

    def _restore(self, snapshot: JournalSnapshot) -> None:
        """Take over a stored state, within the object that all parts of the coordinator share."""
        stored = state_snapshot.decode(snapshot.body)
        for state_field in fields(self.state):
            setattr(self.state, state_field.name, getattr(stored.state, state_field.name))
        for run, progress in stored.progress.items():
            self.live.run(run).progress = progress

    def encode_state(self) -> bytes:
        """Return the present state and measurements, for a snapshot of the journal."""
        measured = {run: progress for run in self.state.runs if (progress := self.live.run(run).progress) is not None}
        return state_snapshot.encode(state_snapshot.StoredState(self.state, measured))

    # --- while the journal cannot be written

    @property
    def is_blocked(self) -> bool:
        """Whether events wait for the journal."""
        return bool(self._waiting)

    def attempt(self, action: Callable[[], object]) -> None:
        """Run an action that journals; while the journal cannot be written, queue it."""
        if self._waiting:
            if len(self._waiting) < MAX_WAITING:
                self._waiting.append(action)
        elif not self._try(action):
            self._waiting.append(action)

    def retry(self) -> JournalUnwritable | None:
        """Run the queued actions in order; return the error that stopped them, None if all are done."""
        while self._waiting:
            if not self._try(self._waiting[0]):
                return self._journal_error
            self._waiting.popleft()
        self._journal_error = None
        return None

    def _try(self, action: Callable[[], object]) -> bool:
        """Run an action and return whether it is done with; False while the journal cannot be written."""
        try:
            action()
        except JournalUnwritable as error:
            if self._journal_error is None:
                log.error("%s", error)
            self._journal_error = error
            return False
        except ShoalError as error:
            log.warning("%s", error)
        except Exception:
            # A bug in the handling of one event must not end the coordinator of all other runs.
            log.exception("an event could not be handled")
        return True

    # --- instructions

    def carry_out(self, instructions: Instructions) -> None:
        """Send every instruction to the agent, pool or members that it is for."""
        for run, instruction in instructions:
            match instruction:
                case fe.StartProcess():
                    self._start_process(instruction)
                case fe.StopProcess(agent=agent):
                    if (connection := self.live.agents.get(agent)) is not None:
                        connection.send(dispatch.stop_member(instruction))
                case pe.SubmitAllocation() | pe.CancelAllocation():
                    self.provision(instruction)
                case ev.RejectMember():
                    self._reject(run, instruction)
                case _:
                    self._send_to_members(run, instruction)

    def _start_process(self, instruction: fe.StartProcess) -> None:
        connection, run = self.live.agents.get(instruction.agent), self.state.runs[instruction.run]
        if connection is not None:
            directory = self.run_dir(run.name)
            connection.send(dispatch.start_member(instruction, run.spec, run.settings, connection.base_url, directory))

    def _reject(self, run: str, rejection: ev.RejectMember) -> None:
        connections = self.live.run(run).connections
        connection = connections.get(rejection.member)
        if connection is not None and connection.incarnation == rejection.incarnation:
            del connections[rejection.member]
            connection.reject(rejection.code, rejection.what, rejection.why, rejection.do)

    def _send_to_members(self, run: str, instruction: Any) -> None:
        addressed = dispatch.to_members(instruction)
        if addressed is None:
            return
        (names, message), connections = addressed, self.live.run(run).connections
        data = codec.to_member.encode(message)
        for member in names:
            connection = connections.get(member)
            if connection is not None:
                connection.send_encoded(data)
                if isinstance(message, ms.EvictedMsg):
                    connection.evicted = member not in self.state.runs[run].membership.members

    def close(self) -> None:
        """Write the last views and close every file."""
        self.views.close()
        self.logs.close()
        self._journal.close()
