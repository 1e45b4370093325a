"""A trainer's loop over tickets, without servers and without a framework."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from shoal.core.data.sample_order import SampleOrder
from shoal.core.parameter_server.ticket_ledger import Ticket, TicketGranted
from shoal.core.placement import PartAssignment, Placement
from shoal.errors import UnsupportedWithServers
from shoal.settings import RunSettings
from shoal.worker.data.feed import MicroBatch
from shoal.worker.parameter_server import ticket_loop
from shoal.worker.parameter_server.client import TicketAbandoned
from shoal.worker.parameter_server.rpc import ServerReply
from shoal.worker.parameter_server.ticket_loop import TicketLoop

ORDER = SampleOrder(samples=16, size=8, epochs=2)
PLACEMENT = Placement(3, 1, (), (PartAssignment("s0"), PartAssignment("s0"), PartAssignment("s0")))
OVER = ServerReply("over", finished_samples=32)


class Left(Exception):  # noqa: N818
    """The member leaves."""


class FakeClient:
    """The servers; `replies` are what they answer to requests, an exception is raised."""

    def __init__(self, _session: Any) -> None:
        self.replies: list[Any] = []
        self.requests: list[tuple[Ticket | None, bool]] = []
        self.pulls: list[dict[int, int]] = []
        self.pushes: list[tuple[Ticket, int]] = []
        self.push_error: Exception | None = None
        self.generation, self.waits_for = 1, ("t9",)
        self.disconnected = self.closed = False

    def wait_for_servers(self) -> Placement:
        return Placement(3, self.generation, (), PLACEMENT.assignments)

    def request_ticket(self, done: Ticket | None, _seconds: float, wants: bool = True) -> ServerReply:
        self.requests.append((done, wants))
        reply = self.replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        assert isinstance(reply, ServerReply)
        return reply

    def pull(self, versions: dict[int, int]) -> dict[int, tuple[int, memoryview | None]]:
        self.pulls.append(dict(versions))
        return {1: (4, memoryview(b"w")), 2: (versions.get(2, 0), None)}

    def push(self, granted: TicketGranted, generation: int, _gradients: Any) -> None:
        self.pushes.append((granted.ticket, generation))
        if self.push_error is not None:
            raise self.push_error

    def disconnect(self) -> None:
        self.disconnected = True

    def close(self) -> None:
        self.closed = True


class FakeSession:
    me, is_server, leaving, micro_batch = "t0", False, "", 0

    def __init__(self) -> None:
        self.settings = RunSettings(sync="stale:2", servers=2)
        self.stop: Any = None
        self.step, self.done = 0, list[int]()
        self.status: Any = dict

    def set_phase(self, name: str) -> None:
        """Ignore it."""

    def report_done(self, step: int) -> None:
        self.done.append(step)

    def raise_if_ended(self) -> None:
        raise Left

    def report_adjustment(self, *_: Any, **__: Any) -> None:
        """Ignore it."""


class FakeFeed:
    """Two micro-batches for every ticket."""

    order, total, micro_batch_size = ORDER, 4, 4

    def read_span(self, step: int, start: int, stop: int) -> list[MicroBatch]:
        half = (stop - start) // 2
        return [MicroBatch((step, start), half), MicroBatch((step, start + half), half)]

    def limit_micro_batch(self, *_: Any) -> None:
        """Ignore it."""

    def halve_micro_batch(self, samples: int) -> bool:
        return samples > 1


class Loop(TicketLoop):
    """A trainer that pushes after its last micro-batch, as a framework's trainer does."""

    def __init__(self, session: Any) -> None:
        state: Any = None
        super().__init__(session, state)
        self.assigned, self.loaded, self.seeds, self.ended = list[int](), list[int](), list[int](), 0
        self.client: Any = self._client

    def _shard_store(self, order: SampleOrder, parts: int) -> Any:
        raise AssertionError("this is a trainer")

    def _assign_parts(self, parts: int) -> None:
        self.assigned.append(parts)

    def _load_part(self, part: int, body: memoryview) -> None:
        self.loaded.append(part)

    def _gradients(self, current: Any) -> Any:
        return {}

    def _seed(self, seed: int) -> None:
        self.seeds.append(seed)

    def _check_micro_batch(self, current: Any, number: int) -> None:
        if current.on_last_micro_batch:
            current.weight, current.loss = 1.0, 0.5
            self._push(current)

    def _end_ticket(self, current: Any) -> None:
        self.ended += 1

    def run(self) -> list[Any]:
        return list(self._tickets(self.feed, seed=3))  # type: ignore[arg-type]


