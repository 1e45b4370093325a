"""Servers in one process, over real sockets: what is acknowledged is on the backup, and counts once."""

from __future__ import annotations

import socket
import threading
import time
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
from shoal.wire import member_messages as messages
from shoal.wire.protocol import Message
from shoal.worker.parameter_server import rpc
from shoal.worker.parameter_server.rpc import PullParameters, PushGradients, ServerCall, ServerReply, TicketRequest
from shoal.worker.parameter_server.server import ParameterServer
from shoal.worker.transport.handshake import CALL
from shoal.worker.transport.peers import Peers

pytestmark = [pytest.mark.process, pytest.mark.timeout(60)]

ORDER = SampleOrder(samples=64, size=8)


class Counting:
    """A vault that only counts."""

    def __init__(self) -> None:
        self.sums = {1: np.zeros(1), 2: np.zeros(1)}

    def apply(self, part: int, how: bytes, samples: int, body: memoryview) -> None:
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
    """One member: a port, and what it told the coordinator."""

    def __init__(self, name: str, bound: int | None = 1) -> None:
        self.me, self.said = name, list[Message]()
        self.settings = SimpleNamespace(connect_timeout_s=2.0, lease_s=1.0)
        self.peers = Peers(b"token", "run", name, "1", "127.0.0.1")
        self.failed: list[Exception] = []
        self.fail = self.failed.append
        self.vault = Counting()
        self.server = ParameterServer(self, self.vault, ORDER, TicketLedger(bound))  # type: ignore[arg-type]
        self._socks: dict[str, socket.socket] = {}

    def say(self, message: Message) -> None:
        self.said.append(message)

    @property
    def seat(self) -> Seat:
        return Seat(self.me, "1", self.peers.address)

    def ask(self, other: Peer, call: ServerCall, body: bytes = b"", within_s: float = 10.0) -> ServerReply:
        sock = self._socks.get(other.me)
        if sock is None:
            sock = self._socks[other.me] = self.peers.connect(CALL, 1, other.seat, 2.0, threading.Event())
        sock.settimeout(within_s)
        rpc.send(sock, call, [body])
        return rpc.receive_answer(sock)[0]

    def hang_up(self) -> None:
        for sock in self._socks.values():
            sock.close()
        self._socks.clear()

    def close(self) -> None:
        self.hang_up()
        self.server.close()
        self.peers.close()


@pytest.fixture
def peers() -> Iterator[list[Peer]]:
    found = [Peer("a"), Peer("b"), Peer("t"), Peer("u")]
    yield found
    for peer in found:
        peer.close()
    assert not [error for peer in found for error in peer.failed]


def placed(number: int, holding: PartAssignment, *servers: Peer, life: int = 1) -> Placement:
    return Placement(number, life, tuple(peer.seat for peer in servers), (holding, holding, holding), fresh=True)


def not_fresh(server: Peer) -> Placement:
    return Placement(1, 1, (server.seat,), (PartAssignment(server.me),) * 3, fresh=False)


def until(ready: Any, within_s: float = 10.0) -> None:
    deadline = time.monotonic() + within_s
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def replicated(a: Peer, b: Peer) -> Placement:
    """Part by part on a, with a complete copy on b."""
    first = placed(1, PartAssignment("a", learner="b", since=1), a, b)
    for peer in (b, a):
        peer.server.adopt(first)
    until(lambda: sum(isinstance(m, messages.PartCopiedMsg) for m in a.said) == 3)
    second = placed(2, PartAssignment("a", "b", since=1), a, b)
    for peer in (b, a):
        peer.server.adopt(second)
    return second


def push(step: int, clock: int = 0, low: int = 0, part: int = 1, settled: int = 0) -> PushGradients:
    return PushGradients(1, part, Ticket(step, 0, 8), clock, low, settled, b"")


def test_a_push_that_comes_twice_counts_once(peers: list[Peer]) -> None:
    a, b, t, _ = peers
    replicated(a, b)
    for _ in range(3):
        assert t.ask(a, push(0)).kind == "done"
    assert (a.vault.sums[1], b.vault.sums[1]) == (8, 8)


def test_a_push_of_a_settled_batch_is_known_even_when_it_is_forgotten(peers: list[Peer]) -> None:
    a, b, t, _ = peers
    replicated(a, b)
    t.ask(a, push(0))
    t.ask(a, push(1, settled=1))
    assert t.ask(a, push(0)).kind == "done"
    assert a.vault.sums[1] == 16


