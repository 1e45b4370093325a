"""Trainer's client of the servers: requests tickets, pulls parameters and pushes gradients.

A call that fails is repeated, to whichever server is the primary by then; servers apply each ticket only once.
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

RETRY_S = 0.05
ROLLED_BACK = "the state went back to a checkpoint"


class TicketAbandoned(Exception):  # noqa: N818 - it is an event of the run, not a mistake
    """This trainer's ticket no longer counts: another trainer has it, or the state went back to a checkpoint."""


class ServerClient:
    """Connections of one trainer to the servers; used by its main thread.

    `placement` is the placement in use. `waits_for` are the trainers that the ledger makes this one wait for.
    """

    def __init__(self, session: ServedSession) -> None:
        self._session = session
        self._socks: dict[str, tuple[str, socket.socket]] = {}
        self._guard = threading.Lock()
        self._connecting: tuple[str, str, threading.Event] | None = None
        self._reported: set[tuple[str, int]] = set()
        self._liveness = LivenessConnection(self._connect_liveness)
        self.placement: Placement | None = None
        self.waits_for: tuple[str, ...] = ()
        session.on_placement = self._on_placement

    # --- calls of the training loop

    def wait_for_servers(self) -> Placement:
        """Return the newest placement; block until there is one."""
        if self._session.placement is None or self.placement is None:
            self.placement = self._session.wait_for_placement(after=0)
        return self._take_newest()

    def request_ticket(self, done: Ticket | None, seconds: float, wants: bool = True) -> ServerReply:
        """Report the finished ticket, if any, and block for the next one, unless `wants` is False.

        Return the reply "granted" or "over", or any if `wants` is False. Raise TicketAbandoned if the generation ends,
        and MemberExit if this trainer has to leave meanwhile.
        """
        generation, began = self.wait_for_servers().generation, time.monotonic()
        while True:
            placement = self._take_newest()
            if placement.generation != generation:
                raise TicketAbandoned(ROLLED_BACK)
            call = TicketRequest(generation, placement.number, done, seconds, wants)
            (reply, _), *_ = self._call({LEDGER: (call, ())})
            if reply.kind in ("granted", "over"):
                self.waits_for = ()
                self._wait_for_number(reply.number)
                return reply
            self.waits_for = reply.whom
            if not wants:
                return reply
            done = None
            self._session.set_phase(f"waiting: {reply.reason}"[:200], began)
            self._session.raise_if_ended()

    def pull(self, versions: Mapping[int, int]) -> dict[int, tuple[int, memoryview | None]]:
        """Return the version of every part, with its parameters where that differs from `versions`, else None."""
        generation = self.wait_for_servers().generation
        parts = range(1, len(self.wait_for_servers().assignments))
        replies = self._call({part: (PullParameters(generation, part, versions.get(part, -1)), ()) for part in parts})
        pulled: dict[int, tuple[int, memoryview | None]] = {}
        for part, (reply, body) in zip(parts, replies, strict=True):
            pulled[part] = (reply.version, None if reply.kind == "same" else body)
        return pulled

    def push(
        self, granted: TicketGranted, generation: int, gradients: Mapping[int, tuple[bytes, Sequence[Raw]]]
    ) -> None:
        """Push the gradient of a ticket to every part; return when all parts have applied it."""
        clocks = (granted.clock, granted.min_clock, granted.first_open_step)
        self._call(
            {
                part: (PushGradients(generation, part, granted.ticket, *clocks, layout), body)
                for part, (layout, body) in gradients.items()
            }
        )

    def disconnect(self) -> None:
        """Tell the ledger that this trainer leaves without a ticket; do nothing if the ledger is out of reach."""
        placement = self._session.placement
        if placement is not None:
            try:
                sock = self._sock(placement, placement.assignments[LEDGER].primary)
                rpc.send(sock, Disconnect(placement.generation))
            except (OSError, ExchangeBroken):
                return

    def close(self) -> None:
        self._liveness.close()
        with self._guard:
            for _, sock in self._socks.values():
                disown(sock)
            self._socks.clear()

    # --- calls, repeated until they are answered

    def _call(self, calls: Mapping[int, tuple[ServerCall, Sequence[Raw]]]) -> list[tuple[ServerReply, memoryview]]:
        """Return the replies of the parts' primaries in the order of the calls; raise TicketAbandoned on refusal."""
        replies: dict[int, tuple[ServerReply, memoryview]] = {}
        began = time.monotonic()
        while len(replies) < len(calls):
            placement = self._take_newest()
            waiting = {part: call for part, call in calls.items() if part not in replies}
            for part, (reply, body) in self._call_once(placement, waiting).items():
                if reply.kind in ("void", "stale", "refused"):
                    raise TicketAbandoned(reply.reason)
                if reply.kind != "moved":
                    replies[part] = (reply, body)
            if len(replies) < len(calls):
                self._wait_before_retry(placement, began)
        return [replies[part] for part in calls]

    def _call_once(
        self, placement: Placement, calls: Mapping[int, tuple[ServerCall, Sequence[Raw]]]
    ) -> dict[int, tuple[ServerReply, memoryview]]:
        """Send all calls before reading any reply, so that the servers work in parallel."""
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
                self._on_server_lost(placement, server, str(error))
        replies: dict[int, tuple[ServerReply, memoryview]] = {}
        for part, server, sock in sent:
            if server in broken:
                continue
            try:
                replies[part] = rpc.receive_reply(sock)
            except OSError as error:
                broken.add(server)
                self._on_server_lost(placement, server, str(error))
        return replies

    def _wait_before_retry(self, placement: Placement, since: float) -> None:
        """Pause until news arrives or a short time has passed; raise if the call has become pointless."""
        self._session.set_phase("waiting for a server", since)
        self._session.pause(RETRY_S)
        newest = self._session.placement
        if newest is not None and newest.generation != placement.generation:
            raise TicketAbandoned(ROLLED_BACK)
        if self._session.finished:
            self._session.raise_if_ended()
        if newest is None or newest.number == placement.number:
            stop = self._session.stop
            # In a stopping run, a push is worth retrying only if its state can still get into a checkpoint.
            if self._session.overdue() or (stop is not None and (newest is None or not stop.checkpoint)):
                self._session.raise_if_ended()

    def _wait_for_number(self, number: int) -> None:
        """Block until this trainer knows at least placement `number`, under which a finished ticket was recorded."""
        while self._take_newest().number < number:
            self._session.pause(RETRY_S)
            self._session.raise_if_ended()

    def _take_newest(self) -> Placement:
        newest = self._session.placement
        if newest is None:
            newest = self._session.wait_for_placement(after=0)
        if self.placement is None or newest.number > self.placement.number:
            self.placement = newest
        return self.placement

    def _on_server_lost(self, placement: Placement, server: str, cause: str) -> None:
        """Close the connection and report the server, once per placement."""
        with self._guard:
            connection = self._socks.pop(server, None)
        if connection is not None:
            disown(connection[1])
        newest = self._session.placement
        if newest is not None and newest.number == placement.number and (server, newest.number) not in self._reported:
            current = {report for report in self._reported if report[1] == newest.number}
            self._reported = {(server, newest.number)} | current
            self._session.send(messages.ServerUnreachableMsg(server, placement.number, cause))

    def _sock(self, placement: Placement, server: str) -> socket.socket:
        seat = placement.seat_of(server)
        if seat is None:
            raise ExchangeBroken(f"{server} is no longer a server")
        with self._guard:
            connection = self._socks.get(server)
        if connection is not None and connection[0] == seat.incarnation:
            return connection[1]
        cancelled = threading.Event()
        with self._guard:
            self._connecting = (server, seat.incarnation, cancelled)
        sock = self._session.peers.connect(
            CALL, placement.number, seat, self._session.settings.connect_timeout_s, cancelled
        )
        with self._guard:
            self._socks[server], self._connecting = (seat.incarnation, sock), None
        return sock

    def _on_placement(self, placement: Placement | None) -> None:
        """Close connections to replaced servers, so that no call waits for them; called in the uplink's thread."""

        def is_replaced(server: str, incarnation: str) -> bool:
            seat = placement.seat_of(server) if placement is not None else None
            return seat is None or seat.incarnation != incarnation

        with self._guard:
            for server, (incarnation, sock) in self._socks.items():
                if is_replaced(server, incarnation):
                    shut(sock)
            if self._connecting is not None and is_replaced(*self._connecting[:2]):
                self._connecting[2].set()
        ledger_seat = placement.seat_of(placement.assignments[LEDGER].primary) if placement is not None else None
        self._liveness.connect_to(ledger_seat)

    def _connect_liveness(self, seat: Seat) -> socket.socket:
        return self._session.peers.connect(CALL, 0, seat, self._session.settings.connect_timeout_s, threading.Event())
