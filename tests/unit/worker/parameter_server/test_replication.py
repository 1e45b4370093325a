"""Replication of a part to another server, over a real socket."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from shoal.core.world import Address, Seat
from shoal.testing.wait import until
from shoal.worker.parameter_server import rpc
from shoal.worker.parameter_server.parts import ReplicatedPart
from shoal.worker.parameter_server.replication import MAX_BACKLOG, ReplicaSender
from shoal.worker.parameter_server.rpc import InstallReplica, ServerReply

SEAT = Seat("b", "1", Address("127.0.0.1", 1))


class Part(ReplicatedPart):
    """A part whose state is its version."""

    def check(self, update: bytes, body: memoryview) -> None:
        pass

    def apply(self, update: bytes, body: memoryview) -> None:
        self.version += 1

    def capture(self) -> tuple[bytes, list[Any]]:
        return b"%d" % self.version, []

    def install(self, meta: bytes, buffers: Sequence[Any]) -> None:
        self.version = int(meta)


class Replica:
    """The server at the other end: it acknowledges calls while `answers` is set."""

    def __init__(self, *, complete: bool = False) -> None:
        self.part = Part(1, 1)
        self.calls: list[Any] = []
        self.lost: list[str] = []
        self.completed: list[int] = []
        self.answers = threading.Event()
        self.answers.set()
        ours, self._theirs = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        self.sender = ReplicaSender(
            self.part,
            SEAT,
            7,
            3,
            complete,
            lambda _seat, _cancelled: ours,
            lambda _part, _seat, since: self.completed.append(since),
            lambda _part, _seat, cause: self.lost.append(cause),
        )

    def _serve(self) -> None:
        try:
            while True:
                call, _ = rpc.receive_call(self._theirs)
                self.answers.wait(60.0)
                self.calls.append(call)
                rpc.send(self._theirs, ServerReply("done"))
        except OSError:
            return

    def commit(self) -> Any:
        with self.part.lock:
            pending = self.sender.put(b"update", self.part.version + 1, memoryview(b"body"))
            self.part.apply(b"update", memoryview(b"body"))
        return pending

    def close(self) -> None:
        self.answers.set()
        self.sender.close()
        self._theirs.close()


@pytest.fixture
def replica() -> Iterator[Replica]:
    made = Replica()
    yield made
    made.close()


def test_learner_gets_a_copy_and_the_updates_since_and_then_counts(replica: Replica) -> None:
    replica.answers.clear()
    replica.part.version = 5
    replica.sender.start()
    until(lambda: "b" in replica.part.replicas, "the copy")
    pending = replica.commit()
    assert not pending.required, "an update waits for a copy that is not complete"
    replica.answers.set()
    until(lambda: replica.completed == [7], "the completion")
    install, update = replica.calls
    assert isinstance(install, InstallReplica)
    assert (install.version, install.meta, update.version) == (5, b"5", 6)
    assert replica.commit().required


def test_copy_completes_while_the_primary_holds_the_lock_of_the_part(replica: Replica) -> None:
    replica.sender.start()
    until(lambda: "b" in replica.part.replicas, "the copy")
    with replica.part.lock:
        until(lambda: replica.sender.complete, "the completion: its thread must not need the lock")


def test_learner_that_falls_behind_is_waited_for(replica: Replica) -> None:
    replica.answers.clear()
    replica.sender.start()
    until(lambda: "b" in replica.part.replicas, "the copy")
    updates = [replica.commit() for _ in range(MAX_BACKLOG + 1)]
    assert [pending.required for pending in updates] == [False] * MAX_BACKLOG + [True]
    replica.answers.set()
    assert updates[-1].done.wait(60.0)
    until(lambda: replica.sender.complete, "the completion")


def test_lost_replica_fails_every_update_and_is_reported(replica: Replica) -> None:
    replica.answers.clear()
    replica.sender.start()
    until(lambda: "b" in replica.part.replicas, "the copy")
    first = replica.commit()
    replica._theirs.shutdown(socket.SHUT_RDWR)
    assert first.done.wait(60.0)
    assert first.failed
    until(lambda: len(replica.lost) == 1, "the report")
    assert replica.commit().failed


def test_replica_that_is_no_longer_wanted_is_not_reported_as_lost() -> None:
    replica = Replica(complete=True)
    replica.sender.start()
    until(lambda: "b" in replica.part.replicas, "the connection")
    replica.answers.clear()
    pending = replica.commit()
    replica.close()
    assert pending.done.wait(60.0)
    replica.sender._thread.join(60.0)
    assert replica.lost == []
