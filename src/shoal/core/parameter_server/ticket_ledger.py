"""Ticket ledger: which trainer computes which samples when trainers do not wait for each other at every step.

A *ticket* is a span of samples of one global batch. Each is issued once, and again only if the trainer that held it is
lost, with the same span. Servers apply each ticket once, so each sample counts once. A trainer's *clock* is the number
of tickets that it has finished. With a bound K (bounded staleness) it begins a ticket only if its clock is at most K
ahead of the slowest; without one it never waits. A trainer that joins starts at the slowest clock.

How large a ticket is depends on the policy: in proportion to the trainer's speed (*time*), adjusted by whether it runs
ahead or falls behind (*staleness*), or all alike (*equal*).

The ledger is a frozen value; `join`, `remove` and `advance` return the next one. They know neither time nor sockets, so
a backup that applies the same calls in the same order has the same ledger.

A checkpoint takes a while, and trainers go on meanwhile. `begin_checkpoint` remembers which tickets are open, and
tickets issued later are added. `at_checkpoint` returns the ledger to save: all of these count as not finished. Servers
may have applied some of them before they were copied; they save which, and do not apply them twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, Union

from shoal.core import validation

Policy = Literal["time", "staleness", "equal"]

# Part of the old speed in the moving average, and how much one ticket may differ from it.
SMOOTHING = 0.7
MAX_SPEED_CHANGE = 4.0
# No trainer gets less than this part of an equal share.
MIN_SHARE_PART = 16
WEIGHT_STEP = 0.1
WEIGHT_LIMITS = (0.05, 20.0)


class BatchSizes(Protocol):
    """How many global batches there are, and how many samples each has: a `SampleOrder`."""

    @property
    def total_steps(self) -> int: ...

    def size_of(self, step: int) -> int: ...


@dataclass(frozen=True, slots=True, order=True)
class Ticket:
    """Samples start…stop of global batch `step`."""

    step: int
    start: int
    stop: int

    def __post_init__(self) -> None:
        validation.check_counts(self.step, self.start, self.stop)

    @property
    def samples(self) -> int:
        return self.stop - self.start

    @property
    def key(self) -> tuple[int, int]:
        """Step and first sample, which identify a ticket."""
        return self.step, self.start


@dataclass(frozen=True, slots=True)
class TrainerClock:
    """One trainer in the ledger. `rate` is its speed in samples a second, 0 if not measured yet."""

    session: str
    clock: int
    ticket: Ticket | None = None
    rate: float = 0.0
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class TicketLedger:
    """Issued tickets and the clock of every trainer. The next new ticket begins at sample `at` of batch `step`.

    `returned` are tickets whose trainer was lost. `min_clock` is the slowest clock so far; it only grows.
    `open_at_checkpoint` are the tickets that were not finished when a checkpoint began, and those issued since.
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
        """The first batch with tickets that are not finished, or not issued."""
        open_steps = [t.ticket.step for t in self.trainers.values() if t.ticket is not None]
        return min([self.step, *open_steps, *(t.step for t in self.returned)])


@dataclass(frozen=True, slots=True)
class TicketGranted:
    """Begin this ticket. `clock` is the trainer's, `min_clock` the slowest, `behind` a trainer with that clock."""

    ticket: Ticket
    clock: int
    min_clock: int
    first_open_step: int
    finished_samples: int
    behind: str = ""


@dataclass(frozen=True, slots=True)
class TicketDelayed:
    """Wait: the trainers in `waits_for` have to finish a ticket first."""

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
    """The trainer is not in the ledger, or no longer; it may join again."""


Outcome = Union[TicketGranted, TicketDelayed, TicketsExhausted, TrainerUnknown]


def join(ledger: TicketLedger, name: str, session: str) -> TicketLedger:
    """Return the ledger with a trainer; an earlier session of the same name is removed."""
    before = ledger.trainers.get(name)
    if before is not None and before.session == session:
        return ledger
    if before is not None:
        ledger = remove(ledger, name, before.session)
    clock = min((t.clock for t in ledger.trainers.values()), default=ledger.min_clock)
    return replace(ledger, trainers={**ledger.trainers, name: TrainerClock(session, clock)})


