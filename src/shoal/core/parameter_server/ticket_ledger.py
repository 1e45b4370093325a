"""Who may compute what, when members do not wait for each other at every step: tickets and clocks.

A *ticket* is a span of one global batch. Each is issued once, and again only if whoever held it is gone, with the same
span: so the servers, which take in each ticket once, count each sample once. A trainer's *clock* is how many tickets it
has finished. With a bound K a trainer begins a ticket only if its clock is at most K ahead of the slowest; without one
nobody ever waits. Newcomers start at the clock of the slowest.

The ledger is a value; `turn`, `join` and `drop` are the only doors, and none knows of time or sockets. A server that
replays the same calls in the same order has the same ledger, which is how its backup keeps up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, Union

Policy = Literal["time", "staleness", "equal"]

SMOOTH = 0.7
LEAST_PART = 16
RATE_JUMP = 4.0
WEIGHT_STEP = 0.1
WEIGHT_LIMITS = (0.05, 20.0)


class BatchSizes(Protocol):
    """How many global batches there are, and how many samples each has: an `Order`."""

    @property
    def total_steps(self) -> int: ...

    def size_of(self, step: int) -> int: ...


@dataclass(frozen=True, slots=True, order=True)
class Ticket:
    """Samples start…stop of global batch `step`."""

    step: int
    start: int
    stop: int

    @property
    def samples(self) -> int:
        return self.stop - self.start

    @property
    def key(self) -> tuple[int, int]:
        return self.step, self.start


@dataclass(frozen=True, slots=True)
class TrainerClock:
    """One trainer as the ledger knows it. `rate` is its samples a second, 0 if not measured yet."""

    session: str
    clock: int
    ticket: Ticket | None = None
    rate: float = 0.0
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class TicketLedger:
    """Issued tickets and the clock of every trainer. The next new ticket begins at sample `at` of batch `step`.

    `again` are tickets whose holder is gone. `low` is the slowest clock that was ever waited for; it only grows.
    `marked` are the tickets that were not finished when a checkpoint began, and those issued since.
    """

    bound: int | None
    policy: Policy = "time"
    step: int = 0
    at: int = 0
    finished_samples: int = 0
    min_clock: int = 0
    trainers: Mapping[str, TrainerClock] = field(default_factory=dict)
    returned: tuple[Ticket, ...] = ()
    open_at_checkpoint: tuple[Ticket, ...] | None = None

    @property
    def first_open_step(self) -> int:
        """All tickets of the batches before this one are finished."""
        open_steps = [t.ticket.step for t in self.trainers.values() if t.ticket is not None]
        return min([self.step, *open_steps, *(t.step for t in self.returned)])


@dataclass(frozen=True, slots=True)
class TicketGranted:
    """Begin this ticket. `clock` is the trainer's, `low` the slowest of all, `behind` who that is."""

    ticket: Ticket
    clock: int
    min_clock: int
    first_open_step: int
    finished_samples: int
    behind: str = ""


@dataclass(frozen=True, slots=True)
class TicketDelayed:
    """Not yet: `waits_for` must come on first."""

    reason: str
    waits_for: tuple[str, ...]
    clock: int
    min_clock: int


@dataclass(frozen=True, slots=True)
class TicketsExhausted:
    """Every ticket is finished."""

    finished_samples: int


@dataclass(frozen=True, slots=True)
class TrainerUnknown:
    """This trainer is not, or no longer, in the ledger: it may join again."""


Outcome = Union[TicketGranted, TicketDelayed, TicketsExhausted, TrainerUnknown]


def join(ledger: TicketLedger, name: str, session: str) -> TicketLedger:
    """A trainer comes; one of the same name that was there before is gone."""
    known = ledger.trainers.get(name)
    if known is not None and known.session == session:
        return ledger
    if known is not None:
        ledger = remove(ledger, name, known.session)
    clock = min((t.clock for t in ledger.trainers.values()), default=ledger.min_clock)
    return replace(ledger, trainers={**ledger.trainers, name: TrainerClock(session, clock)})


