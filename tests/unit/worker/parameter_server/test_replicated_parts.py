"""Parts of a server: which it holds under a placement, and when an update counts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from shoal.core.data.sample_order import SampleOrder
from shoal.core.parameter_server.ticket_ledger import Ticket, TicketLedger
from shoal.core.placement import LEDGER, PartAssignment, Placement
from shoal.core.world import Address, Seat
from shoal.testing.wait import until
from shoal.wire import member_messages as messages
from shoal.worker.parameter_server import replicated_parts
from shoal.worker.parameter_server.replicated_parts import ReplicatedParts
from shoal.worker.parameter_server.rpc import PushGradients

SEATS = tuple(Seat(name, "1", Address("h", 1)) for name in ("s0", "s1"))
ALONE = Placement(3, 1, SEATS[:1], (PartAssignment("s0"), PartAssignment("s0")), fresh=True)
COPIED = Placement(4, 1, SEATS, (PartAssignment("s0", "s1"), PartAssignment("s0", "s1")))
PUSH = msgspec.msgpack.encode(PushGradients(1, 1, Ticket(0, 0, 4), 0, 0, 0, b""))


class FakeStore:
    """A shard store that counts the gradients it applied."""

    def __init__(self) -> None:
        self.applied, self.resets, self.broken = 0, 0, False

    def check(self, *_: Any) -> None:
        """Accept everything."""

    def apply(self, *_: Any) -> None:
        if self.broken:
            raise ZeroDivisionError
        self.applied += 1

    def version(self, _part: int) -> int:
        return self.applied

    def capture(self, _part: int) -> tuple[bytes, list[Any]]:
        return b"", [np.array([self.applied], np.uint8)]

    def install(self, _part: int, _header: bytes, buffers: Any) -> None:
        self.applied = int(buffers[0][0])

    def reset(self, _part: int) -> None:
        self.resets += 1
        self.applied = 0


class FakeReplica:
    """The sender to a replica, which acknowledges every update unless `failing` says why not."""

    failing = ""
    made: list[FakeReplica]

    def __init__(
        self, part: Any, seat: Seat, since: int, _number: int, complete: bool, _connect: Any, done: Any, lost: Any
    ) -> None:
        self.part, self.seat, self.since, self.complete = part, seat, since, complete
        self.failed, self.closed, self.updates = "", False, list[bytes]()
        self.report_complete, self.report_lost = done, lost
        FakeReplica.made.append(self)

    def start(self) -> None:
        self.part.replicas[self.seat.member] = self

    def put(self, update: bytes, _version: int, _body: Any) -> Any:
        self.updates.append(update)
        done = threading.Event()
        done.set()
        return SimpleNamespace(required=self.complete, done=done, failed=FakeReplica.failing)

    def close(self) -> None:
        self.closed = True


class Server:
    """The parts of server s0, and the messages that it sends."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.failures: list[Exception] = []
        self.store = FakeStore()
        session: Any = SimpleNamespace(me="s0", send=self.sent.append, fail=self.failures.append)
        order = SampleOrder(samples=32, size=8, epochs=1)
        store: Any = self.store
        self.parts = ReplicatedParts(session, store, order, TicketLedger(1))

    def commit(self) -> bool:
        part = self.parts._parts[1]
        with part.lock:
            return self.parts._commit(part, PUSH, memoryview(b""))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(replicated_parts, "ReplicaSender", FakeReplica)
    monkeypatch.setattr(FakeReplica, "made", [], raising=False)
    monkeypatch.setattr(FakeReplica, "failing", "")
    made = Server()
    yield made
    made.parts.close()


def test_server_holds_exactly_the_parts_of_its_placement(server: Server) -> None:
    assert not server.parts.holds_parts
    server.parts.adopt(ALONE)
    assert list(server.parts._parts) == [LEDGER, 1]
    assert server.store.resets == 1, "the script's own values are the first ones"
    moved = replace(ALONE, number=4, servers=SEATS, assignments=(PartAssignment("s1"), PartAssignment("s0")))
    shard = server.parts._parts[1]
    server.parts.adopt(moved)
    assert server.parts._parts == {1: shard}
    server.parts.adopt(None)
    assert (server.parts.holds_parts, shard.discarded) == (False, True)


def test_new_generation_starts_from_the_checkpoint(server: Server) -> None:
    server.parts.adopt(ALONE)
    assert server.commit()
    captured = {number: part.capture() for number, part in server.parts._parts.items()}
    server.parts.restore(captured)
    server.store.applied = 99
    server.parts.adopt(replace(ALONE, number=5, generation=2, fresh=False))
    assert server.store.applied == 1
    assert server.parts._primary_part(1, 1) is None, "the older generation is void"
    assert server.parts._primary_part(1, 2) is not None
    assert server.failures == []