def test_what_is_acknowledged_is_known_to_the_backup_that_takes_over(peers: list[Peer]) -> None:
    a, b, t, u = peers
    replicated(a, b)
    t.ask(a, push(0))
    b.server.adopt(placed(3, PartAssignment("b"), b))
    assert u.ask(b, push(0)).kind == "done"
    assert b.vault.sums[1] == 8
    assert u.ask(b, push(1)).kind == "done"
    assert b.vault.sums[1] == 16


def test_a_primary_that_was_replaced_can_acknowledge_nothing(peers: list[Peer]) -> None:
    a, b, t, _ = peers
    replicated(a, b)
    b.server.adopt(placed(3, PartAssignment("b"), b))
    with pytest.raises(TimeoutError):
        t.ask(a, push(0), within_s=1.0)
    until(lambda: any(isinstance(m, messages.ServerUnreachableMsg) for m in a.said))
    assert b.vault.sums[1] == 0


def test_a_primary_goes_on_alone_when_the_coordinator_says_so(peers: list[Peer]) -> None:
    a, b, t, _ = peers
    replicated(a, b)
    b.close()
    asked = threading.Thread(target=t.ask, args=(a, push(0)))
    asked.start()
    until(lambda: any(isinstance(m, messages.ServerUnreachableMsg) for m in a.said))
    assert asked.is_alive(), "it was acknowledged before the coordinator knew that there is no backup"
    a.server.adopt(placed(3, PartAssignment("a"), a))
    asked.join(5)
    assert not asked.is_alive()
    assert a.vault.sums[1] == 8


def test_a_gradient_that_is_older_than_the_bound_allows_is_refused(peers: list[Peer]) -> None:
    a, b, t, u = peers
    replicated(a, b)
    assert t.ask(a, push(0, clock=5, low=4)).kind == "done"
    assert u.ask(a, push(1, clock=3)).kind == "stale"
    assert u.ask(a, push(2, clock=4)).kind == "done"


def test_a_server_that_rests_answers_reads_only(peers: list[Peer]) -> None:
    a, b, t, _ = peers
    replicated(a, b)
    t.ask(a, push(0))
    handing = placed(3, PartAssignment("a", "b", since=1, handing_off=True), a, b)
    a.server.adopt(handing)
    until(lambda: sum(isinstance(m, messages.PartReleasedMsg) for m in a.said) == 3)
    assert t.ask(a, push(1)).kind == "moved"
    assert t.ask(a, PullParameters(1, 1, -1)).version == 8
    swapped = placed(4, PartAssignment("b", "a", since=1), a, b)
    for peer in (a, b):
        peer.server.adopt(swapped)
    assert t.ask(b, push(1)).kind == "done"
    assert (a.vault.sums[1], b.vault.sums[1]) == (16, 16)


def test_what_a_coordinator_that_was_away_has_missed_is_said_again(peers: list[Peer]) -> None:
    a, b, _, _ = peers
    first = placed(1, PartAssignment("a", learner="b", since=1), a, b)
    for peer in (b, a):
        peer.server.adopt(first)
    until(lambda: sum(isinstance(m, messages.PartCopiedMsg) for m in a.said) == 3)
    assert a.server.outstanding() == [messages.PartCopiedMsg(part, "b", 1) for part in range(3)]
    a.server.adopt(placed(2, PartAssignment("a", "b", since=1), a, b))
    assert a.server.outstanding() == []
    a.server.adopt(placed(3, PartAssignment("a", "b", since=1, handing_off=True), a, b))
    until(lambda: len(a.server.outstanding()) == 3)
    assert a.server.outstanding() == [messages.PartReleasedMsg(part, 3) for part in range(3)]


def test_a_server_makes_nothing_up(peers: list[Peer]) -> None:
    a, *_ = peers
    a.server.adopt(not_fresh(a))
    assert len(a.failed) == 3
    a.failed.clear()


def test_a_trainer_that_is_not_connected_for_a_lease_is_dropped_and_its_ticket_comes_again(peers: list[Peer]) -> None:
    a, b, t, u = peers
    replicated(a, b)
    held = t.ask(a, TicketRequest(1, 2, None, 0.0, True)).granted
    assert held is not None
    t.close()
    until(lambda: a.server.watch() or (a.server.ledger is not None and not a.server.ledger.trainers))
    found = u.ask(a, TicketRequest(1, 2, None, 0.0, True)).granted
    assert found is not None
    assert found.ticket == held.ticket
    assert b.server.ledger == a.server.ledger


