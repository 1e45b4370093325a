"""One member's part in a run whose state is held by servers: it hears of placements, and goes when it is told to."""

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

WRITING = "write what callbacks write"


class ServedSession(CoordinatorClient):
    """A member of a run that has servers: a trainer or a server."""

    rank = 0
    size = 1
    broken = False
    flags = 0
    reason = ""
    exchange = None

    def __init__(self, environment: MemberEnvironment) -> None:
        access = credentials.read(environment.token_file)
        super().__init__(environment, access)
        self.serves = environment.role == SERVER
        self.placement: Placement | None = None
        self.adopted: Callable[[Placement | None], None] = lambda _placement: None
        self.gone: Callable[[str, str], None] = lambda _member, _incarnation: None
        self.outstanding: Callable[[], list[Message]] = list
        self._restore_asked = False
        self._failure: Exception | None = None
        self.peers = Peers(
            access.token.encode(),
            environment.run,
            self.me,
            environment.incarnation,
            environment.host,
            port_range(self.settings.ports),
            others=environment.others,
        )
        self.address = self.peers.address
        self._link.open()

    @property
    def is_writer(self) -> bool:
        """Whether this trainer is the one that writes files; if it goes, it is another's turn."""
        return not self.serves and self.try_claim(WRITING)

    def begin(self, fingerprint: str) -> None:
        """The model is built: ask to be admitted."""
        with self._changed:
            self._fingerprint, self._ready = fingerprint, True
            self._say(messages.ReadyMsg(fingerprint, self.step if self.serves else None))
        self.set_phase("waiting")

    def say(self, message: Message) -> None:
        self._say(message)

    def done(self, step: int) -> None:
        """Every ticket is finished."""
        with self._changed:
            self.step, self._done = step, True
            self._say(messages.DoneMsg(step))
        self.set_phase("done")

    def restored(self, step: int | None) -> None:
        """The checkpoint that was asked for is loaded, or there is none."""
        with self._changed:
            self._restore_asked = False
            self._say(messages.ReadyMsg(self._fingerprint, step, restored=True))

    # --- waiting, in the main thread

    @property
    def finished(self) -> bool:
        return self._finished

    @property
    def restore_asked(self) -> bool:
        return self._restore_asked

    @property
    def stop(self) -> messages.StopMsg | None:
        return self._stop

    @property
    def leaving(self) -> str:
        """Why this member was told to go, empty if it was not."""
        return self._leaving[1] if self._leaving is not None else ""

    def overdue(self, margin_s: float = 2.0) -> bool:
        """Whether the time that this member was given to go is almost over."""
        return self._leaving is not None and time.monotonic() > self._leaving[0] - margin_s

    def pause(self, seconds: float) -> None:
        """Wait until something is heard, or for so long."""
        with self._changed:
            self._raise_error()
            self._changed.wait(seconds)
            self._raise_error()

    def newer_placement(self, than: int) -> Placement:
        """Wait for a placement with a larger number; raise RunOver if the run ends, or we have to go, before."""
        with self._changed:
            self._wait_until(lambda: self._interrupted() or self._number() > than, "the coordinator to place the state")
            self.raise_if_over()
            assert self.placement is not None
            return self.placement

    def _number(self) -> int:
        return self.placement.number if self.placement is not None else 0

    def _interrupted(self) -> bool:
        return self._finished or self._stop is not None or self._leaving is not None

    def raise_if_over(self) -> None:
        """For trainers, between tickets: go if we were told to."""
        self._raise_error()
        if self._finished:
            raise self.goodbye(0, "the run has finished")
        if self._stop is not None:
            self._say(messages.LeftMsg(self.step))
            raise self.goodbye(self._stop.exit_code, f"stopped: {self._stop.reason}")
        if self._leaving is not None:
            self._say(messages.LeftMsg(self.step))
            raise self.goodbye(exit_codes.RESUMABLE, f"left the run: {self._leaving[1]}")

    def goodbye(self, exit_code: int, reason: str) -> MemberExit:
        sys.stderr.write(f"shoal: {self.me}: {reason}\n")
        return MemberExit(exit_code, reason)

    def fail(self, error: Exception) -> None:
        """Something went wrong in a thread of ours; the main thread raises it."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error
        if self._failure is not None:
            raise self._failure

    # --- hearing, in the link's thread

    def _hello(self) -> list[Message]:
        return super()._hello() + self.outstanding()

    def _on_placement(self, message: messages.PlacementMsg) -> None:
        if message.placement.number <= self._number():
            return
        self.placement, self.reason = message.placement, message.reason
        self.adopted(message.placement)

    def _on_trainerlost(self, message: messages.TrainerLostMsg) -> None:
        self.gone(message.member, message.incarnation)

    def _on_restore(self, _message: messages.RestoreMsg) -> None:
        self._restore_asked = True

    def _on_evicted(self, _message: messages.EvictedMsg) -> None:
        self._claims.pop(WRITING, None)
        self.placement = None
        self.adopted(None)
        self._say_hello_again()

    # --- peers

    def fetch(self, call: rpc.ServerCall, seat: Seat) -> tuple[bytes, list[Bytes]] | None:
        """A copy of something from another server, None if it cannot be had now."""
        try:
            sock = self.peers.connect(COPY, call.life, seat, self.settings.connect_timeout_s, threading.Event())
        except ExchangeBroken:
            return None
        try:
            rpc.send(sock, call)
            answer, body = rpc.receive_answer(sock)
            if answer.kind != "done":
                return None
            return answer.meta, [np.frombuffer(piece, np.uint8) for piece in rpc.slices(body, answer.sizes)]
        except OSError:
            return None
        finally:
            disown(sock)

    def close(self) -> None:
        self._link.close()
        self.peers.close()

    # --- what a run asks of any session

    def leave_loop(self) -> None:
        """The script left its loop: the others go on without this member."""
        with self._changed:
            self._done = self._quit = True
            self._say(messages.DoneMsg(self.step or 0, early=True))
        self.set_phase("done")

    status: Callable[[], dict[str, Any]]
