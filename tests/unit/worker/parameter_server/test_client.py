"""A trainer's calls to the servers: which are repeated, and which end the ticket."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.core.parameter_server.ticket_ledger import Ticket, TicketGranted
from shoal.core.placement import PartAssignment, Placement
from shoal.core.world import Address, Seat
from shoal.wire import member_messages as messages
from shoal.worker.parameter_server import rpc
from shoal.worker.parameter_server.client import ServerClient, TicketAbandoned
from shoal.worker.parameter_server.rpc import PullParameters, PushGradients, ServerReply, TicketRequest
from shoal.worker.transport.exchange_broken import ExchangeBroken

SEATS = tuple(Seat(name, "1", Address("127.0.0.1", 9)) for name in ("s0", "s1"))
PLACEMENT = Placement(3, 1, SEATS, (PartAssignment("s0"), PartAssignment("s0"), PartAssignment("s1")))
GRANTED = TicketGranted(Ticket(0, 0, 4), 2, 1, 0, 0)
Answer = Callable[[str, Any], "tuple[ServerReply, bytes] | ServerReply | None"]


class Servers:
    """Servers s0 and s1 at the other ends of socket pairs; `answer` is what they reply, None to hang up."""

    def __init__(self) -> None:
        self.answer: Answer = lambda _server, _call: ServerReply("done")
        self.down: set[str] = set()
        self.calls: list[tuple[str, Any]] = []
        self._sockets: list[socket.socket] = []

    def connect(self, _kind: Any, _number: int, seat: Seat, *_: Any) -> socket.socket:
        if seat.member in self.down:
            raise ExchangeBroken(f"{seat.member} is down")
        ours, theirs = socket.socketpair()
        ours.settimeout(20.0)
        self._sockets += [ours, theirs]
        threading.Thread(target=self._serve, args=(seat.member, theirs), daemon=True).start()
        return ours

    def _serve(self, server: str, sock: socket.socket) -> None:
        try:
            while True:
                call, _ = rpc.receive_call(sock)
                self.calls.append((server, call))
                if isinstance(call, rpc.Disconnect):
                    continue
                answer = self.answer(server, call)
                if answer is None:
                    sock.close()
                    return
                reply, body = answer if isinstance(answer, tuple) else (answer, b"")
                rpc.send(sock, reply, [body] if body else [])
        except OSError:
            return

    def close(self) -> None:
        for sock in self._sockets:
            sock.close()


class FakeSession:
    """The session of a trainer; after each pause it takes the next of `placements`, if any."""

    def __init__(self, servers: Servers) -> None:
        self.placement: Placement | None = PLACEMENT
        self.placements: list[Placement] = []
        self.peers = SimpleNamespace(connect=servers.connect)
        self.settings = SimpleNamespace(connect_timeout_s=1.0)
        self.sent: list[Any] = []
        self.finished, self.stop, self.pauses = False, None, 0
        self.on_placement: Callable[[Placement | None], None] = lambda _placement: None

    def wait_for_placement(self, after: int) -> Placement:
        assert self.placement is not None
        return self.placement

    def pause(self, _seconds: float) -> None:
        self.pauses += 1
        assert self.pauses < 100, "it asks for ever"
        if self.placements:
            self.placement = self.placements.pop(0)

    def set_phase(self, name: str, since: float | None = None) -> None:
        """Ignore it."""

    def raise_if_ended(self) -> None:
        """Go on."""

    def overdue(self) -> bool:
        return False

    def send(self, message: Any) -> None:
        self.sent.append(message)


class Stage:
    def __init__(self) -> None:
        self.servers = Servers()
        self.session = FakeSession(self.servers)
        session: Any = self.session
        self.client = ServerClient(session)


@pytest.fixture
def stage() -> Iterator[Stage]:
    made = Stage()
    yield made
    made.client.close()
    made.servers.close()


def test_ticket_is_requested_from_the_ledger_with_the_finished_one(stage: Stage) -> None:
    stage.servers.answer = lambda _server, _call: ServerReply("granted", granted=GRANTED, number=3)
    reply = stage.client.request_ticket(Ticket(0, 4, 8), 1.5)
    assert reply.granted == GRANTED
    assert stage.servers.calls == [("s0", TicketRequest(1, 3, Ticket(0, 4, 8), 1.5, True))]


def test_trainer_that_has_to_wait_asks_again_without_its_finished_ticket(stage: Stage) -> None:
    replies = iter([ServerReply("wait", reason="bound", whom=("t9",)), ServerReply("over")])
    seen: list[tuple[str, ...]] = []

    def answer(_server: str, _call: Any) -> ServerReply:
        seen.append(stage.client.waits_for)
        return next(replies)

    stage.servers.answer = answer
    assert stage.client.request_ticket(Ticket(0, 0, 4), 1.0).kind == "over"
    assert seen == [(), ("t9",)]
    assert stage.client.waits_for == ()
    assert [call.done for _, call in stage.servers.calls] == [Ticket(0, 0, 4), None]


def test_leaving_trainer_reports_its_ticket_and_does_not_wait(stage: Stage) -> None:
    stage.servers.answer = lambda _server, _call: ServerReply("wait")
    assert stage.client.request_ticket(Ticket(0, 0, 4), 1.0, wants=False).kind == "wait"
    assert len(stage.servers.calls) == 1


def test_every_part_is_pulled_from_its_primary_if_its_version_changed(stage: Stage) -> None:
    def answer(_server: str, call: Any) -> tuple[ServerReply, bytes]:
        return (ServerReply("same", version=5), b"") if call.part == 1 else (ServerReply("done", version=6), b"xy")

    stage.servers.answer = answer
    pulled = stage.client.pull({1: 5})
    assert pulled[1] == (5, None)
    assert pulled[2][0] == 6
    assert bytes(pulled[2][1] or b"") == b"xy"
    assert sorted(stage.servers.calls, key=lambda call: call[0]) == [
        ("s0", PullParameters(1, 1, 5)),
        ("s1", PullParameters(1, 2, -1)),
    ]


@pytest.mark.parametrize("kind", ["void", "stale", "refused"])
def test_ticket_that_a_server_rejects_is_abandoned(stage: Stage, kind: str) -> None:
    stage.servers.answer = lambda _server, _call: ServerReply(kind, reason="too old")
    with pytest.raises(TicketAbandoned, match="too old"):
        stage.client.push(GRANTED, 1, {1: (b"", [b"g"])})


def test_push_is_repeated_only_to_the_part_that_moved(stage: Stage) -> None:
    moved = replace(PLACEMENT, number=4, assignments=(*PLACEMENT.assignments[:2], PartAssignment("s0")))
    stage.session.placements = [moved]
    stage.servers.answer = lambda server, _call: ServerReply("moved" if server == "s1" else "done")
    stage.client.push(GRANTED, 1, {1: (b"", [b"g"]), 2: (b"", [b"h"])})
    pushes = [(server, call.part) for server, call in stage.servers.calls if isinstance(call, PushGradients)]
    assert sorted(pushes) == [("s0", 1), ("s0", 2), ("s1", 2)]


def test_server_out_of_reach_is_reported_once_and_replaced(stage: Stage) -> None:
    stage.servers.down.add("s1")
    replaced = replace(PLACEMENT, number=4, assignments=(*PLACEMENT.assignments[:2], PartAssignment("s0")))
    stage.session.placements = [PLACEMENT, PLACEMENT, replaced]
    stage.client.push(GRANTED, 1, {2: (b"", [b"g"])})
    assert [type(message) for message in stage.session.sent] == [messages.ServerUnreachableMsg]
    assert (stage.session.sent[0].server, stage.session.sent[0].number) == ("s1", 3)


def test_server_that_hangs_up_is_called_again(stage: Stage) -> None:
    replies: Iterator[ServerReply | None] = iter([None, ServerReply("done")])
    stage.servers.answer = lambda _server, _call: next(replies)
    stage.client.push(GRANTED, 1, {1: (b"", [b"g"])})
    assert len(stage.servers.calls) == 2


def test_ticket_of_an_older_generation_is_abandoned(stage: Stage) -> None:
    stage.servers.down.update(("s0", "s1"))
    stage.session.placements = [replace(PLACEMENT, number=9, generation=2)]
    with pytest.raises(TicketAbandoned, match="checkpoint"):
        stage.client.push(GRANTED, 1, {1: (b"", [b"g"])})


def test_trainer_waits_for_the_placement_under_which_its_ticket_was_recorded(stage: Stage) -> None:
    stage.session.placements = [PLACEMENT, replace(PLACEMENT, number=7)]
    stage.servers.answer = lambda _server, _call: ServerReply("over", number=7)
    stage.client.request_ticket(None, 0.0)
    assert stage.client.placement is not None
    assert stage.client.placement.number == 7


def test_disconnect_tells_the_ledger_and_ignores_one_out_of_reach(stage: Stage) -> None:
    stage.client.disconnect()
    stage.client.pull({})
    assert rpc.Disconnect(1) in [call for _, call in stage.servers.calls]
    stage.client.close()
    stage.servers.down.update(("s0", "s1"))
    stage.client.disconnect()


def test_connection_to_a_replaced_server_is_closed(stage: Stage) -> None:
    stage.client.push(GRANTED, 1, {1: (b"", [b"g"])})
    ((_, sock),) = stage.client._socks.values()
    restarted = replace(PLACEMENT, servers=(replace(SEATS[0], incarnation="2"), SEATS[1]))
    stage.session.on_placement(PLACEMENT)
    stage.client.push(GRANTED, 1, {1: (b"", [b"g"])})
    stage.session.on_placement(restarted)
    assert sock.recv(1) == b""