def remove(ledger: TicketLedger, name: str, session: str) -> TicketLedger:
    """Return the ledger without a trainer: the others no longer wait for it, and its ticket is issued again."""
    trainer = ledger.trainers.get(name)
    if trainer is None or trainer.session != session:
        return ledger
    returned = ledger.returned if trainer.ticket is None else tuple(sorted((*ledger.returned, trainer.ticket)))
    trainers = {other: t for other, t in ledger.trainers.items() if other != name}
    return _with_min_clock(replace(ledger, trainers=trainers, returned=returned))


def advance(
    ledger: TicketLedger, sizes: BatchSizes, name: str, session: str, done: Ticket | None, seconds: float, wants: bool
) -> tuple[TicketLedger, Outcome]:
    """Finish a trainer's ticket, if it has `done` one, and issue the next, if it `wants` one.

    The same call again has the same outcome, so a trainer that missed the reply may repeat it.
    """
    if done is not None:
        ledger = _finish(ledger, name, session, done, seconds)
    trainer = ledger.trainers.get(name)
    if trainer is None or trainer.session != session:
        return ledger, TrainerUnknown()
    if trainer.ticket is not None:
        return ledger, _granted(ledger, trainer, trainer.ticket)
    if not wants:
        return ledger, TicketDelayed("no ticket was requested", (), trainer.clock, ledger.min_clock)
    return _issue(ledger, sizes, name, trainer)


def begin_checkpoint(ledger: TicketLedger) -> TicketLedger:
    """Return the ledger with its open tickets remembered: all others are in what servers copy from now on."""
    held = [t.ticket for t in ledger.trainers.values() if t.ticket is not None]
    return replace(ledger, open_at_checkpoint=tuple(sorted((*ledger.returned, *held))))


def at_checkpoint(ledger: TicketLedger) -> TicketLedger:
    """Return the ledger that belongs to the checkpoint: tickets that were open when it began are issued again."""
    reissued = ledger.open_at_checkpoint or ()
    issued = ledger.finished_samples + sum(t.ticket.samples for t in ledger.trainers.values() if t.ticket is not None)
    issued += sum(t.samples for t in ledger.returned)
    finished = issued - sum(t.samples for t in reissued)
    return replace(ledger, trainers={}, returned=reissued, open_at_checkpoint=None, finished_samples=finished)


def slowest(ledger: TicketLedger) -> tuple[str, ...]:
    """Return the trainers with the slowest clock."""
    clock = min((t.clock for t in ledger.trainers.values()), default=0)
    return tuple(sorted(name for name, t in ledger.trainers.items() if t.clock == clock))


def _finish(ledger: TicketLedger, name: str, session: str, done: Ticket, seconds: float) -> TicketLedger:
    trainer = ledger.trainers.get(name)
    if trainer is not None and trainer.session == session and trainer.ticket == done:
        trainer = _measured(ledger, name, replace(trainer, clock=trainer.clock + 1, ticket=None), done, seconds)
        ledger = replace(ledger, trainers={**ledger.trainers, name: trainer})
    elif done in ledger.returned:
        # The servers have applied it, although its trainer was taken for lost.
        ledger = replace(ledger, returned=tuple(t for t in ledger.returned if t != done))
    else:
        return ledger
    return _with_min_clock(replace(ledger, finished_samples=ledger.finished_samples + done.samples))


def _with_min_clock(ledger: TicketLedger) -> TicketLedger:
    clock = min((t.clock for t in ledger.trainers.values()), default=ledger.min_clock)
    return replace(ledger, min_clock=max(clock, ledger.min_clock))


