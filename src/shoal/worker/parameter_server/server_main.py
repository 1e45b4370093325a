"""A server's main thread: it waits for the end, watches over the ledger, and writes checkpoints."""

from __future__ import annotations

import threading
import time
from typing import Any

import msgspec

from shoal import exit_codes
from shoal.core.data.sample_order import SampleOrder
from shoal.core.parameter_server.ticket_ledger import TicketLedger
from shoal.core.placement import LEDGER
from shoal.errors import NoCheckpoint, ShoalError
from shoal.store import checkpoint
from shoal.store.checkpoint_schedule import CheckpointSchedule
from shoal.wire import member_messages as messages
from shoal.worker.parameter_server import sharded_checkpoint as parameter_server_sharded_checkpoint
from shoal.worker.parameter_server.parts import ShardStore
from shoal.worker.parameter_server.served_session import ServedSession
from shoal.worker.parameter_server.server import ParameterServer
from shoal.worker.session.session import MemberExit
from shoal.worker.training.training_state import TrainingState, print_error
from shoal.worker.transport.snapshot import Snapshot

TICK_S = 0.2
LEAD_MARGIN_S = 5.0
MARGIN_S = 1.0
END_TRIES = 25


def serve(
    session: ServedSession,
    training_state: TrainingState,
    vault: ShardStore,
    order: SampleOrder,
    ledger: TicketLedger,
    identity: str,
) -> MemberExit:
    """Serve until the run ends, or until we are told to go; what the process then ends with."""
    server = ParameterServer(session, vault, order, ledger)
    session.adopted, session.gone, session.outstanding = server.adopt, server.gone, server.outstanding
    service = _ServerMain(session, training_state, server, order)
    session.status = service.status
    session.begin(identity)
    try:
        return service.run()
    finally:
        server.close()


class _ServerMain:
    """What a server does besides answering."""

    def __init__(
        self, session: ServedSession, training_state: TrainingState, server: ParameterServer, order: SampleOrder
    ) -> None:
        self._session, self._training_state, self._server, self._order = session, training_state, server, order
        settings = session.settings
        self._schedule = CheckpointSchedule(settings.checkpoint_every_s, settings.checkpoint_every_steps)
        self._last_step, self._last_time = 0, time.monotonic()
        self._writing: threading.Thread | None = None
        self._tried = self._tries = 0
        self._left_behind = False
        self._pen = threading.Lock()
        server.sealed = not settings.evaluator

    def run(self) -> MemberExit:
        session, server = self._session, self._server
        while True:
            session.pause(TICK_S)
            session.set_phase("serving" if server.holds else "waiting")
            server.watch()
            if session.restore_asked:
                self._restore()
            if session.finished:
                return session.goodbye(0, "served until the run had finished")
            if session.stop is not None:
                return self._stop(session.stop)
            if session.leaving and self._may_go():
                session.say(messages.LeftMsg(None))
                return session.goodbye(exit_codes.RESUMABLE, f"left the run: {session.leaving}")
            self._checkpoint_if_due()
            self._seal_if_over()

    def _may_go(self) -> bool:
        """Whether somebody else holds all that we held, or our time is up; then a checkpoint is what we leave."""
        session, leads = self._session, self._server.leads
        if session.placement is None or session.placement.seat_of(session.me) is None:
            return True
        if session.overdue(MARGIN_S):
            self._write()
            return True
        if leads and session.overdue(LEAD_MARGIN_S):
            # Whoever keeps the ledger goes first, because it needs the others for the checkpoint.
            return self._write()
        if leads and len(session.placement.servers) == 1 and not self._left_behind:
            # Should nobody come to take over, and writing at the end take longer than there is time.
            self._left_behind = self._write()
        return False

    def _stop(self, stop: messages.StopMsg) -> MemberExit:
        session = self._session
        if stop.checkpoint and self._server.leads:
            session.set_phase("checkpoint")
            for _ in range(END_TRIES):
                if self._write():
                    break
                session.pause(TICK_S)
        session.say(messages.LeftMsg(None))
        return session.goodbye(stop.exit_code, f"stopped: {stop.reason}")

    # --- checkpoints

    def _step(self) -> int:
        ledger = self._server.ledger
        return self._order.steps_within(ledger.finished_samples) if ledger is not None else 0

    def _checkpoint_if_due(self) -> None:
        if not self._server.leads or (self._writing is not None and self._writing.is_alive()):
            return
        step, now = self._step(), time.monotonic()
        if self._schedule.due(step, now, self._last_step, self._last_time):
            self._writing = threading.Thread(target=self._write, name="shoal-checkpoint", daemon=True)
            self._writing.start()

    def _seal_if_over(self) -> None:
        """Leave the end of the training in a checkpoint, if somebody waits to evaluate it; then trainers may go."""
        server, total = self._server, self._order.total_steps
        if server.sealed or not server.leads or self._step() < total:
            return
        if self._writing is not None:
            self._writing.join(60.0)
        if self._tried < total:
            self._tries += 1
            self._write()
        # What cannot be written is said, but holds up nobody.
        server.sealed = self._tried >= total or self._tries >= END_TRIES

    def _write(self) -> bool:
        """Write a checkpoint; False if somebody was just changing places, so that it is to be tried again."""
        with self._pen:
            return self._write_one()

    def _write_one(self) -> bool:
        began, found, placement = time.monotonic(), self._server.gather(), self._session.placement
        if found is None or placement is None:
            return False
        self._last_step, self._last_time = self._step(), began
        ledger = msgspec.msgpack.decode(found[LEDGER][0], type=TicketLedger)
        step = self._tried = self._order.steps_within(ledger.finished_samples)
        snapshot = Snapshot(step, *parameter_server_sharded_checkpoint.join_parts(found), readers=1)
        store = self._training_state.open_store()
        run, me, number = self._session.environment.run, self._session.me, placement.number
        try:
            entry = checkpoint.write(
                store, snapshot, "checkpoint", run=run, world=number, meta={"member": me}, fence=lambda: self._leads()
            )
            self._session.report_checkpoint(
                entry.step, f"{store.where}/{entry.name}", snapshot.total_bytes, time.monotonic() - began
            )
            checkpoint.prune(store, self._session.settings.checkpoint_keep, entry)
        except ShoalError as error:
            print_error(error)
        return True

    def _leads(self) -> bool:
        return self._server.leads

    def _restore(self) -> None:
        self._session.set_phase("restoring")
        try:
            found = checkpoint.read(self._training_state.open_store())
        except NoCheckpoint:
            self._session.restored(None)
            return
        for passed in found.passed_over:
            print_error(passed)
        self._server.restore(parameter_server_sharded_checkpoint.split_parts(found.header, found.buffers))
        self._last_step, self._last_time = found.entry.step, time.monotonic()
        self._session.restored(found.entry.step)

    def status(self) -> dict[str, Any]:
        return {"total_steps": self._order.total_steps}
