"""Session of a member in a run with parameter servers, trainer or server: follows placements, leaves when told to."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from shoal import exit_codes
from shoal.core.membership.state import SERVER
from shoal.core.placement import Placement
from shoal.core.world import Seat
from shoal.settings import port_range
from shoal.wire import credentials
from shoal.wire import member_messages as messages
from shoal.wire.protocol import Message
from shoal.worker.parameter_server import rpc
from shoal.worker.session.coordinator_client import CoordinatorClient
from shoal.worker.session.environment import MemberEnvironment
from shoal.worker.session.session import MemberExit
from shoal.worker.transport.exchange_broken import ExchangeBroken
from shoal.worker.transport.handshake import COPY
from shoal.worker.transport.peers import Peers
from shoal.worker.transport.snapshot import Bytes
from shoal.worker.transport.sockets import disown

# Name of the claim that elects the trainer whose callbacks write files.
WRITER_CLAIM = "write what callbacks write"


class ServedSession(CoordinatorClient):
    """Session of a trainer or a server; it has no world, so rank, size and exchange are those of a lone member.

    `on_placement`, `on_trainer_lost` and `unconfirmed` are set by the client or the server that uses the session. They
    are called in the uplink's thread, under the session's lock.
    """

    rank = 0
    size = 1
    broken = False
    flags = 0
    reason = ""
    exchange = None
    status: Callable[[], dict[str, Any]]

    def __init__(self, environment: MemberEnvironment) -> None:
        access = credentials.read(environment.token_file, environment.url)
        super().__init__(environment, access)
        self._handlers |= {
            messages.PlacementMsg: self._on_placement,
            messages.TrainerLostMsg: self._on_trainer_lost,
            messages.RestoreMsg: self._on_restore,
            messages.EvictedMsg: self._on_evicted,
        }
        self.is_server = environment.role == SERVER
        self.placement: Placement | None = None
        self.on_placement: Callable[[Placement | None], None] = lambda _placement: None
        self.on_trainer_lost: Callable[[str, str], None] = lambda _member, _incarnation: None
        self.unconfirmed: Callable[[], list[Message]] = list
        self._restore_requested = False
        self._failure: Exception | None = None
        self.peers = Peers(
            access.token.encode(),
            environment.run,
            self.me,
            environment.incarnation,
            environment.host,
            port_range(self.settings.ports),
            others=environment.other_hosts,
            on_failure=self._on_fatal,
        )
        self.address = self.peers.address
        self._uplink.open()

    @property
    def is_writer(self) -> bool:
        """Whether this is the trainer that writes files; if it leaves, another one is elected."""
        return not self.is_server and self.try_claim(WRITER_CLAIM)

    def begin(self, fingerprint: str) -> None:
        """Ask to be admitted, with the fingerprint of the model that the script has built."""
        with self._changed:
            self._fingerprint, self._ready = fingerprint, True
            self._send(messages.ReadyMsg(fingerprint, self.step if self.is_server else None))
        self.set_phase("waiting")

    def send(self, message: Message) -> None:
        self._send(message)

    def report_done(self, step: int) -> None:
        """Report that every ticket is finished."""
        with self._changed:
            self.step, self._done = step, True
            self._send(messages.DoneMsg(step))
        self.set_phase("done")

    def leave_loop(self) -> None:
        """Report that the script left its loop early; the others continue without this member."""
        with self._changed:
            self._done = self._left_loop = True
            self._send(messages.DoneMsg(self.step or 0, early=True))
        self.set_phase("done")
        text = f"its script left the training loop at step {self.step or 0}; other trainers continue without it"
        sys.stderr.write(f"shoal: {self.me}: {text}\n")

    def report_restored(self, step: int | None) -> None:
        """Report the step of the checkpoint that the coordinator asked to load; None if there is none."""
        with self._changed:
            self._restore_requested = False
            self._send(messages.ReadyMsg(self._fingerprint, step, restored=True))

    # --- waiting, in the main thread

    @property
    def finished(self) -> bool:
        return self._finished

    @property
    def restore_requested(self) -> bool:
        return self._restore_requested

    @property
    def stop(self) -> messages.StopMsg | None:
        return self._stop

    @property
    def leaving(self) -> str:
        """Reason why this member has to leave, empty if it does not."""
        return self._leaving[1] if self._leaving is not None else ""

    def overdue(self, margin_s: float = 2.0) -> bool:
        """Return whether this member has to leave within `margin_s` seconds."""
        return self._leaving is not None and time.monotonic() > self._leaving[0] - margin_s

    def pause(self, seconds: float) -> None:
        """Block until a message arrives, but at most `seconds`; raise errors of other threads."""
        with self._changed:
            self._raise_error()
            self._changed.wait(seconds)
            self._raise_error()

    def wait_for_placement(self, after: int) -> Placement:
        """Block for a placement numbered above `after`; raise MemberExit if the run ends or we must leave before."""
        with self._changed:
            self._wait_until(
                lambda: self._interrupted() or self._number() > after, "the coordinator to place the state"
            )
            self.raise_if_ended()
            assert self.placement is not None
            return self.placement

    def _number(self) -> int:
        return self.placement.number if self.placement is not None else 0

    def _interrupted(self) -> bool:
        return self._finished or self._stop is not None or self._leaving is not None

    def raise_if_ended(self) -> None:
        """Raise MemberExit if the run has ended or this trainer has to leave; call it between tickets."""
        self._raise_error()
        if self._finished:
            raise self.exit(0, "the run has finished")
        if self._stop is not None:
            self._send(messages.LeftMsg(self.step))
            raise self.exit(self._stop.exit_code, f"stopped: {self._stop.reason}")
        if self._leaving is not None:
            self._send(messages.LeftMsg(self.step))
            raise self.exit(exit_codes.RESUMABLE, f"left the run: {self._leaving[1]}")

    def exit(self, exit_code: int, reason: str) -> MemberExit:
        """Print why this process ends and return the exception that ends it."""
        sys.stderr.write(f"shoal: {self.me}: {reason}\n")
        return MemberExit(exit_code, reason)

    def fail(self, error: Exception) -> None:
        """Let the main thread raise an error of another thread."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error
        if self._failure is not None:
            raise self._failure

    # --- messages, in the uplink's thread

    def _hello(self) -> list[Message]:
        return super()._hello() + self.unconfirmed()

    def _on_placement(self, message: messages.PlacementMsg) -> None:
        if message.placement.number <= self._number():
            return
        self.placement, self.reason = message.placement, message.reason
        self.on_placement(message.placement)

    def _on_trainer_lost(self, message: messages.TrainerLostMsg) -> None:
        self.on_trainer_lost(message.member, message.incarnation)

    def _on_restore(self, _message: messages.RestoreMsg) -> None:
        self._restore_requested = True

    def _on_evicted(self, _message: messages.EvictedMsg) -> None:
        self._claims.pop(WRITER_CLAIM, None)
        self.placement = None
        self.on_placement(None)
        self._send_hello()

    # --- peers

    def fetch(self, call: rpc.ServerCall, seat: Seat) -> tuple[bytes, list[Bytes]] | None:
        """Return a copy of a part from another server, None if it is out of reach just now."""
        try:
            sock = self.peers.connect(COPY, call.generation, seat, self.settings.connect_timeout_s, threading.Event())
        except ExchangeBroken:
            return None
        try:
            rpc.send(sock, call)
            reply, body = rpc.receive_reply(sock)
            if reply.kind != "done":
                return None
            return reply.meta, [np.frombuffer(buffer, np.uint8) for buffer in rpc.split_body(body, reply.sizes)]
        except OSError:
            return None
        finally:
            disown(sock)

    def close(self) -> None:
        self._uplink.close()
        self.peers.close()