def _measured(ledger: TicketLedger, name: str, trainer: TrainerClock, done: Ticket, seconds: float) -> TrainerClock:
    """Return the trainer with the speed and weight that its finished ticket suggests."""
    rate = done.samples / seconds if seconds > 0 else trainer.rate
    if trainer.rate:
        # A single ticket that took far too long, or far too short, says little.
        limited = min(MAX_SPEED_CHANGE * trainer.rate, max(trainer.rate / MAX_SPEED_CHANGE, rate))
        rate = SMOOTHING * trainer.rate + (1 - SMOOTHING) * limited
    others = [t.clock for other, t in ledger.trainers.items() if other != name]
    weight = trainer.weight
    if others and trainer.clock < min(others):
        weight *= 1 - WEIGHT_STEP
    elif others and trainer.clock > max(others):
        weight *= 1 + WEIGHT_STEP
    return replace(trainer, rate=rate, weight=min(WEIGHT_LIMITS[1], max(WEIGHT_LIMITS[0], weight)))


def _issue(ledger: TicketLedger, sizes: BatchSizes, name: str, trainer: TrainerClock) -> tuple[TicketLedger, Outcome]:
    def delayed(reason: str, waits_for: tuple[str, ...]) -> tuple[TicketLedger, Outcome]:
        return ledger, TicketDelayed(reason, waits_for, trainer.clock, ledger.min_clock)

    if ledger.bound is not None and trainer.clock - min(t.clock for t in ledger.trainers.values()) > ledger.bound:
        names = slowest(ledger)
        ahead = trainer.clock - ledger.min_clock
        return delayed(f"{ahead} tickets ahead of {', '.join(names)}, and {ledger.bound} are allowed", names)
    if ledger.returned:
        ticket, rest = ledger.returned[0], ledger.returned[1:]
        ledger = replace(ledger, returned=rest)
    elif ledger.step < sizes.total_steps:
        ledger, ticket = _new_ticket(ledger, sizes, name)
    else:
        names = tuple(sorted(other for other, t in ledger.trainers.items() if t.ticket is not None))
        if not names:
            return ledger, TicketsExhausted(ledger.finished_samples)
        return delayed(f"the last tickets are with {', '.join(names)}", names)
    trainer = replace(trainer, ticket=ticket)
    ledger = replace(ledger, trainers={**ledger.trainers, name: trainer})
    return ledger, _granted(ledger, trainer, ticket)


def _granted(ledger: TicketLedger, trainer: TrainerClock, ticket: Ticket) -> TicketGranted:
    behind = slowest(ledger)[:1]
    finished = ledger.finished_samples
    return TicketGranted(ticket, trainer.clock, ledger.min_clock, ledger.first_open_step, finished, *behind)


def _new_ticket(ledger: TicketLedger, sizes: BatchSizes, name: str) -> tuple[TicketLedger, Ticket]:
    """Cut the next ticket off the batch; a remainder of less than half a ticket is added to it."""
    size = sizes.size_of(ledger.step)
    wished = ticket_size(ledger, name, size)
    stop = ledger.at + wished
    if size - stop < max(2, (wished + 1) // 2):
        stop = size
    ticket = Ticket(ledger.step, ledger.at, stop)
    step, at = (ledger.step + 1, 0) if stop == size else (ledger.step, stop)
    still_open = None if ledger.open_at_checkpoint is None else (*ledger.open_at_checkpoint, ticket)
    return replace(ledger, step=step, at=at, open_at_checkpoint=still_open), ticket


def ticket_size(ledger: TicketLedger, name: str, size: int) -> int:
    """Return the samples of a global batch of `size` that this trainer should get, so that all take equally long."""
    weights = _weights(ledger)
    # At least two, because BatchNorm cannot train on one, and enough that a trainer can show that it became faster.
    least = max(2, size // (MIN_SHARE_PART * len(weights)))
    return min(size, max(least, round(size * weights[name] / sum(weights.values()))))


def _weights(ledger: TicketLedger) -> dict[str, float]:
    trainers = ledger.trainers
    if ledger.policy == "staleness":
        return {name: t.weight for name, t in trainers.items()}
    rates = [t.rate for t in trainers.values() if t.rate > 0]
    if ledger.policy == "equal" or not rates:
        return dict.fromkeys(trainers, 1.0)
    mean = sum(rates) / len(rates)
    return {name: t.rate or mean for name, t in trainers.items()}