def remove(ledger: TicketLedger, name: str, session: str) -> TicketLedger:
    """A trainer is gone: nobody waits for it any more, and its ticket is issued again."""
    known = ledger.trainers.get(name)
    if known is None or known.session != session:
        return ledger
    again = ledger.returned if known.ticket is None else tuple(sorted((*ledger.returned, known.ticket)))
    trainers = {other: t for other, t in ledger.trainers.items() if other != name}
    return _raised(replace(ledger, trainers=trainers, returned=again))


def advance(
    ledger: TicketLedger, sizes: BatchSizes, name: str, session: str, done: Ticket | None, seconds: float, wants: bool
) -> tuple[TicketLedger, Outcome]:
    """A trainer has finished a ticket, or not, and wants another, or not.

    Saying the same again gives the same answer, so a trainer that did not hear it may ask anew.
    """
    if done is not None:
        ledger = _finish(ledger, name, session, done, seconds)
    me = ledger.trainers.get(name)
    if me is None or me.session != session:
        return ledger, TrainerUnknown()
    if me.ticket is not None:
        return ledger, _granted(ledger, me, me.ticket)
    if not wants:
        return ledger, TicketDelayed("it does not ask for a ticket", (), me.clock, ledger.min_clock)
    return _issue(ledger, sizes, name, me)


def begin_checkpoint(ledger: TicketLedger) -> TicketLedger:
    """A checkpoint begins: what is finished now is in whatever the servers hold from now on."""
    held = [t.ticket for t in ledger.trainers.values() if t.ticket is not None]
    return replace(ledger, open_at_checkpoint=tuple(sorted((*ledger.returned, *held))))


def at_checkpoint(ledger: TicketLedger) -> TicketLedger:
    """The ledger that belongs to a checkpoint: whatever was not finished when it began is issued again.

    Some of it the servers had taken in already when they were copied. They know, and do not count it twice.
    """
    marked = ledger.open_at_checkpoint or ()
    unfinished = sum(t.samples for t in marked)
    issued = ledger.finished_samples + sum(t.ticket.samples for t in ledger.trainers.values() if t.ticket is not None)
    issued += sum(t.samples for t in ledger.returned)
    return replace(ledger, trainers={}, returned=marked, open_at_checkpoint=None, finished_samples=issued - unfinished)


def slowest(ledger: TicketLedger) -> tuple[str, ...]:
    """The slowest trainers."""
    low = min((t.clock for t in ledger.trainers.values()), default=0)
    return tuple(sorted(name for name, t in ledger.trainers.items() if t.clock == low))


def _finish(ledger: TicketLedger, name: str, session: str, done: Ticket, seconds: float) -> TicketLedger:
    me = ledger.trainers.get(name)
    if me is not None and me.session == session and me.ticket == done:
        mine = _measured(ledger, name, replace(me, clock=me.clock + 1, ticket=None), done, seconds)
        ledger = replace(ledger, trainers={**ledger.trainers, name: mine})
    elif done in ledger.returned:
        # The servers have taken it in, whatever we thought of whoever brought it.
        ledger = replace(ledger, returned=tuple(t for t in ledger.returned if t != done))
    else:
        return ledger
    return _raised(replace(ledger, finished_samples=ledger.finished_samples + done.samples))


def _raised(ledger: TicketLedger) -> TicketLedger:
    low = min((t.clock for t in ledger.trainers.values()), default=ledger.min_clock)
    return replace(ledger, min_clock=max(low, ledger.min_clock))


