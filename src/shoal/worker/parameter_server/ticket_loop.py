"""The training loop underneath a run whose parameters are held by servers, in any framework.

A trainer gets a ticket from the ledger, pulls the parameters, computes, and pushes its gradient. The optimizer works on
the servers. A server runs the same script up to its loop, and then serves. A framework's trainer adds how gradients
are computed, and what a server does with them.
"""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.core import sync_mode
from shoal.core.data.sample_order import SampleOrder
from shoal.core.parameter_server.ticket_ledger import Ticket, TicketGranted, TicketLedger
from shoal.errors import UnsupportedWithServers
from shoal.wire.member_messages import StepTimes
from shoal.worker.data.feed import Feed, IndexedFeed, MicroBatch
from shoal.worker.parameter_server.client import ServerClient, TicketAbandoned
from shoal.worker.parameter_server.parts import ShardStore
from shoal.worker.parameter_server.rpc import Raw
from shoal.worker.parameter_server.served_session import ServedSession
from shoal.worker.parameter_server.server_main import serve
from shoal.worker.training.loop import step_seed
from shoal.worker.training.metrics import finite_metrics
from shoal.worker.training.slowdown import slowdown_for
from shoal.worker.training.training_state import TrainingState


@dataclass(slots=True)
class TicketStep:
    """What this member does with one ticket, and how far it has come."""

    granted: TicketGranted
    life: int
    epoch: int
    micro_batches: list[MicroBatch]
    last_of_epoch: bool
    index: int = 0
    backwards: int = 0
    weight: float = 0.0
    loss: Any = 0.0
    committed: bool = False
    abandoned: bool = False
    scheduled: bool = False
    stepped: set[int] = field(default_factory=set)
    metrics: dict[str, Any] = field(default_factory=dict)
    started_at: float = 0.0
    seconds: float = 0.0
    data_s: float = 0.0
    compute_s: float = 0.0
    wait_s: float = 0.0
    exchange_s: float = 0.0

    @property
    def samples(self) -> int:
        return sum(micro_batch.samples for micro_batch in self.micro_batches)

    @property
    def on_last_micro_batch(self) -> bool:
        return self.index == len(self.micro_batches) - 1


