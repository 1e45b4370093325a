"""A trainer's side of the servers: it asks for tickets, pulls parameters and pushes gradients.

Whatever breaks on the way is asked again, of whoever answers for it by then: servers take each ticket in only once.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Mapping, Sequence

from shoal.core.parameter_server.ticket_ledger import Ticket, TicketGranted
from shoal.core.placement import LEDGER, Placement
from shoal.core.world import Seat
from shoal.wire import member_messages as messages
from shoal.worker.parameter_server import rpc
from shoal.worker.parameter_server.liveness import LivenessConnection
from shoal.worker.parameter_server.rpc import (
    Disconnect,
    PullParameters,
    PushGradients,
    Raw,
    ServerCall,
    ServerReply,
    TicketRequest,
)
from shoal.worker.parameter_server.served_session import ServedSession
from shoal.worker.transport.exchange_broken import ExchangeBroken
from shoal.worker.transport.handshake import CALL
from shoal.worker.transport.sockets import disown, shut

PAUSE_S = 0.05


class TicketAbandoned(Exception):  # noqa: N818 - it is an event of the run, not a mistake
    """What this trainer was doing does not count: others do it, or the state went back to a checkpoint."""


class ServerClient:
    """The connections of one trainer to the servers; used by one thread."""

    def __init__(self, session: ServedSession) -> None:
        self._session = session
        self._socks: dict[str, tuple[str, socket.socket]] = {}
        self._guard = threading.Lock()
        self._dialled: tuple[str, str, threading.Event] | None = None
        self._reported: set[tuple[str, int]] = set()
        self._presence = LivenessConnection(self._be_seen_by)
        self.placement: Placement | None = None
        self.waits_for: tuple[str, ...] = ()
        session.adopted = self._adopted

    # --- what the training loop asks

    def wait_for_servers(self) -> Placement:
        """The newest placement; waits for the first."""
        if self._session.placement is None or self.placement is None:
            self.placement = self._session.newer_placement(0)
        return self._take_newest()

    def turn(self, done: Ticket | None, seconds: float, wants: bool = True) -> ServerReply:
        """Say what is finished and get the next ticket; waits as long as it takes, unless we have to go."""
        life, began = self.wait_for_servers().generation, time.monotonic()
        while True:
            placement = self._take_newest()
            if placement.generation != life:
                raise TicketAbandoned("the state went back to a checkpoint")
            call = TicketRequest(life, placement.number, done, seconds, wants)
            (answer, _), *_ = self._ask({LEDGER: (call, ())})
            if answer.kind in ("granted", "over"):
                self.waits_for = ()
                self._catch_up(answer.number)
                return answer
            self.waits_for = answer.whom
            if not wants:
                return answer
            done = None
            self._session.set_phase(f"waiting: {answer.reason}"[:200], began)
            self._session.raise_if_over()

    def pull(self, versions: Mapping[int, int]) -> dict[int, tuple[int, memoryview | None]]:
        """The parameters of every part that has another version than we have, with their versions."""
        life = self.wait_for_servers().generation
        parts = range(1, len(self.wait_for_servers().assignments))
        answers = self._ask({part: (PullParameters(life, part, versions.get(part, -1)), ()) for part in parts})
        found: dict[int, tuple[int, memoryview | None]] = {}
        for part, (answer, body) in zip(parts, answers, strict=True):
            found[part] = (answer.version, None if answer.kind == "same" else body)
        return found

    def push(self, granted: TicketGranted, life: int, gradients: Mapping[int, tuple[bytes, Sequence[Raw]]]) -> None:
        """Give every part its gradient; returns when all have taken it in."""
        self._ask(
            {
                part: (
                    PushGradients(
                        life, part, granted.ticket, granted.clock, granted.min_clock, granted.first_open_step, how
                    ),
                    body,
                )
                for part, (how, body) in gradients.items()
            }
        )

    def bye(self) -> None:
        """We go, holding nothing."""
        placement = self._session.placement
        if placement is not None:
            try:
                sock = self._sock(placement, placement.assignments[LEDGER].primary)
                rpc.send(sock, Disconnect(placement.generation))
            except (OSError, ExchangeBroken):
                return

    def close(self) -> None:
        self._presence.close()
        with self._guard:
            for _, sock in self._socks.values():
                disown(sock)
            self._socks.clear()

    # --- asking until it is answered

    def _ask(self, calls: Mapping[int, tuple[ServerCall, Sequence[Raw]]]) -> list[tuple[ServerReply, memoryview]]:
        """The answers of the parts' primaries, in the order of the calls."""
        answers: dict[int, tuple[ServerReply, memoryview]] = {}
        began = time.monotonic()
        while len(answers) < len(calls):
            placement = self._take_newest()
            waiting = {part: call for part, call in calls.items() if part not in answers}
            for part, answered in self._ask_once(placement, waiting).items():
                kind = answered[0].kind
                if kind in ("void", "stale", "refused"):
                    raise TicketAbandoned(answered[0].reason)
                if kind != "moved":
                    answers[part] = answered
            if len(answers) < len(calls):
                self._await_news(placement, began)
        return [answers[part] for part in calls]

    def _ask_once(
        self, placement: Placement, calls: Mapping[int, tuple[ServerCall, Sequence[Raw]]]
    ) -> dict[int, tuple[ServerReply, memoryview]]:
        """Send all calls, then take the answers, so that the servers work at the same time."""
        sent: list[tuple[int, str, socket.socket]] = []
        broken: set[str] = set()
        for part, (call, body) in calls.items():
            server = placement.assignments[part].primary
            if server in broken:
                continue
            try:
                sock = self._sock(placement, server)
                rpc.send(sock, call, body)
                sent.append((part, server, sock))
            except (OSError, ExchangeBroken) as error:
                broken.add(server)
                self._lost(placement, server, str(error))
        found: dict[int, tuple[ServerReply, memoryview]] = {}
        for part, server, sock in sent:
            if server in broken:
                continue
            try:
                found[part] = rpc.receive_answer(sock)
            except OSError as error:
                broken.add(server)
                self._lost(placement, server, str(error))
        return found

    def _await_news(self, placement: Placement, since: float) -> None:
        """Somebody was not there: go on when the coordinator says who is, or try again after a breath."""
        self._session.set_phase("waiting for a server", since)
        self._session.pause(PAUSE_S)
        newest = self._session.placement
        if newest is not None and newest.generation != placement.generation:
            raise TicketAbandoned("the state went back to a checkpoint")
        if self._session.finished:
            self._session.raise_if_over()
        if newest is None or newest.number == placement.number:
            stop = self._session.stop
            # Where no checkpoint is to be written, or can be, nothing that is still pushed is kept.
            if self._session.overdue() or (stop is not None and (newest is None or not stop.checkpoint)):
                self._session.raise_if_over()

    def _catch_up(self, number: int) -> None:
        """Know at least the placement that somebody's finished ticket was taken in under."""
        while self._take_newest().number < number:
            self._session.pause(PAUSE_S)
            self._session.raise_if_over()

    def _take_newest(self) -> Placement:
        newest = self._session.placement
        if newest is None:
            newest = self._session.newer_placement(0)
        if self.placement is None or newest.number > self.placement.number:
            self.placement = newest
        return self.placement

    def _lost(self, placement: Placement, server: str, cause: str) -> None:
        with self._guard:
            known = self._socks.pop(server, None)
        if known is not None:
            disown(known[1])
        newest = self._session.placement
        if newest is not None and newest.number == placement.number and (server, newest.number) not in self._reported:
            self._reported = {(server, newest.number)} | {one for one in self._reported if one[1] == newest.number}
            self._session.say(messages.ServerUnreachableMsg(server, placement.number, cause))

    def _sock(self, placement: Placement, server: str) -> socket.socket:
        seat = placement.seat_of(server)
        if seat is None:
            raise ExchangeBroken(f"{server} is no server any more")
        with self._guard:
            known = self._socks.get(server)
        if known is not None and known[0] == seat.incarnation:
            return known[1]
        cancelled = threading.Event()
        with self._guard:
            self._dialled = (server, seat.incarnation, cancelled)
        sock = self._session.peers.connect(
            CALL, placement.number, seat, self._session.settings.connect_timeout_s, cancelled
        )
        with self._guard:
            self._socks[server], self._dialled = (seat.incarnation, sock), None
        return sock

    def _adopted(self, placement: Placement | None) -> None:
        """In the link's thread: nobody waits for the answer of a server that is not one any more."""

        def is_gone(server: str, incarnation: str) -> bool:
            seat = placement.seat_of(server) if placement is not None else None
            return seat is None or seat.incarnation != incarnation

        with self._guard:
            for server, (incarnation, sock) in self._socks.items():
                if is_gone(server, incarnation):
                    shut(sock)
            if self._dialled is not None and is_gone(*self._dialled[:2]):
                self._dialled[2].set()
        self._presence.show(placement.seat_of(placement.assignments[LEDGER].primary) if placement is not None else None)

    def _be_seen_by(self, seat: Seat) -> socket.socket:
        return self._session.peers.connect(CALL, 0, seat, self._session.settings.connect_timeout_s, threading.Event())
