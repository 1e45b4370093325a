"""The parts of the state that a server holds: the ledger, and shards of the parameters.

A part changes by entries, one after another, and every copy of it takes in the same entries in the same order. The
order of a part is decided under its lock by its primary; `memory` guards only the bytes, so that readers need not wait
for what the primary waits for.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import msgspec

from shoal.core.parameter_server import ticket_ledger
from shoal.core.parameter_server.ticket_ledger import BatchSizes, Outcome, Ticket, TicketLedger
from shoal.worker.parameter_server.rpc import PushGradients, Raw
from shoal.worker.transport.snapshot import Bytes

if TYPE_CHECKING:
    from shoal.worker.parameter_server.replication import ReplicaSender


class ShardStore(Protocol):
    """A framework's side of a server: the parameters and whatever changes them."""

    def apply(self, part: int, how: bytes, samples: int, body: memoryview) -> None:
        """Take in the gradient of a ticket."""

    def version(self, part: int) -> int:
        """How often the parameters of a part have changed."""

    def parameters(self, part: int) -> list[Bytes]:
        """The parameters of a part, as copies."""

    def capture(self, part: int) -> tuple[bytes, list[Bytes]]:
        """All of a part, as copies."""

    def install(self, part: int, header: bytes, buffers: Sequence[Raw]) -> None:
        """Take over all of a part."""

    def reset(self, part: int) -> None:
        """Be as the script built it."""


class ReplicatedPart(ABC):
    """One part of the state, and the copies that others are given of it."""

    def __init__(self, number: int, life: int) -> None:
        self.number, self.life = number, life
        self.version = 0
        self.resting = False
        self.gone = False
        self.lock = threading.RLock()
        self.memory = threading.RLock()
        self.replicas: dict[str, ReplicaSender] = {}

    @abstractmethod
    def apply(self, what: bytes, body: memoryview) -> None:
        """Take in one entry."""

    @abstractmethod
    def capture(self) -> tuple[bytes, list[Bytes]]:
        """All of it, as copies."""

    @abstractmethod
    def install(self, meta: bytes, buffers: Sequence[Raw]) -> None:
        """Take over all of it."""


class _AppliedTickets(msgspec.Struct):
    """What a shard remembers of the tickets that it has taken in."""

    taken: list[tuple[int, int]]
    settled: int
    floor: int
    header: bytes


def shard_header(meta: bytes) -> bytes:
    """What the vault said of a captured shard."""
    return msgspec.msgpack.decode(meta, type=_AppliedTickets).header


class ParameterShard(ReplicatedPart):
    """Some of the parameters. `taken` are the tickets that are in them, as far as they could come again.

    `floor` is the slowest clock that a bound ever counted on. Whoever is below it is not counted on any more, and its
    gradient is too old.
    """

    def __init__(self, number: int, life: int, vault: ShardStore) -> None:
        super().__init__(number, life)
        self.taken: set[tuple[int, int]] = set()
        self.settled = 0
        self.floor = 0
        self._vault = vault

    def has(self, ticket: Ticket) -> bool:
        return ticket.step < self.settled or ticket.key in self.taken

    def apply(self, what: bytes, body: memoryview) -> None:
        push = msgspec.msgpack.decode(what, type=PushGradients)
        with self.memory:
            self._vault.apply(self.number, push.how, push.ticket.samples, body)
            self.taken.add(push.ticket.key)
            self.floor = max(self.floor, push.low)
            if push.settled > self.settled:
                self.settled = push.settled
                self.taken = {key for key in self.taken if key[0] >= push.settled}
            self.version += 1

    def capture(self) -> tuple[bytes, list[Bytes]]:
        with self.memory:
            header, buffers = self._vault.capture(self.number)
            return msgspec.msgpack.encode(
                _AppliedTickets(sorted(self.taken), self.settled, self.floor, header)
            ), buffers

    def install(self, meta: bytes, buffers: Sequence[Raw]) -> None:
        tally = msgspec.msgpack.decode(meta, type=_AppliedTickets)
        with self.memory:
            self._vault.install(self.number, tally.header, buffers)
            self.taken, self.settled, self.floor = set(tally.taken), tally.settled, tally.floor

    def read(self, version: int) -> tuple[int, list[Bytes]]:
        """The version of the parameters, and they themselves if they are not those of `version`."""
        with self.memory:
            found = self._vault.version(self.number)
            return found, [] if found == version else self._vault.parameters(self.number)


class LedgerUpdate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An entry of the ledger: a trainer's current, or that it is gone."""

    member: str
    session: str
    done: Ticket | None = None
    seconds: float = 0.0
    wants: bool = False
    gone: bool = False


class LedgerPart(ReplicatedPart):
    """The ledger of tickets."""

    def __init__(self, number: int, life: int, ledger: TicketLedger, sizes: BatchSizes) -> None:
        super().__init__(number, life)
        self.ledger = ledger
        self.seen_number = 0
        self.changed = threading.Condition(self.lock)
        self._sizes = sizes

    def outcome(self, step: LedgerUpdate) -> tuple[TicketLedger, Outcome]:
        """What would follow from an entry."""
        if step.gone:
            return ticket_ledger.remove(self.ledger, step.member, step.session), ticket_ledger.TrainerUnknown()
        joined = ticket_ledger.join(self.ledger, step.member, step.session)
        return ticket_ledger.advance(
            joined, self._sizes, step.member, step.session, step.done, step.seconds, step.wants
        )

    def apply(self, what: bytes, body: memoryview) -> None:  # noqa: ARG002
        self.ledger, _ = self.outcome(msgspec.msgpack.decode(what, type=LedgerUpdate))
        self.version += 1

    def capture(self) -> tuple[bytes, list[Bytes]]:
        # What is marked is for the checkpoint that is being gathered here, and would be kept elsewhere for ever.
        return msgspec.msgpack.encode(replace(self.ledger, open_at_checkpoint=None)), []

    def install(self, meta: bytes, buffers: Sequence[Raw]) -> None:  # noqa: ARG002
        self.ledger = msgspec.msgpack.decode(meta, type=TicketLedger)
