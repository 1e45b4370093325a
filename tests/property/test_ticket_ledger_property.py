"""Trainers join, leave, die and wake up in any order: the bound holds, and each shard gets each sample exactly once."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shoal.core.data.sample_order import SampleOrder
from shoal.core.parameter_server import ticket_ledger
from shoal.core.parameter_server.ticket_ledger import (
    Ticket,
    TicketDelayed,
    TicketGranted,
    TicketLedger,
    TicketsExhausted,
)

NAMES = st.sampled_from(["a", "b", "c"])
SHARDS = 2


class Trainers(RuleBasedStateMachine):
    """A ledger, shards that take each ticket in once, and trainers that may die between any two messages."""

    @initialize(
        bound=st.sampled_from([None, 0, 1, 3]),
        policy=st.sampled_from(["time", "staleness", "equal"]),
        samples=st.integers(7, 40),
        size=st.integers(2, 7),
        last=st.sampled_from(["keep", "drop"]),
    )
    def start(self, bound: int | None, policy: ticket_ledger.Policy, samples: int, size: int, last: str) -> None:
        self.order = SampleOrder(samples, size, epochs=2, last=last)  # type: ignore[arg-type]
        self.ledger = TicketLedger(bound, policy)
        self.events: list[tuple] = []
        self.sessions: dict[str, int] = {}
        self.begun: dict[tuple[str, int], TicketGranted] = {}
        self.pushed: dict[tuple[str, int], set[int]] = {}
        self.shards: list[dict[tuple[int, int], Ticket]] = [{} for _ in range(SHARDS)]
        self.saved: tuple[TicketLedger, list[dict[tuple[int, int], Ticket]]] | None = None

    def call(self, name: str, done: Ticket | None, seconds: float, wants: bool) -> ticket_ledger.Outcome:
        session = str(self.sessions[name])
        self.events.append(("turn", name, session, done, seconds, wants))
        self.ledger = ticket_ledger.join(self.ledger, name, session)
        before = self.ledger
        self.ledger, outcome = ticket_ledger.advance(self.ledger, self.order, name, session, done, seconds, wants)
        if (
            isinstance(outcome, TicketGranted)
            and before.trainers[name].ticket is None
            and self.ledger.bound is not None
        ):
            others = [t.clock for t in self.ledger.trainers.values()]
            assert outcome.clock - min(others) <= self.ledger.bound
        return outcome

    @rule(name=NAMES)
    def begin(self, name: str) -> None:
        key = (name, self.sessions.setdefault(name, 1))
        if key not in self.begun:
            outcome = self.call(name, None, 0.0, True)
            if isinstance(outcome, TicketGranted):
                self.begun[key], self.pushed[key] = outcome, set()
            elif isinstance(outcome, TicketDelayed):
                assert outcome.waits_for, "a delayed trainer learns which trainers it waits for"
                assert name not in outcome.waits_for

    @precondition(lambda self: self.begun)
    @rule(data=st.data(), shard=st.integers(0, SHARDS - 1))
    def push(self, data: st.DataObject, shard: int) -> None:
        """Also by a process that was given up and does not know it."""
        key = data.draw(st.sampled_from(sorted(self.begun)))
        granted = self.begun[key]
        self.shards[shard].setdefault(granted.ticket.key, granted.ticket)
        self.pushed[key].add(shard)

    @precondition(lambda self: any(len(shards) == SHARDS for shards in self.pushed.values()))
    @rule(data=st.data(), seconds=st.floats(0.001, 10.0))
    def finish(self, data: st.DataObject, seconds: float) -> None:
        key = data.draw(st.sampled_from(sorted(k for k, shards in self.pushed.items() if len(shards) == SHARDS)))
        granted = self.begun.pop(key)
        del self.pushed[key]
        if self.sessions.get(key[0]) == key[1]:
            self.call(key[0], granted.ticket, seconds, False)

    @rule(name=NAMES)
    def give_up(self, name: str) -> None:
        """The ledger drops a trainer, which may live on and still push."""
        if name in self.sessions:
            self.events.append(("drop", name, str(self.sessions[name])))
            self.ledger = ticket_ledger.remove(self.ledger, name, str(self.sessions[name]))

    @rule(name=NAMES)
    def die(self, name: str) -> None:
        """Another process takes the name."""
        self.give_up(name)
        self.sessions[name] = self.sessions.get(name, 0) + 1

    @rule()
    def checkpoint(self) -> None:
        """Copy the shards one after another while training continues."""
        if self.ledger.open_at_checkpoint is None:
            self.ledger = ticket_ledger.begin_checkpoint(self.ledger)
            self.copies: list[dict[tuple[int, int], Ticket]] = []
        elif len(self.copies) < SHARDS:
            self.copies.append(dict(self.shards[len(self.copies)]))
        else:
            from dataclasses import replace

            self.saved = (ticket_ledger.at_checkpoint(self.ledger), self.copies)
            self.ledger = replace(self.ledger, open_at_checkpoint=None)

    @precondition(lambda self: self.saved is not None)
    @rule()
    def go_back(self) -> None:
        """All is lost but the checkpoint; the remaining trainers are in a new generation."""
        assert self.saved is not None
        self.ledger, self.shards = self.saved[0], [dict(shard) for shard in self.saved[1]]
        self.events = []
        self.base = self.ledger
        self.begun.clear()
        self.pushed.clear()
        self.sessions = {name: session + 1 for name, session in self.sessions.items()}

    @invariant()
    def no_sample_is_in_two_tickets(self) -> None:
        for shard in getattr(self, "shards", []):
            seen = [(t.step, i) for t in shard.values() for i in range(t.start, t.stop)]
            assert len(seen) == len(set(seen))

    def teardown(self) -> None:
        """Let one trainer finish the rest."""
        if not hasattr(self, "order"):
            return
        for name in list(self.ledger.trainers):
            self.ledger = ticket_ledger.remove(self.ledger, name, self.ledger.trainers[name].session)
        self.sessions["z"] = 1
        done: Ticket | None = None
        while not isinstance(outcome := self.call("z", done, 1.0, True), TicketsExhausted):
            assert isinstance(outcome, TicketGranted), f"a trainer that is alone waits: {outcome}"
            done = outcome.ticket
            for shard in self.shards:
                shard.setdefault(done.key, done)
        total = sum(self.order.size_of(step) for step in range(self.order.total_steps))
        assert outcome.finished_samples == total
        for shard in self.shards:
            seen = sorted((t.step, i) for t in shard.values() for i in range(t.start, t.stop))
            assert seen == [(s, i) for s in range(self.order.total_steps) for i in range(self.order.size_of(s))]


TestTrainers = Trainers.TestCase
TestTrainers.settings = settings(max_examples=60, stateful_step_count=60)