def _measured(ledger: TicketLedger, name: str, me: TrainerClock, done: Ticket, seconds: float) -> TrainerClock:
    """Learn from a finished ticket how large the next one should be."""
    rate = done.samples / seconds if seconds > 0 else me.rate
    if me.rate:
        # One ticket that took far too long, or was over far too soon, says little.
        rate = SMOOTH * me.rate + (1 - SMOOTH) * min(RATE_JUMP * me.rate, max(me.rate / RATE_JUMP, rate))
    others = [t.clock for other, t in ledger.trainers.items() if other != name]
    weight = me.weight
    if others and me.clock < min(others):
        weight *= 1 - WEIGHT_STEP
    elif others and me.clock > max(others):
        weight *= 1 + WEIGHT_STEP
    return replace(me, rate=rate, weight=min(WEIGHT_LIMITS[1], max(WEIGHT_LIMITS[0], weight)))


def _issue(ledger: TicketLedger, sizes: BatchSizes, name: str, me: TrainerClock) -> tuple[TicketLedger, Outcome]:
    if ledger.bound is not None and me.clock - min(t.clock for t in ledger.trainers.values()) > ledger.bound:
        waits_for = slowest(ledger)
        reason = (
            f"{me.clock - ledger.min_clock} tickets ahead of {', '.join(waits_for)}, and {ledger.bound} are allowed"
        )
        return ledger, TicketDelayed(reason, waits_for, me.clock, ledger.min_clock)
    if ledger.returned:
        ticket, rest = ledger.returned[0], ledger.returned[1:]
        ledger = replace(ledger, returned=rest)
    elif ledger.step < sizes.total_steps:
        ledger, ticket = _cut(ledger, sizes, name)
    else:
        waits_for = tuple(sorted(other for other, t in ledger.trainers.items() if t.ticket is not None))
        if not waits_for:
            return ledger, TicketsExhausted(ledger.finished_samples)
        return ledger, TicketDelayed(
            f"the last tickets are with {', '.join(waits_for)}", waits_for, me.clock, ledger.min_clock
        )
    me = replace(me, ticket=ticket)
    ledger = replace(ledger, trainers={**ledger.trainers, name: me})
    return ledger, _granted(ledger, me, ticket)


def _granted(ledger: TicketLedger, me: TrainerClock, ticket: Ticket) -> TicketGranted:
    waits_for = slowest(ledger)
    return TicketGranted(
        ticket,
        me.clock,
        ledger.min_clock,
        ledger.first_open_step,
        ledger.finished_samples,
        waits_for[0] if waits_for else "",
    )


def _cut(ledger: TicketLedger, sizes: BatchSizes, name: str) -> tuple[TicketLedger, Ticket]:
    """The next new ticket; a rest that would be less than half a ticket goes along with it."""
    size = sizes.size_of(ledger.step)
    wish = ticket_size(ledger, name, size)
    stop = ledger.at + wish
    if size - stop < max(2, (wish + 1) // 2):
        stop = size
    ticket = Ticket(ledger.step, ledger.at, stop)
    step, at = (ledger.step + 1, 0) if stop == size else (ledger.step, stop)
    marked = None if ledger.open_at_checkpoint is None else (*ledger.open_at_checkpoint, ticket)
    return replace(ledger, step=step, at=at, open_at_checkpoint=marked), ticket


def ticket_size(ledger: TicketLedger, name: str, size: int) -> int:
    """How many samples of a global batch of `size` this trainer should have, so that all take equally long."""
    weights = _weights(ledger)
    # Never a lone sample, on which BatchNorm cannot train, nor so few that a slow trainer cannot show that it is fast.
    least = max(2, size // (LEAST_PART * len(weights)))
    return min(size, max(least, round(size * weights[name] / sum(weights.values()))))


def _weights(ledger: TicketLedger) -> dict[str, float]:
    trainers = ledger.trainers
    if ledger.policy == "staleness":
        return {name: t.weight for name, t in trainers.items()}
    known = [t.rate for t in trainers.values() if t.rate > 0]
    if ledger.policy == "equal" or not known:
        return dict.fromkeys(trainers, 1.0)
    usual = sum(known) / len(known)
    return {name: t.rate or usual for name, t in trainers.items()}