def test_a_trainer_that_connects_anew_keeps_its_ticket(peers: list[Peer]) -> None:
    a, b, t, u = peers
    a.settings.lease_s = 60.0
    replicated(a, b)
    held = t.ask(a, TicketRequest(1, 2, None, 0.0, True)).granted
    assert held is not None
    t.hang_up()
    until(lambda: not a.server.connected("t", "1"))
    a.server.watch()
    other = u.ask(a, TicketRequest(1, 2, None, 0.0, True)).granted
    assert other is not None
    assert other.ticket != held.ticket, "it was given to somebody else"
    assert t.ask(a, TicketRequest(1, 2, None, 0.0, True)).granted == held


def test_whoever_waits_hears_for_whom(peers: list[Peer]) -> None:
    a, b, t, u = peers
    replicated(a, b)
    for peer in (t, u):
        assert peer.ask(a, TicketRequest(1, 2, None, 0.0, True)).kind == "granted"
    answer = ServerReply("")
    while answer.kind != "wait":
        granted = t.ask(a, TicketRequest(1, 2, None, 0.0, True)).granted
        assert granted is not None
        answer = t.ask(a, TicketRequest(1, 2, granted.ticket, 1.0, True))
    assert answer.whom == ("u",)
    assert "ahead of u" in answer.reason


def test_nobody_is_told_that_all_is_over_before_the_end_is_written(peers: list[Peer]) -> None:
    a, _, t, _ = peers
    a.server.adopt(placed(1, PartAssignment("a"), a))
    a.server.sealed = False
    answer = t.ask(a, TicketRequest(1, 1, None, 0.0, True))
    while answer.granted is not None:
        answer = t.ask(a, TicketRequest(1, 1, answer.granted.ticket, 1.0, True))
    assert (answer.kind, answer.reason) == ("wait", "the last checkpoint is written")
    a.server.sealed = True
    answer = t.ask(a, TicketRequest(1, 1, None, 0.0, True))
    assert (answer.kind, answer.finished_samples) == ("over", 64)


def test_an_earlier_life_is_void(peers: list[Peer]) -> None:
    a, _, t, _ = peers
    a.server.adopt(placed(1, PartAssignment("a"), a))
    t.ask(a, push(0))
    a.server.adopt(placed(2, PartAssignment("a"), a, life=2))
    assert t.ask(a, push(1)).kind == "void"
    assert a.vault.sums[1] == 0


def test_a_copy_for_a_checkpoint_can_be_gone_on_from(peers: list[Peer]) -> None:
    a, b, t, _ = peers
    replicated(a, b)
    granted = t.ask(a, TicketRequest(1, 2, None, 0.0, True)).granted
    assert granted is not None
    t.ask(a, push(granted.ticket.step))
    found = a.server.gather()
    assert found is not None
    saved = msgspec.msgpack.decode(found[0][0], type=TicketLedger)
    assert saved.returned == (granted.ticket,), "it was not finished, so it comes again"
    b.server.restore(found)
    b.server.adopt(placed(9, PartAssignment("b"), b, life=2))
    again = msgspec.structs.replace(push(granted.ticket.step), life=2)
    assert t.ask(b, again).kind == "done"
    assert b.vault.sums[1] == 8, "the shard knew that it has it"


def test_a_copy_made_while_a_checkpoint_is_gathered_does_not_remember_tickets_for_ever(peers: list[Peer]) -> None:
    a, b, t, _ = peers
    first = placed(1, PartAssignment("a"), a, b)
    second = placed(2, PartAssignment("a", learner="b", since=2), a, b)
    a.server.adopt(first)
    whole = a.server._copy_of

    def while_somebody_joins(number: int, placement: Placement) -> Any:
        for peer in (b, a):
            peer.server.adopt(second)
        until(lambda: sum(isinstance(m, messages.PartCopiedMsg) for m in a.said) == 3)
        a.server._copy_of = whole  # type: ignore[method-assign]
        return whole(number, placement)

    a.server._copy_of = while_somebody_joins  # type: ignore[method-assign]
    assert a.server.gather() is not None
    assert t.ask(a, TicketRequest(1, 2, None, 0.0, True)).kind == "granted"
    assert b.server.ledger == a.server.ledger
    assert b.server.ledger is not None
    assert b.server.ledger.open_at_checkpoint is None