def test_primary_without_its_part_fails_instead_of_inventing_one(server: Server) -> None:
    server.parts.adopt(replace(ALONE, fresh=False))
    assert [type(error) for error in server.failures] == [RuntimeError] * 2


def test_update_is_applied_here_and_on_the_backup(server: Server) -> None:
    server.parts.adopt(replace(COPIED, fresh=True))
    assert server.commit()
    assert server.store.applied == 1
    assert [replica.updates for replica in FakeReplica.made if replica.part.number == 1] == [[PUSH]]


def test_update_is_not_acknowledged_by_a_server_that_was_replaced(server: Server) -> None:
    server.parts.adopt(replace(COPIED, fresh=True))
    part = server.parts._parts[1]
    server.parts.adopt(replace(COPIED, number=5, assignments=(PartAssignment("s1"), PartAssignment("s1"))))
    with part.lock:
        assert not server.parts._commit(part, PUSH, memoryview(b""))
    assert server.store.applied == 0


def test_copy_with_an_update_that_the_backup_lacks_is_discarded_when_it_takes_over(server: Server) -> None:
    server.parts.adopt(replace(COPIED, fresh=True))
    FakeReplica.failing = "connection reset"
    part = server.parts._parts[1]
    results: list[bool] = []
    thread = threading.Thread(target=lambda: results.append(server.commit()), daemon=True)
    thread.start()
    until(lambda: bool(server.sent), "a report of the backup")
    assert server.sent[0] == messages.ServerUnreachableMsg("s1", 4, "connection reset")
    assert results == [], "nothing is acknowledged meanwhile"
    server.parts.adopt(replace(COPIED, number=5, assignments=(PartAssignment("s1"), PartAssignment("s1"))))
    thread.join(20.0)
    assert (results, part.discarded) == ([False], True)


def test_update_counts_without_the_backup_once_a_placement_says_so(server: Server) -> None:
    server.parts.adopt(replace(COPIED, fresh=True))
    FakeReplica.failing = "connection reset"
    results: list[bool] = []
    thread = threading.Thread(target=lambda: results.append(server.commit()), daemon=True)
    thread.start()
    until(lambda: bool(server.sent), "a report of the backup")
    server.parts.adopt(replace(ALONE, number=5, fresh=False))
    thread.join(20.0)
    assert results == [True]


def test_update_that_cannot_be_applied_ends_the_server(server: Server) -> None:
    server.parts.adopt(ALONE)
    server.store.broken = True
    with pytest.raises(ZeroDivisionError):
        server.commit()
    assert [type(error) for error in server.failures] == [ZeroDivisionError]


def test_replicas_that_are_no_longer_wanted_or_belong_to_another_process_are_closed(server: Server) -> None:
    server.parts.adopt(replace(COPIED, fresh=True))
    first = [replica for replica in FakeReplica.made if replica.part.number == 1]
    server.parts.adopt(replace(COPIED, number=5))
    assert not first[0].closed, "an equal placement keeps it"
    restarted = replace(SEATS[1], incarnation="2")
    server.parts.adopt(replace(COPIED, number=6, servers=(SEATS[0], restarted)))
    assert first[0].closed
    assert FakeReplica.made[-1].seat == restarted
    server.parts.adopt(replace(ALONE, number=7, fresh=False))
    assert all(replica.closed for replica in FakeReplica.made)


def test_part_that_is_handed_off_takes_no_updates_and_says_so(server: Server) -> None:
    server.parts.adopt(replace(COPIED, fresh=True))
    handing = tuple(replace(assignment, handing_off=True) for assignment in COPIED.assignments)
    server.parts.adopt(replace(COPIED, number=5, assignments=handing))
    until(lambda: len(server.sent) == 2, "both reports")
    assert set(server.sent) == {messages.PartReleasedMsg(0, 5), messages.PartReleasedMsg(1, 5)}
    assert server.parts._primary_part(1, 1) is None
    assert server.parts._primary_part(1, 1, even_released=True) is not None
    assert set(server.parts.unconfirmed()) == set(server.sent)
    server.parts.adopt(replace(COPIED, number=6))
    assert server.parts._primary_part(1, 1) is not None


def test_learner_that_has_its_copy_is_reported_until_it_is_the_backup(server: Server) -> None:
    learning = replace(
        ALONE, number=4, servers=SEATS, assignments=(PartAssignment("s0"), PartAssignment("s0", "", "s1", 4))
    )
    server.parts.adopt(learning)
    (replica,) = FakeReplica.made
    assert not replica.complete
    replica.complete = True
    replica.report_complete(replica.part, replica.seat, replica.since)
    assert server.sent == [messages.PartCopiedMsg(1, "s1", 4)] == server.parts.unconfirmed()
    server.parts.adopt(
        replace(learning, number=5, assignments=(PartAssignment("s0"), PartAssignment("s0", "s1", "", 4)))
    )
    assert server.parts.unconfirmed() == []
    assert not replica.closed
