"""Trainer's loop in a run with parameter servers, independent of the framework.

A trainer gets a ticket (a slice of a global batch) from the ledger, pulls the parameters, computes, and pushes its
gradient; the optimizer runs on the servers. A finished ticket is reported together with the request for the next one. A
ticket that no longer counts (`TicketAbandoned`) is dropped, and the trainer simply asks for another. A server runs the
same script up to its loop and then serves. A framework's trainer adds how gradients are computed, and what a server
does with them.
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
from shoal.worker.parameter_server.client import ROLLED_BACK, ServerClient, TicketAbandoned
from shoal.worker.parameter_server.parts import ShardStore
from shoal.worker.parameter_server.rpc import Raw
from shoal.worker.parameter_server.served_session import ServedSession
from shoal.worker.parameter_server.server_main import serve
from shoal.worker.training.loop import (
    limit_micro_batch,
    report_if_out_of_memory,
    report_smaller_micro_batches,
    step_seed,
)
from shoal.worker.training.loop_exit import left_on_purpose
from shoal.worker.training.loss_monitor import LossMonitor
from shoal.worker.training.metrics import finite_metrics
from shoal.worker.training.slowdown import slowdown_for
from shoal.worker.training.training_state import TrainingState


@dataclass(slots=True)
class TicketStep:
    """One ticket in progress on this member.

    `abandoned` means that it no longer counts, `scheduled` that the script called its learning-rate scheduler after it.
    """

    granted: TicketGranted
    generation: int
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
    """Runs the tickets of one training loop; `current` is the ticket in progress or the last one.

    For `closing` see `Loop`.
    """

    def __init__(self, session: ServedSession, training_state: TrainingState) -> None:
        self.feed: Feed | None = None
        self.current: TicketStep | None = None
        self.metrics: dict[str, Any] = {}
        self.looping = self.closing = False
        self._session, self._training_state = session, training_state
        self._sync = sync_mode.parse(session.settings.sync)
        self._client = ServerClient(session) if not session.is_server else None
        self._parts_assigned = False
        self._versions: dict[int, int] = {}
        self._generation = 0
        self._loss_monitor = LossMonitor(session)
        self._slowdown = slowdown_for(session.me, session.settings.emulate)
        self._serving = False
        self._finished = 0
        self._loss: float | None = None
        self._usual_step_s = 0.0
        self._spent = dict.fromkeys(("data_s", "compute_s", "wait_s", "exchange_s"), 0.0)
        self._samples_per_s = 0.0
        session.status = self._status

    @property
    def committed(self) -> bool:
        return self.current is not None and self.current.committed

    def unsupported(self, what: str, do: str) -> UnsupportedWithServers:
        """Return the error for a feature that needs the whole gradient of a step in one process."""
        return UnsupportedWithServers(
            f"{what} cannot be used with --sync {self._sync.text}",
            why="servers apply gradients part by part as they arrive, so no process sees the whole gradient of a step",
            do=f"{do}, or use --sync step",
        )

    # --- hooks of the framework's trainer

    @abstractmethod
    def _shard_store(self, order: SampleOrder, parts: int) -> ShardStore:
        """Return the shard store of a server, for a state of `parts` parts."""

    @abstractmethod
    def _assign_parts(self, parts: int) -> None:
        """Assign the tensors of the model to `parts` parts."""

    @abstractmethod
    def _load_part(self, part: int, body: memoryview) -> None:
        """Copy pulled parameters into the model."""

    @abstractmethod
    def _gradients(self, current: TicketStep) -> Mapping[int, tuple[bytes, Sequence[Raw]]]:
        """Return what to push to each part: the layout of the bytes, and the bytes."""

    @abstractmethod
    def _seed(self, seed: int) -> None:
        """Seed every random generator."""

    @abstractmethod
    def _check_micro_batch(self, current: TicketStep, number: int) -> None:
        """Raise if the loop body skipped `backward` or `step` for this micro-batch."""

    @abstractmethod
    def _end_ticket(self, current: TicketStep) -> None:
        """Clean up after a ticket that was pushed or abandoned."""

    def _start_loop(self) -> None:  # noqa: B027
        """Set up what the loop needs; by default nothing."""

    def _end_loop(self) -> None:  # noqa: B027
        """Release what `_start_loop` took; by default nothing."""

    # --- the loop

    def train(self, feed: Feed, identity: str, seed: int) -> Iterator[Any]:
        """Yield this trainer's batches until every ticket is finished; in a server, serve and then raise MemberExit."""
        if feed.shard_range is not None:
            raise self.unsupported("exact mode", "leave exact out")
        if not isinstance(feed, IndexedFeed):
            raise self.unsupported("a stream of samples", "train on samples that can be read in any order")
        session, order = self._session, feed.order
        identity = f"{identity};sync={self._sync.text};servers={session.settings.servers}"
        if session.is_server:
            feed.close()  # its readers may have been started for the signatures of the data
            self._serving = True
            store = self._shard_store(order, 1 + session.settings.servers)
            ledger = TicketLedger(self._sync.bound, session.settings.ticket_sizing)
            raise serve(session, self._training_state, store, order, ledger, identity)
        self._start_loop()
        feed.start()
        session.begin(identity)
        session.on_uncaught = self._on_uncaught
        over = False
        self.looping = True
        try:
            yield from self._tickets(feed, seed)
            over = True
        finally:
            self.looping = False
            assert self._client is not None
            if not over and sys.exc_info()[0] is GeneratorExit and (self.closing or left_on_purpose()):
                self._client.disconnect()
                session.leave_loop()
            self._end_loop()
            feed.close()
            self._client.close()

    def _tickets(self, feed: IndexedFeed, seed: int) -> Iterator[Any]:
        """Request tickets and yield their micro-batches until every ticket is finished."""
        assert self._client is not None
        client, session, order = self._client, self._session, feed.order
        done: Ticket | None = None
        seconds = 0.0
        while True:
            if session.stop is not None or session.leaving:
                self._leave(done, seconds)
            try:
                session.set_phase("ticket")
                generation = client.wait_for_servers().generation
                requested_at = time.perf_counter()
                reply = client.request_ticket(done, seconds)
                done = None
                wait_s = time.perf_counter() - requested_at
                self._pull(generation)
                exchange_s = time.perf_counter() - requested_at - wait_s
            except TicketAbandoned:
                done = None
                continue
            self._finished = reply.finished_samples if reply.granted is None else reply.granted.finished_samples
            session.step = order.steps_within(self._finished)
            if reply.granted is None:
                session.report_done(session.step)
                return
            self._start_ticket(feed, reply.granted, generation, wait_s, exchange_s)
            yield from self._run_ticket(seed)
            current = self.current
            if current is not None and current.committed:
                done, seconds = current.granted.ticket, current.seconds

    def _leave(self, done: Ticket | None, seconds: float) -> None:
        """Report the finished ticket, if any, and leave the run by raising MemberExit."""
        assert self._client is not None
        try:
            if done is not None:
                self._client.request_ticket(done, seconds, wants=False)
        except TicketAbandoned:
            pass
        self._client.disconnect()
        self._session.raise_if_ended()

    def _pull(self, generation: int) -> None:
        """Load the parameters that have changed since the last pull."""
        assert self._client is not None
        placement = self._client.wait_for_servers()
        if placement.generation != generation:
            raise TicketAbandoned(ROLLED_BACK)
        if not self._parts_assigned:
            self._assign_parts(len(placement.assignments))
            self._parts_assigned = True
        if generation != self._generation:
            self._generation, self._versions = generation, {}
        self._session.set_phase("pull")
        for part, (version, body) in self._client.pull(self._versions).items():
            if body is not None:
                self._load_part(part, body)
            self._versions[part] = version

    def _start_ticket(
        self, feed: IndexedFeed, granted: TicketGranted, generation: int, wait_s: float, exchange_s: float
    ) -> None:
        """Read the data of a ticket and make it the current one."""
        ticket, order = granted.ticket, feed.order
        self._session.set_phase("data")
        began = time.perf_counter()
        if self._slowdown is not None:
            self._slowdown.begin(ticket.step)
        limit_micro_batch(feed, self._session)
        micro_batches = feed.read_span(ticket.step, ticket.start, ticket.stop)
        cursor = order.cursor(ticket.step)
        last = cursor.index == order.steps_per_epoch - 1 and ticket.stop == order.size_of(ticket.step)
        current = self.current = TicketStep(granted, generation, cursor.epoch, micro_batches, last, started_at=began)
        current.wait_s, current.exchange_s, current.data_s = wait_s, exchange_s, time.perf_counter() - began

    def _run_ticket(self, seed: int) -> Iterator[Any]:
        """Yield the micro-batches of the current ticket."""
        current = self.current
        assert current is not None
        ticket = current.granted.ticket
        self._seed(step_seed(seed, ticket.step, ticket.start))
        self._session.set_phase("compute")
        for index, micro_batch in enumerate(current.micro_batches):
            current.index = index
            yield micro_batch.batch
            if current.abandoned:
                break
            self._check_micro_batch(current, index)
        self._end_ticket(current)

    def _push(self, current: TicketStep) -> None:
        """Push the gradient, after the last micro-batch; mark the ticket as committed or abandoned."""
        assert self._client is not None
        current.seconds = time.perf_counter() - current.started_at
        current.compute_s = current.seconds - current.data_s
        self._session.set_phase("push")
        try:
            self._client.push(current.granted, current.generation, self._gradients(current))
        except TicketAbandoned:
            current.abandoned = True
            return
        current.committed = True
        self.metrics.update(current.metrics)
        self._measure(current)

    # --- out of memory

    @property
    def micro_batch_samples(self) -> int:
        """Samples of the micro-batch that is being computed; 0 outside a ticket."""
        current = self.current
        return current.micro_batches[current.index].samples if current is not None and not current.committed else 0

    def on_out_of_memory(self, error: BaseException) -> None:
        """Drop the ticket, which the ledger grants to this trainer again, and compute smaller micro-batches."""
        current, feed, samples = self.current, self.feed, self.micro_batch_samples
        if current is None or feed is None or not feed.halve_micro_batch(samples):
            raise error
        current.abandoned = True
        report_smaller_micro_batches(
            self._session, current.granted.ticket.step, samples, feed.micro_batch_size, "computes its ticket again"
        )

    def _on_uncaught(self, error: BaseException) -> None:
        step = self.current.granted.ticket.step if self.current is not None else 0
        report_if_out_of_memory(self._session, step, self.micro_batch_samples, error)

    # --- status

    def _measure(self, current: TicketStep) -> None:
        pushed_s = time.perf_counter() - current.started_at - current.seconds
        current.exchange_s += pushed_s
        took_s = max(current.wait_s + current.exchange_s + current.seconds, 1e-9)
        smooth = 0.9 if self._usual_step_s else 0.0
        self._usual_step_s = smooth * self._usual_step_s + (1 - smooth) * took_s
        for name in self._spent:
            self._spent[name] = smooth * self._spent[name] + (1 - smooth) * getattr(current, name)
        self._samples_per_s = smooth * self._samples_per_s + (1 - smooth) * current.samples / took_s
        self._loss = float(current.loss) / current.weight if current.weight else self._loss
        self._loss_monitor.observe(current.granted.ticket.step, self._loss)

    def _status(self) -> dict[str, Any]:
        """Return the fields of a heartbeat; called by the heartbeat's thread."""
        current, feed = self.current, self.feed
        return {
            "usual_step_s": self._usual_step_s,
            "epoch": current.epoch if current is not None else 0,
            "total_steps": feed.total if feed is not None else None,
            "share": current.samples if current is not None else 0,
            "loss": self._loss,
            "samples_per_s": self._samples_per_s,
            "metrics": finite_metrics(self.metrics),
            "spent": StepTimes(**self._spent),
            "clock": current.granted.clock if current is not None else 0,
            "ahead": current.granted.clock - current.granted.min_clock if current is not None else 0,
            "waits_for": self._client.waits_for if self._client is not None else (),
        }
