"""Parts of the state that a server holds: the ticket ledger, and shards of the parameters.

A part changes by updates, one after another, and every copy of it applies the same updates in the same order. The
primary decides that order under `lock`. `memory` guards only the bytes, so that readers need not wait for what the
primary waits for.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, TypeVar

import msgspec

from shoal.core.parameter_server import ticket_ledger
from shoal.core.parameter_server.ticket_ledger import BatchSizes, Outcome, Ticket, TicketLedger
from shoal.wire.malformed import MALFORMED
from shoal.worker.parameter_server.rpc import MalformedFrame, PushGradients, Raw
from shoal.worker.transport.snapshot import Bytes

if TYPE_CHECKING:
    from shoal.worker.parameter_server.replication import ReplicaSender

T = TypeVar("T")


class ShardStore(Protocol):
    """A framework's side of a server: parameters by part, and the optimizers that change them."""

    def apply(self, part: int, how: bytes, samples: int, fraction: float, body: memoryview) -> None:
        """Apply the gradient of a ticket; `how` is the framework's description of the bytes in `body`.

        Running statistics cannot be summed: they move by `fraction` towards those of the trainer.
        """

    def check(self, part: int, how: bytes, body: memoryview) -> None:
        """Raise MalformedFrame if these are not the description and the bytes of a gradient of this part."""

    def version(self, part: int) -> int:
        """Return how often the parameters of a part have changed."""

    def parameters(self, part: int) -> list[Bytes]:
        """Return copies of a part's parameters."""

    def capture(self, part: int) -> tuple[bytes, list[Bytes]]:
        """Return a header and copies of everything in a part, including optimizer state."""

    def install(self, part: int, header: bytes, buffers: Sequence[Raw]) -> None:
        """Replace everything in a part by what `capture` returned elsewhere."""

    def reset(self, part: int) -> None:
        """Reset the shard to the values the script initialised it with."""


class ReplicatedPart(ABC):
    """One copy of one part. On the primary, `replicas` are the senders to the other copies.

    A `released` part takes no more updates, so that its backup can take over. A `discarded` one is no longer valid.
    """

    def __init__(self, number: int, generation: int) -> None:
        self.number, self.generation = number, generation
        self.version = 0
        self.released = False
        self.discarded = False
        self.lock = threading.RLock()
        self.memory = threading.RLock()
        self.replicas: dict[str, ReplicaSender] = {}

    @abstractmethod
    def check(self, update: bytes, body: memoryview) -> None:
        """Raise MalformedFrame if this is not an update of the part; nothing is believed before."""

    @abstractmethod
    def apply(self, update: bytes, body: memoryview) -> None:
        """Apply one update and increment the version."""

    @abstractmethod
    def capture(self) -> tuple[bytes, list[Bytes]]:
        """Return a description and copies of the whole part."""

    @abstractmethod
    def install(self, meta: bytes, buffers: Sequence[Raw]) -> None:
        """Replace the whole part by what `capture` returned elsewhere."""


