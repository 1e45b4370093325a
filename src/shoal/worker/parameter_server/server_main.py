"""Main thread of a server: waits for the end of the run, drops lost trainers, and writes checkpoints.

Only the server that owns the ledger writes checkpoints: it fetches a copy of every part from its primary.
"""

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
from shoal.worker.parameter_server.parts import ShardStore
from shoal.worker.parameter_server.served_session import ServedSession
from shoal.worker.parameter_server.server import ParameterServer
from shoal.worker.parameter_server.sharded_checkpoint import join_parts, split_parts
from shoal.worker.session.session import MemberExit
from shoal.worker.training.training_state import TrainingState, print_error
from shoal.worker.transport.snapshot import Snapshot

TICK_S = 0.2
# The ledger's server leaves this long before its deadline; the others later, because it needs them to checkpoint.
LEDGER_MARGIN_S = 5.0
MARGIN_S = 1.0
FINAL_ATTEMPTS = 25


def serve(
    session: ServedSession,
    training_state: TrainingState,
    store: ShardStore,
    order: SampleOrder,
    ledger: TicketLedger,
    identity: str,
) -> MemberExit:
    """Serve until the run ends or this server has to leave; return what the process exits with."""
    server = ParameterServer(session, store, order, ledger)
    session.on_placement, session.on_trainer_lost = server.adopt, server.on_trainer_lost
    session.unconfirmed = server.unconfirmed
    main = ServerMain(session, training_state, server, order)
    session.status = main.status
    session.begin(identity)
    try:
        return main.run()
    finally:
        server.close()


class ServerMain:
    """Main loop of a server, beside the threads that answer calls."""

    def __init__(
        self, session: ServedSession, training_state: TrainingState, server: ParameterServer, order: SampleOrder
    ) -> None:
        self._session, self._training_state, self._server, self._order = session, training_state, server, order
        settings = session.settings
        self._schedule = CheckpointSchedule(settings.checkpoint_every_s, settings.checkpoint_every_steps)
        self._last_step, self._last_time = 0, time.monotonic()
        self._background_write: threading.Thread | None = None
        self._attempted_step = self._final_attempts = 0
        self._wrote_before_leaving = False
        self._write_lock = threading.Lock()
        server.may_end = not settings.evaluator

    def run(self) -> MemberExit:
        """Block until the run ends or this server has to leave; return what the process exits with."""
        session, server = self._session, self._server
        while True:
            session.pause(TICK_S)
            session.set_phase("serving" if server.holds_parts else "waiting")
            server.drop_disconnected_trainers()
            if session.restore_requested:
                self._restore()
            if session.finished:
                return session.exit(0, "served until the run had finished")
            if session.stop is not None:
                return self._stop(session.stop)
            if session.leaving and self.may_leave():
                session.send(messages.LeftMsg(None))
                return session.exit(exit_codes.RESUMABLE, f"left the run: {session.leaving}")
            self._checkpoint_if_due()
            self._checkpoint_end()

    def may_leave(self) -> bool:
        """Return whether a server under notice may go: its parts are handed off, or its time is up.

        In the latter case it writes a checkpoint first.
        """
        session, owns_ledger = self._session, self._server.owns_ledger
        if session.placement is None or session.placement.seat_of(session.me) is None:
            return True
        if session.overdue(MARGIN_S):
            self._write()
            return True
        if owns_ledger and session.overdue(LEDGER_MARGIN_S):
            return self._write()
        if owns_ledger and len(session.placement.servers) == 1 and not self._wrote_before_leaving:
            # In case no server joins to take over and the final write takes longer than there is time.
            self._wrote_before_leaving = self._write()
        return False

    def _stop(self, stop: messages.StopMsg) -> MemberExit:
        session = self._session
        if stop.checkpoint and self._server.owns_ledger:
            session.set_phase("checkpoint")
            for _ in range(FINAL_ATTEMPTS):
                if self._write():
                    break
                session.pause(TICK_S)
        session.send(messages.LeftMsg(None))
        return session.exit(stop.exit_code, f"stopped: {stop.reason}")

    # --- checkpoints

    def _step(self) -> int:
        ledger = self._server.ledger
        return self._order.steps_within(ledger.finished_samples) if ledger is not None else 0

    def _checkpoint_if_due(self) -> None:
        writing = self._background_write is not None and self._background_write.is_alive()
        if not self._server.owns_ledger or writing:
            return
        step, now = self._step(), time.monotonic()
        if self._schedule.due(step, now, self._last_step, self._last_time):
            self._background_write = threading.Thread(target=self._write, name="shoal-checkpoint", daemon=True)
            self._background_write.start()

    def _checkpoint_end(self) -> None:
        """Checkpoint the end of training for the evaluator, and only then let trainers know of the end."""
        server, total = self._server, self._order.total_steps
        if server.may_end or not server.owns_ledger or self._step() < total:
            return
        if self._background_write is not None:
            self._background_write.join(60.0)
        if self._attempted_step < total:
            self._final_attempts += 1
            self._write()
        # A checkpoint that cannot be written is reported, but does not keep the run from ending.
        server.may_end = self._attempted_step >= total or self._final_attempts >= FINAL_ATTEMPTS

    def _write(self) -> bool:
        """Write a checkpoint; return False if a part was out of reach, so that it is worth another try."""
        with self._write_lock:
            return self._write_exclusively()

    def _write_exclusively(self) -> bool:
        began, parts, placement = time.monotonic(), self._server.gather_state(), self._session.placement
        if parts is None or placement is None:
            return False
        self._last_step, self._last_time = self._step(), began
        ledger = msgspec.msgpack.decode(parts[LEDGER][0], type=TicketLedger)
        step = self._attempted_step = self._order.steps_within(ledger.finished_samples)
        snapshot = Snapshot(step, *join_parts(parts), readers=1)
        store = self._training_state.open_store()
        run, me, number = self._session.environment.run, self._session.me, placement.number
        try:
            entry = checkpoint.write(
                store,
                snapshot,
                "checkpoint",
                run=run,
                world=number,
                meta={"member": me},
                fence=lambda: self._server.owns_ledger,
            )
            self._session.report_checkpoint(
                entry.step, f"{store.where}/{entry.name}", snapshot.total_bytes, time.monotonic() - began
            )
            checkpoint.prune(store, self._session.settings.checkpoint_keep, entry)
        except ShoalError as error:
            print_error(error)
        return True

    def _restore(self) -> None:
        self._session.set_phase("restoring")
        try:
            saved = checkpoint.read(self._training_state.open_store())
        except NoCheckpoint:
            self._session.report_restored(None)
            return
        for error in saved.passed_over:
            print_error(error)
        self._server.restore(split_parts(saved.header, saved.buffers))
        self._last_step, self._last_time = saved.entry.step, time.monotonic()
        self._session.report_restored(saved.entry.step)

    def status(self) -> dict[str, Any]:
        return {"total_steps": self._order.total_steps}