def granted(step: int, start: int = 0, stop: int = 8) -> ServerReply:
    ticket = TicketGranted(Ticket(step, start, stop), clock=5, min_clock=3, first_open_step=0, finished_samples=8)
    return ServerReply("granted", granted=ticket)


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Loop:
    monkeypatch.setattr(ticket_loop, "ServerClient", FakeClient)
    monkeypatch.setattr(ticket_loop, "limit_micro_batch", lambda *_: None)
    monkeypatch.setattr(ticket_loop, "report_smaller_micro_batches", lambda *_: None)
    made = Loop(FakeSession())
    feed: Any = FakeFeed()
    made.feed = feed
    return made


def test_finished_ticket_is_reported_with_the_request_for_the_next(loop: Loop) -> None:
    loop.client.replies = [granted(0), granted(1), OVER]
    assert loop.run() == [(0, 0), (0, 4), (1, 0), (1, 4)]
    assert loop.client.requests == [(None, True), (Ticket(0, 0, 8), True), (Ticket(1, 0, 8), True)]
    assert loop.client.pushes == [(Ticket(0, 0, 8), 1), (Ticket(1, 0, 8), 1)]
    session: Any = loop._session
    assert session.done == [4], "every step is finished"
    assert len(set(loop.seeds)) == 2, "each ticket has its own random numbers"


def test_only_changed_parts_are_loaded_and_versions_are_remembered(loop: Loop) -> None:
    loop.client.replies = [granted(0), granted(1), OVER]
    loop.run()
    assert (loop.assigned, loop.loaded) == ([3], [1, 1, 1])
    assert loop.client.pulls == [{}, {1: 4, 2: 0}, {1: 4, 2: 0}]


def test_versions_of_an_older_generation_are_forgotten(loop: Loop) -> None:
    loop.client.replies = [granted(0), OVER]
    batches = loop._tickets(loop.feed, seed=3)  # type: ignore[arg-type]
    next(batches)
    loop.client.generation = 2
    list(batches)
    assert loop.client.pulls == [{}, {}]


def test_abandoned_ticket_is_dropped_and_another_requested(loop: Loop) -> None:
    loop.client.replies = [granted(0), TicketAbandoned("void"), OVER]
    loop.client.push_error = TicketAbandoned("stale")
    loop.run()
    assert [done for done, _ in loop.client.requests] == [None, None, None]
    assert not loop.committed
    assert loop.current is not None
    assert loop.current.abandoned


def test_leaving_trainer_reports_its_last_ticket_and_disconnects(loop: Loop) -> None:
    loop.client.replies = [granted(0), ServerReply("wait")]
    batches = loop._tickets(loop.feed, seed=3)  # type: ignore[arg-type]
    next(batches)
    session: Any = loop._session
    session.stop = SimpleNamespace()
    with pytest.raises(Left):
        list(batches)
    assert loop.client.requests == [(None, True), (Ticket(0, 0, 8), False)]
    assert loop.client.disconnected


def test_ticket_that_runs_out_of_memory_is_computed_again_in_smaller_pieces(loop: Loop) -> None:
    loop.client.replies = [granted(0), granted(0), OVER]
    batches = loop._tickets(loop.feed, seed=3)  # type: ignore[arg-type]
    next(batches)
    assert loop.micro_batch_samples == 4
    loop.on_out_of_memory(MemoryError())
    assert list(batches) == [(0, 0), (0, 4)]
    assert len(loop.client.pushes) == 1
    assert loop.ended == 2
    with pytest.raises(MemoryError):
        loop.on_out_of_memory(MemoryError())


def test_heartbeat_shows_the_ticket_in_progress(loop: Loop) -> None:
    assert loop._status()["clock"] == 0
    loop.client.replies = [granted(1), OVER]
    loop.run()
    status = loop._status()
    assert (status["share"], status["clock"], status["ahead"], status["loss"]) == (8, 5, 2, 0.5)
    assert (status["waits_for"], status["total_steps"], status["epoch"]) == (("t9",), 4, 0)
    assert status["samples_per_s"] > 0.0


def test_exact_mode_and_streams_are_refused(loop: Loop) -> None:
    for feed in (SimpleNamespace(shard_range=object()), SimpleNamespace(shard_range=None)):
        with pytest.raises(UnsupportedWithServers, match="--sync stale:2"):
            next(loop.train(feed, "model", 0))  # type: ignore[arg-type]