def _decode(update: bytes, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(update, type=kind)
    except MALFORMED as error:
        raise MalformedFrame(f"malformed update: {error}") from error


class _AppliedTickets(msgspec.Struct):
    """Tickets that a shard has applied, as stored in its copies, and the header of its store."""

    taken: list[tuple[int, int]]
    settled: int
    floor: int
    header: bytes


def shard_header(meta: bytes) -> bytes:
    """Return the shard store's header from the description of a captured shard."""
    return msgspec.msgpack.decode(meta, type=_AppliedTickets).header


class ParameterShard(ReplicatedPart):
    """Shard of the parameters, and the tickets it contains.

    `applied` are the keys of the tickets that could still be pushed again; all tickets of steps before `settled` are
    finished and need no entry. `floor` is the slowest clock that the staleness bound ever counted on. A gradient below
    it is too old: the ledger no longer waits for the trainer that computed it.

    A ticket is a fraction of its own global batch, which may be the short last one of an epoch: so every batch moves
    running statistics once, as a step without servers does.
    """

    def __init__(self, number: int, generation: int, store: ShardStore, sizes: BatchSizes) -> None:
        super().__init__(number, generation)
        self._sizes = sizes
        self.applied: set[tuple[int, int]] = set()
        self.settled = 0
        self.floor = 0
        self._store = store

    def has(self, ticket: Ticket) -> bool:
        """Return whether this ticket has been applied already."""
        return ticket.step < self.settled or ticket.key in self.applied

    def check(self, update: bytes, body: memoryview) -> None:
        push = _decode(update, PushGradients)
        ticket = push.ticket
        exists = 0 <= ticket.step < self._sizes.total_steps and 0 <= ticket.start < ticket.stop
        is_possible = exists and ticket.stop <= self._sizes.size_of(ticket.step)
        if not (is_possible and push.settled <= ticket.step and push.low <= push.clock):
            raise MalformedFrame(f"impossible push of {push.ticket}")
        self._store.check(self.number, push.layout, body)

    def apply(self, update: bytes, body: memoryview) -> None:
        push = msgspec.msgpack.decode(update, type=PushGradients)
        with self.memory:
            samples = push.ticket.samples
            fraction = samples / self._sizes.size_of(push.ticket.step)
            self._store.apply(self.number, push.layout, samples, fraction, body)
            self.applied.add(push.ticket.key)
            self.floor = max(self.floor, push.low)
            if push.settled > self.settled:
                self.settled = push.settled
                self.applied = {key for key in self.applied if key[0] >= push.settled}
            self.version += 1

    def capture(self) -> tuple[bytes, list[Bytes]]:
        with self.memory:
            header, buffers = self._store.capture(self.number)
            tickets = _AppliedTickets(sorted(self.applied), self.settled, self.floor, header)
            return msgspec.msgpack.encode(tickets), buffers

    def install(self, meta: bytes, buffers: Sequence[Raw]) -> None:
        tickets = msgspec.msgpack.decode(meta, type=_AppliedTickets)
        with self.memory:
            self._store.install(self.number, tickets.header, buffers)
            self.applied, self.settled, self.floor = set(tickets.taken), tickets.settled, tickets.floor

    def read(self, version: int) -> tuple[int, list[Bytes]]:
        """Return the version of the parameters, and copies of them unless it is `version`."""
        with self.memory:
            current = self._store.version(self.number)
            return current, [] if current == version else self._store.parameters(self.number)


class LedgerUpdate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Update of the ledger: a trainer's request, or (`gone`) that the trainer has left."""

    member: str
    session: str
    done: Ticket | None = None
    seconds: float = 0.0
    wants: bool = False
    gone: bool = False


class LedgerPart(ReplicatedPart):
    """The ticket ledger as a part.

    `seen_number` is the newest placement that a finished ticket was reported under.
    """

    def __init__(self, number: int, generation: int, ledger: TicketLedger, sizes: BatchSizes) -> None:
        super().__init__(number, generation)
        self.ledger = ledger
        self.seen_number = 0
        self.changed = threading.Condition(self.lock)
        self._sizes = sizes

    def outcome(self, update: LedgerUpdate) -> tuple[TicketLedger, Outcome]:
        """Return the ledger after an update, and what it grants the trainer; change nothing."""
        if update.gone:
            return ticket_ledger.remove(self.ledger, update.member, update.session), ticket_ledger.TrainerUnknown()
        joined = ticket_ledger.join(self.ledger, update.member, update.session)
        return ticket_ledger.advance(
            joined, self._sizes, update.member, update.session, update.done, update.seconds, update.wants
        )

    def check(self, update: bytes, body: memoryview) -> None:  # noqa: ARG002
        _decode(update, LedgerUpdate)

    def apply(self, update: bytes, body: memoryview) -> None:  # noqa: ARG002
        self.ledger, _ = self.outcome(msgspec.msgpack.decode(update, type=LedgerUpdate))
        self.version += 1

    def capture(self) -> tuple[bytes, list[Bytes]]:
        # The list belongs to the checkpoint that this server gathers; no other copy would ever clear it.
        return msgspec.msgpack.encode(replace(self.ledger, open_at_checkpoint=None)), []

    def install(self, meta: bytes, buffers: Sequence[Raw]) -> None:  # noqa: ARG002
        self.ledger = msgspec.msgpack.decode(meta, type=TicketLedger)