class TicketLoop(ABC):
    """Does the tickets of one loop."""

    def __init__(self, session: ServedSession, training_state: TrainingState) -> None:
        self.feed: Feed | None = None
        self.current: TicketStep | None = None
        self.metrics: dict[str, Any] = {}
        self.looping = False
        self._session, self._training_state = session, training_state
        self._sync = sync_mode.parse(session.settings.sync)
        self._client = ServerClient(session) if not session.serves else None
        self._laid_out = False
        self._versions: dict[int, int] = {}
        self._life = 0
        self._slow = slowdown_for(session.me, session.settings.emulate)
        self._serving = False
        self._finished = 0
        self._loss: float | None = None
        self._usual_s = 0.0
        self._spent = dict.fromkeys(("data_s", "compute_s", "wait_s", "exchange_s"), 0.0)
        self._samples_per_s = 0.0
        session.status = self._status

    @property
    def committed(self) -> bool:
        return self.current is not None and self.current.committed

    def unsupported(self, what: str, do: str) -> UnsupportedWithServers:
        return UnsupportedWithServers(
            f"{what} cannot be used with --sync {self._sync.text}",
            why="servers apply gradients part by part as they arrive, and no process has all of a step's",
            do=f"{do}, or use --sync step",
        )

    # --- what a framework adds

    @abstractmethod
    def _shard_store(self, order: SampleOrder, parts: int) -> ShardStore:
        """What a server keeps, if the state is cut into so many parts."""

    @abstractmethod
    def _assign_parts(self, parts: int) -> None:
        """Find out what of the model is in which part."""

    @abstractmethod
    def _load_part(self, part: int, body: memoryview) -> None:
        """Put pulled parameters into the model."""

    @abstractmethod
    def _gradients(self, current: TicketStep) -> Mapping[int, tuple[bytes, Sequence[Raw]]]:
        """What to push to every part."""

    @abstractmethod
    def _seed(self, seed: int) -> None:
        """Let all random numbers start anew."""

    @abstractmethod
    def _check_micro_batch(self, current: TicketStep, number: int) -> None:
        """The loop's body is done with a piece: raise if it did not do what it should."""

    @abstractmethod
    def _end_ticket(self, current: TicketStep) -> None:
        """The loop's body is done with a ticket, which is pushed, or to be forgotten."""

    # --- the loop

    def train(self, feed: Feed, identity: str, seed: int) -> Iterator[Any]:
        """Yield this member's batches until every ticket is finished; a server never gets beyond this."""
        if feed.shard_range is not None:
            raise self.unsupported("exact mode", "leave exact out")
        if not isinstance(feed, IndexedFeed):
            raise self.unsupported("a stream of samples", "train on samples that can be read in any order")
        session, order = self._session, feed.order
        identity = f"{identity};sync={self._sync.text};servers={session.settings.servers}"
        if session.serves:
            self._serving = True
            vault = self._shard_store(order, 1 + session.settings.servers)
            ledger = TicketLedger(self._sync.bound, session.settings.ticket_sizing)
            raise serve(session, self._training_state, vault, order, ledger, identity)
        feed.start()
        session.begin(identity)
        over = False
        self.looping = True
        try:
            yield from self._tickets(feed, seed)
            over = True
        finally:
            self.looping = False
            assert self._client is not None
            if not over and sys.exc_info()[0] is GeneratorExit:
                self._client.bye()
                session.leave_loop()
            feed.close()
            self._client.close()

    def _tickets(self, feed: IndexedFeed, seed: int) -> Iterator[Any]:
        assert self._client is not None
        pusher, session, order = self._client, self._session, feed.order
        done: Ticket | None = None
        seconds = 0.0
        while True:
            if session.stop is not None or session.leaving:
                self._go(done, seconds)
            try:
                session.set_phase("ticket")
                life = pusher.wait_for_servers().generation
                asked_at = time.perf_counter()
                answer = pusher.turn(done, seconds)
                done = None
                wait_s = time.perf_counter() - asked_at
                self._pull(life)
                exchange_s = time.perf_counter() - asked_at - wait_s
            except TicketAbandoned:
                done = None
                continue
            self._finished = answer.finished_samples if answer.granted is None else answer.granted.finished_samples
            session.step = order.steps_within(self._finished)
            if answer.granted is None:
                session.done(session.step)
                return
            self._open(feed, answer.granted, life, wait_s, exchange_s)
            yield from self._give_out(seed)
            current = self.current
            if current is not None and current.committed:
                done, seconds = current.granted.ticket, current.seconds

    def _go(self, done: Ticket | None, seconds: float) -> None:
        """We were told to go: what is finished is said, and then we go."""
        assert self._client is not None
        try:
            if done is not None:
                self._client.turn(done, seconds, wants=False)
        except TicketAbandoned:
            pass
        self._client.bye()
        self._session.raise_if_over()

    def _pull(self, life: int) -> None:
        assert self._client is not None
        placement = self._client.wait_for_servers()
        if placement.generation != life:
            raise TicketAbandoned("the state went back to a checkpoint")
        if not self._laid_out:
            self._assign_parts(len(placement.assignments))
            self._laid_out = True
        if life != self._life:
            self._life, self._versions = life, {}
        self._session.set_phase("pull")
        for part, (version, body) in self._client.pull(self._versions).items():
            if body is not None:
                self._load_part(part, body)
            self._versions[part] = version

    def _open(self, feed: IndexedFeed, granted: TicketGranted, life: int, wait_s: float, exchange_s: float) -> None:
        """Read the data of a ticket."""
        ticket, order = granted.ticket, feed.order
        self._session.set_phase("data")
        began = time.perf_counter()
        if self._slow is not None:
            self._slow.begin(ticket.step)
        pieces = feed.read_span(ticket.step, ticket.start, ticket.stop)
        cursor = order.cursor(ticket.step)
        last = cursor.index == order.steps_per_epoch - 1 and ticket.stop == order.size_of(ticket.step)
        current = self.current = TicketStep(granted, life, cursor.epoch, pieces, last, started_at=began)
        current.wait_s, current.exchange_s, current.data_s = wait_s, exchange_s, time.perf_counter() - began

    def _give_out(self, seed: int) -> Iterator[Any]:
        """Give the loop's body the pieces of a ticket."""
        current = self.current
        assert current is not None
        ticket = current.granted.ticket
        self._seed(step_seed(seed, ticket.step, ticket.start))
        self._session.set_phase("compute")
        for number, piece in enumerate(current.micro_batches):
            current.index = number
            yield piece.batch
            if current.abandoned:
                break
            self._check_micro_batch(current, number)
        self._end_ticket(current)

    def _push(self, current: TicketStep) -> None:
        """All pieces are computed: give the servers the gradient."""
        assert self._client is not None
        current.seconds = time.perf_counter() - current.started_at
        current.compute_s = current.seconds - current.data_s
        self._session.set_phase("push")
        try:
            self._client.push(current.granted, current.life, self._gradients(current))
        except TicketAbandoned:
            current.abandoned = True
            return
        current.committed = True
        self.metrics.update(current.metrics)
        self._measure(current)

    # --- what does not fit into memory

    @property
    def micro_batch_samples(self) -> int:
        """The samples of the piece that is being computed; 0 outside a ticket."""
        current = self.current
        return current.micro_batches[current.index].samples if current is not None and not current.committed else 0

    def on_out_of_memory(self, error: BaseException) -> None:
        """The ledger gives the same ticket again to whoever holds it; it then comes in smaller pieces."""
        current = self.current
        if (
            current is None
            or self.feed is None
            or not self.feed.halve_micro_batch(current.micro_batches[current.index].samples)
        ):
            raise error
        current.abandoned = True

    # --- what beats tell

    def _measure(self, current: TicketStep) -> None:
        pushed_s = time.perf_counter() - current.started_at - current.seconds
        current.exchange_s += pushed_s
        took_s = max(current.wait_s + current.exchange_s + current.seconds, 1e-9)
        smooth = 0.9 if self._usual_s else 0.0
        self._usual_s = smooth * self._usual_s + (1 - smooth) * took_s
        for name in self._spent:
            self._spent[name] = smooth * self._spent[name] + (1 - smooth) * getattr(current, name)
        self._samples_per_s = smooth * self._samples_per_s + (1 - smooth) * current.samples / took_s
        self._loss = float(current.loss) / current.weight if current.weight else self._loss

    def _status(self) -> dict[str, Any]:
        current, feed = self.current, self.feed
        pusher = self._client
        return {
            "usual_step_s": self._usual_s,
            "epoch": current.epoch if current is not None else 0,
            "total_steps": feed.total if feed is not None else None,
            "share": current.samples if current is not None else 0,
            "loss": self._loss,
            "samples_per_s": self._samples_per_s,
            "metrics": finite_metrics(self.metrics),
            "spent": StepTimes(**self._spent),
            "clock": current.granted.clock if current is not None else 0,
            "ahead": current.granted.clock - current.granted.min_clock if current is not None else 0,
            "waits_for": pusher.waits_for if pusher is not None else (),
        }
