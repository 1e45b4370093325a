"""Servers in one process, over real sockets: an acknowledged update is on the backup, and counts once."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from shoal.core.data.sample_order import SampleOrder
from shoal.core.parameter_server.ticket_ledger import Ticket, TicketLedger
from shoal.core.placement import PartAssignment, Placement
from shoal.core.world import Seat
from shoal.testing.wait import until
from shoal.wire import member_messages as messages
from shoal.wire.protocol import Message
from shoal.worker.parameter_server import rpc
from shoal.worker.parameter_server.rpc import PullParameters, PushGradients, ServerCall, ServerReply, TicketRequest
from shoal.worker.parameter_server.server import ParameterServer
from shoal.worker.transport.handshake import CALL, COPY
from shoal.worker.transport.peers import Peers

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

ORDER = SampleOrder(samples=64, size=8)


class CountingStore:
    """A shard store whose parameters are the number of samples applied."""

    def __init__(self) -> None:
        self.sums = {1: np.zeros(1), 2: np.zeros(1)}

    def check(self, part: int, how: bytes, body: memoryview) -> None:
        if len(body):
            raise rpc.MalformedFrame("a push has no body here")

    def apply(self, part: int, how: bytes, samples: int, fraction: float, body: memoryview) -> None:
        self.sums[part] = self.sums[part] + samples

    def version(self, part: int) -> int:
        return int(self.sums[part][0])

    def parameters(self, part: int) -> list[Any]:
        return [self.sums[part].view(np.uint8)]

    def capture(self, part: int) -> tuple[bytes, list[Any]]:
        return b"", [self.sums[part].copy().view(np.uint8)]

    def install(self, part: int, header: bytes, buffers: Sequence[Any]) -> None:
        self.sums[part] = np.frombuffer(buffers[0], np.float64).copy()

    def reset(self, part: int) -> None:
        self.sums[part] = np.zeros(1)


class Peer:
    """One member with a server, and the messages that it sent to the coordinator."""

    def __init__(self, name: str, bound: int | None = 1) -> None:
        self.me, self.sent = name, list[Message]()
        self.settings = SimpleNamespace(connect_timeout_s=2.0, lease_s=1.0)
        self.peers = Peers(b"token", "run", name, "1", "127.0.0.1")
        self.failed: list[Exception] = []
        self.fail = self.failed.append
        self.store = CountingStore()
        self.server = ParameterServer(self, self.store, ORDER, TicketLedger(bound))  # type: ignore[arg-type]
        self._socks: dict[str, socket.socket] = {}

    def send(self, message: Message) -> None:
        self.sent.append(message)

    @property
    def seat(self) -> Seat:
        return Seat(self.me, "1", self.peers.address)

    def call(self, other: Peer, call: ServerCall, body: bytes = b"", within_s: float = 60.0) -> ServerReply:
        sock = self._socks.get(other.me)
        if sock is None:
            sock = self._socks[other.me] = self.peers.connect(CALL, 1, other.seat, 2.0, threading.Event())
        sock.settimeout(within_s)
        rpc.send(sock, call, [body])
        return rpc.receive_reply(sock)[0]

    def disconnect(self) -> None:
        for sock in self._socks.values():
            sock.close()
        self._socks.clear()

    def close(self) -> None:
        self.disconnect()
        self.server.close()
        self.peers.close()


@pytest.fixture
def peers() -> Iterator[list[Peer]]:
    made = [Peer("a"), Peer("b"), Peer("t"), Peer("u")]
    yield made
    for peer in made:
        peer.close()
    assert not [error for peer in made for error in peer.failed]


def placement(number: int, assignment: PartAssignment, *servers: Peer, generation: int = 1) -> Placement:
    """Return a placement that assigns the ledger and two shards alike."""
    return Placement(number, generation, tuple(peer.seat for peer in servers), (assignment,) * 3, fresh=True)


def later_placement(server: Peer) -> Placement:
    return Placement(1, 1, (server.seat,), (PartAssignment(server.me),) * 3, fresh=False)


def replicate(a: Peer, b: Peer) -> Placement:
    """Make a the primary of every part, with a complete copy on b."""
    first = placement(1, PartAssignment("a", learner="b", since=1), a, b)
    for peer in (b, a):
        peer.server.adopt(first)
    until(lambda: sum(isinstance(m, messages.PartCopiedMsg) for m in a.sent) == 3, "three complete copies")
    second = placement(2, PartAssignment("a", "b", since=1), a, b)
    for peer in (b, a):
        peer.server.adopt(second)
    return second


def push(step: int, clock: int = 0, low: int = 0, part: int = 1, settled: int = 0) -> PushGradients:
    return PushGradients(1, part, Ticket(step, 0, 8), clock, low, settled, b"")


def test_repeated_push_counts_once(peers: list[Peer]) -> None:
    a, b, t, _ = peers
    replicate(a, b)
    for _ in range(3):
        assert t.call(a, push(0)).kind == "done"
    assert (a.store.sums[1], b.store.sums[1]) == (8, 8)


def test_push_of_a_settled_step_is_recognised_after_its_ticket_is_forgotten(peers: list[Peer]) -> None:
    a, b, t, _ = peers
    replicate(a, b)
    t.call(a, push(0))
    t.call(a, push(1, settled=1))
    assert t.call(a, push(0)).kind == "done"
    assert a.store.sums[1] == 16


def test_acknowledged_push_is_known_to_the_backup_that_takes_over(peers: list[Peer]) -> None:
    a, b, t, u = peers
    replicate(a, b)
    t.call(a, push(0))
    b.server.adopt(placement(3, PartAssignment("b"), b))
    assert u.call(b, push(0)).kind == "done"
    assert b.store.sums[1] == 8
    assert u.call(b, push(1)).kind == "done"
    assert b.store.sums[1] == 16


def test_replaced_primary_cannot_acknowledge(peers: list[Peer]) -> None:
    a, b, t, _ = peers
    replicate(a, b)
    b.server.adopt(placement(3, PartAssignment("b"), b))
    with pytest.raises(TimeoutError):
        t.call(a, push(0), within_s=1.0)
    until(
        lambda: any(isinstance(m, messages.ServerUnreachableMsg) for m in a.sent), "a report of the unreachable backup"
    )
    assert b.store.sums[1] == 0


def test_primary_continues_alone_once_the_placement_has_no_backup(peers: list[Peer]) -> None:
    a, b, t, _ = peers
    replicate(a, b)
    b.close()
    pushing = threading.Thread(target=t.call, args=(a, push(0)))
    pushing.start()
    until(
        lambda: any(isinstance(m, messages.ServerUnreachableMsg) for m in a.sent), "a report of the unreachable backup"
    )
    assert pushing.is_alive(), "acknowledged before the placement said that there is no backup"
    a.server.adopt(placement(3, PartAssignment("a"), a))
    pushing.join(120)
    assert not pushing.is_alive()
    assert a.store.sums[1] == 8


def test_gradient_older_than_the_bound_is_refused(peers: list[Peer]) -> None:
    a, b, t, u = peers
    replicate(a, b)
    assert t.call(a, push(0, clock=5, low=4)).kind == "done"
    assert u.call(a, push(1, clock=3)).kind == "stale"
    assert u.call(a, push(2, clock=4)).kind == "done"


def test_released_part_replys_reads_only(peers: list[Peer]) -> None:
    a, b, t, _ = peers
    replicate(a, b)
    t.call(a, push(0))
    handing_off = placement(3, PartAssignment("a", "b", since=1, handing_off=True), a, b)
    a.server.adopt(handing_off)
    until(lambda: sum(isinstance(m, messages.PartReleasedMsg) for m in a.sent) == 3, "three released parts")
    assert t.call(a, push(1)).kind == "moved"
    assert t.call(a, PullParameters(1, 1, -1)).version == 8
    swapped = placement(4, PartAssignment("b", "a", since=1), a, b)
    for peer in (a, b):
        peer.server.adopt(swapped)
    assert t.call(b, push(1)).kind == "done"
    assert (a.store.sums[1], b.store.sums[1]) == (16, 16)


def test_unconfirmed_reports_are_kept_for_a_coordinator_that_was_down(peers: list[Peer]) -> None:
    a, b, _, _ = peers
    first = placement(1, PartAssignment("a", learner="b", since=1), a, b)
    for peer in (b, a):
        peer.server.adopt(first)
    until(lambda: sum(isinstance(m, messages.PartCopiedMsg) for m in a.sent) == 3, "three complete copies")
    assert a.server.unconfirmed() == [messages.PartCopiedMsg(part, "b", 1) for part in range(3)]
    a.server.adopt(placement(2, PartAssignment("a", "b", since=1), a, b))
    assert a.server.unconfirmed() == []
    a.server.adopt(placement(3, PartAssignment("a", "b", since=1, handing_off=True), a, b))
    until(lambda: len(a.server.unconfirmed()) == 3, "three released parts")
    assert a.server.unconfirmed() == [messages.PartReleasedMsg(part, 3) for part in range(3)]


def test_missing_part_is_an_error_unless_the_placement_is_fresh(peers: list[Peer]) -> None:
    a, *_ = peers
    a.server.adopt(later_placement(a))
    assert len(a.failed) == 3
    a.failed.clear()


def test_ticket_of_a_trainer_that_was_disconnected_for_a_lease_is_granted_again(peers: list[Peer]) -> None:
    a, b, t, u = peers
    replicate(a, b)
    first = t.call(a, TicketRequest(1, 2, None, 0.0, True)).granted
    assert first is not None
    t.close()

    def dropped() -> bool:
        a.server.drop_disconnected_trainers()
        return a.server.ledger is not None and not a.server.ledger.trainers

    until(dropped, "the trainer to be dropped")
    second = u.call(a, TicketRequest(1, 2, None, 0.0, True)).granted
    assert second is not None
    assert second.ticket == first.ticket
    assert b.server.ledger == a.server.ledger


def test_trainer_that_reconnects_keeps_its_ticket(peers: list[Peer]) -> None:
    a, b, t, u = peers
    a.settings.lease_s = 60.0
    replicate(a, b)
    first = t.call(a, TicketRequest(1, 2, None, 0.0, True)).granted
    assert first is not None
    t.disconnect()
    until(lambda: not a.server.is_connected("t", "1"), "the connection to close")
    a.server.drop_disconnected_trainers()
    other = u.call(a, TicketRequest(1, 2, None, 0.0, True)).granted
    assert other is not None
    assert other.ticket != first.ticket, "the ticket was granted to another trainer"
    assert t.call(a, TicketRequest(1, 2, None, 0.0, True)).granted == first


def test_waiting_trainer_learns_which_trainer_it_waits_for(peers: list[Peer]) -> None:
    a, b, t, u = peers
    replicate(a, b)
    for peer in (t, u):
        assert peer.call(a, TicketRequest(1, 2, None, 0.0, True)).kind == "granted"
    reply = ServerReply("")
    while reply.kind != "wait":
        granted = t.call(a, TicketRequest(1, 2, None, 0.0, True)).granted
        assert granted is not None
        reply = t.call(a, TicketRequest(1, 2, granted.ticket, 1.0, True))
    assert reply.whom == ("u",)
    assert "ahead of u" in reply.reason


def test_trainers_learn_of_the_end_after_the_last_checkpoint(peers: list[Peer]) -> None:
    a, _, t, _ = peers
    a.server.adopt(placement(1, PartAssignment("a"), a))
    a.server.may_end = False
    reply = t.call(a, TicketRequest(1, 1, None, 0.0, True))
    while reply.granted is not None:
        reply = t.call(a, TicketRequest(1, 1, reply.granted.ticket, 1.0, True))
    assert (reply.kind, reply.reason) == ("wait", "the last checkpoint is being written")
    a.server.may_end = True
    reply = t.call(a, TicketRequest(1, 1, None, 0.0, True))
    assert (reply.kind, reply.finished_samples) == ("over", 64)


def test_push_of_an_earlier_generation_is_void(peers: list[Peer]) -> None:
    a, _, t, _ = peers
    a.server.adopt(placement(1, PartAssignment("a"), a))
    t.call(a, push(0))
    a.server.adopt(placement(2, PartAssignment("a"), a, generation=2))
    assert t.call(a, push(1)).kind == "void"
    assert a.store.sums[1] == 0


def test_training_can_resume_from_a_gathered_state(peers: list[Peer]) -> None:
    a, b, t, _ = peers
    replicate(a, b)
    granted = t.call(a, TicketRequest(1, 2, None, 0.0, True)).granted
    assert granted is not None
    t.call(a, push(granted.ticket.step))
    parts = a.server.gather_state()
    assert parts is not None
    saved = msgspec.msgpack.decode(parts[0][0], type=TicketLedger)
    assert saved.returned == (granted.ticket,), "it was not finished, so it is granted again"
    b.server.restore(parts)
    b.server.adopt(placement(9, PartAssignment("b"), b, generation=2))
    again = msgspec.structs.replace(push(granted.ticket.step), generation=2)
    assert t.call(b, again).kind == "done"
    assert b.store.sums[1] == 8, "the shard knew that it contains the ticket"


def test_copy_made_during_a_checkpoint_does_not_keep_its_open_tickets(peers: list[Peer]) -> None:
    a, b, t, _ = peers
    first = placement(1, PartAssignment("a"), a, b)
    second = placement(2, PartAssignment("a", learner="b", since=2), a, b)
    a.server.adopt(first)
    copy_of = a.server._copy_of

    def copy_while_b_joins(number: int, current: Placement) -> Any:
        for peer in (b, a):
            peer.server.adopt(second)
        until(lambda: sum(isinstance(m, messages.PartCopiedMsg) for m in a.sent) == 3, "three complete copies")
        a.server._copy_of = copy_of  # type: ignore[method-assign]
        return copy_of(number, current)

    a.server._copy_of = copy_while_b_joins  # type: ignore[method-assign]
    assert a.server.gather_state() is not None
    assert t.call(a, TicketRequest(1, 2, None, 0.0, True)).kind == "granted"
    assert b.server.ledger == a.server.ledger
    assert b.server.ledger is not None
    assert b.server.ledger.open_at_checkpoint is None


PUSH = push(0)


@pytest.mark.parametrize(
    "frame",
    [
        b"GET / HTTP/1.1\r\n\r\n" + bytes(16),
        rpc._PREFIX.pack(rpc._MAGIC, 0xFFFFFFFF, 0),
        rpc._PREFIX.pack(rpc._MAGIC, 6, 1 << 62),
        rpc._PREFIX.pack(rpc._MAGIC, 6, 0) + b"\x81\xa4\xff\xff\xff\xff",
        rpc._PREFIX.pack(rpc._MAGIC, 3000, 0) + b"\x91" * 3000,
        msgspec.structs.replace(PUSH, part=1 << 60),
        msgspec.structs.replace(PUSH, settled=9),
        msgspec.structs.replace(PUSH, low=9),
        TicketRequest(1, 2, None, float("inf"), True),
        TicketRequest(1, 2, None, float("nan"), True),
        rpc.InstallReplica(1, 1, 2, 1, b"\xc1", ()),
        rpc.InstallReplica(1, 99, 2, 1, b"\xc1", ()),
        rpc.ReplicateUpdate(1, 1, 2, 1, b"\xc1"),
        rpc.ReplicateUpdate(1, 99, 2, 1, b"\xc1"),
    ],
    ids=lambda frame: type(frame).__name__,
)
@pytest.mark.parametrize("kind", [CALL, COPY])
def test_bad_frame_of_a_member_ends_its_connection_and_not_the_server(peers: list[Peer], frame: Any, kind: str) -> None:
    a, b, t, u = peers
    replicate(a, b)
    for server in (a, b):
        sender = a if kind == COPY else t  # the primary itself, so that its backup believes it
        with sender.peers.connect(kind, 77, server.seat, 10.0, threading.Event()) as sock:
            sock.settimeout(30.0)
            if isinstance(frame, bytes):
                sock.sendall(frame)
            else:
                rpc.send(sock, frame, [b"x"])
            try:
                reply, _ = rpc.receive_reply(sock)
            except OSError:
                continue  # the connection was closed
            assert reply.kind in ("moved", "refused", "wait", "granted")
    assert u.call(a, push(0)).kind == "done"
    assert (a.store.sums[1], b.store.sums[1]) == (8, 8)
    assert not a.failed + b.failed


def test_update_that_fails_halfway_ends_the_server(peers: list[Peer]) -> None:
    a, _, t, _ = peers
    a.server.adopt(placement(1, PartAssignment("a"), a))
    a.store.apply = lambda *_: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(ConnectionError):
        t.call(a, push(0))
    assert isinstance(a.failed.pop(), ZeroDivisionError)
