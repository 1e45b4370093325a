"""The parts that a server holds by the placement in force, and how a change gets onto all copies of one.

What a trainer is told has happened, has happened on the backup too: a primary acknowledges only when the backup has
taken the change in, or when the coordinator has said in a newer placement that there is none. So a server that was
replaced without knowing it can promise nothing to anybody.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence

from shoal.core.parameter_server.ticket_ledger import BatchSizes, TicketLedger
from shoal.core.placement import LEDGER, PartAssignment, Placement
from shoal.core.world import Seat
from shoal.wire import member_messages as messages
from shoal.wire.protocol import Message
from shoal.worker.parameter_server.parts import LedgerPart, ParameterShard, ReplicatedPart, ShardStore
from shoal.worker.parameter_server.replication import PendingUpdate, ReplicaSender
from shoal.worker.parameter_server.served_session import ServedSession
from shoal.worker.transport.handshake import COPY
from shoal.worker.transport.snapshot import Bytes

BREATH_S = 0.5


class ReplicatedParts:
    """The parts that this member holds, by number."""

    def __init__(self, session: ServedSession, vault: ShardStore, sizes: BatchSizes, ledger: TicketLedger) -> None:
        self._session, self._vault, self._sizes, self._new_ledger = session, vault, sizes, ledger
        self._parts: dict[int, ReplicatedPart] = {}
        self._replicas: dict[tuple[int, str], ReplicaSender] = {}
        self._insisted_at = 0.0
        self._restored: dict[int, tuple[bytes, list[Bytes]]] = {}
        self._placement: Placement | None = None
        self._changed = threading.Condition()
        self._closed = False

    @property
    def holds(self) -> bool:
        """Whether there is anything here."""
        return bool(self._parts)

    # --- placements, from the link's thread

    def adopt(self, placement: Placement | None) -> None:
        """Hold what a placement says, and no more."""
        with self._changed:
            before, self._placement = self._placement, placement
            if placement is None or (before is not None and before.generation != placement.generation):
                self._forget(list(self._parts))
            if placement is not None:
                self._hold(placement)
            self._changed.notify_all()
        self._wake()

    def _hold(self, placement: Placement) -> None:
        me = self._session.me
        mine = placement.held_by(me)
        self._forget([number for number in self._parts if number not in mine])
        for number in mine:
            holding = placement.assignments[number]
            if holding.primary == me:
                part = self._parts.get(number) or self._first(number, placement)
                self._equip(part, holding, placement)
            elif (part_held := self._parts.get(number)) is not None:
                self._drop_replicas(part_held, ())
        self._restored.clear()

    def _first(self, number: int, placement: Placement) -> ReplicatedPart:
        """A part at the beginning of a life: as the script built it, or as the checkpoint has it."""
        part = self._make(number, placement.generation)
        if number not in self._restored and not placement.fresh:
            # Better to die, so that whoever has a copy takes over, than to make something up.
            self._session.fail(RuntimeError(f"part {number} is not here, though placement {placement.number} says so"))
        if number in self._restored:
            part.install(*self._restored[number])
        self._parts[number] = part
        return part

    def _make(self, number: int, life: int) -> ReplicatedPart:
        if number == LEDGER:
            return LedgerPart(number, life, self._new_ledger, self._sizes)
        if number not in self._restored:
            self._vault.reset(number)
        return ParameterShard(number, life, self._vault)

    def _equip(self, part: ReplicatedPart, holding: PartAssignment, placement: Placement) -> None:
        wanted = tuple(name for name in (holding.backup, holding.learner) if name)
        self._drop_replicas(part, wanted, placement)
        for name in wanted:
            seat = placement.seat_of(name)
            if seat is not None and (part.number, name) not in self._replicas:
                self._start_replica(part, seat, holding, placement, complete=name == holding.backup)
        if holding.handing_off and not part.resting:
            threading.Thread(target=self._come_to_rest, args=(part, placement.number), daemon=True).start()
        elif not holding.handing_off:
            part.resting = False

    def _start_replica(
        self, part: ReplicatedPart, seat: Seat, holding: PartAssignment, placement: Placement, complete: bool
    ) -> None:
        replica = ReplicaSender(
            part,
            seat,
            holding.since,
            placement.number,
            complete,
            self._connect,
            self._copied,
            self._lost_touch,
        )
        self._replicas[part.number, seat.member] = replica
        replica.start()

    def _drop_replicas(self, part: ReplicatedPart, wanted: Sequence[str], placement: Placement | None = None) -> None:
        """Let go of copies that are not wanted, or that another process is to have."""
        for (number, name), replica in list(self._replicas.items()):
            if number != part.number:
                continue
            fits = name in wanted and placement is not None and placement.seat_of(name) == replica.seat
            if fits and not replica.failed and placement is not None and _same(placement.assignments[number], replica):
                continue
            del self._replicas[number, name]
            replica.close()
            part.replicas.pop(name, None)

    def _forget(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            part = self._parts.pop(number)
            part.gone = True
            self._drop_replicas(part, ())

    def _connect(self, seat: Seat, cancelled: threading.Event) -> socket.socket:
        number = self._placement.number if self._placement is not None else 0
        return self._session.peers.connect(COPY, number, seat, self._session.settings.connect_timeout_s, cancelled)

    def _copied(self, part: ReplicatedPart, seat: Seat, since: int) -> None:
        self._session.say(messages.PartCopiedMsg(part.number, seat.member, since))
        with self._changed:
            self._changed.notify_all()

    def _lost_touch(self, part: ReplicatedPart, seat: Seat, cause: str) -> None:
        """A copy is lost; the coordinator says what follows."""
        with self._changed:
            placement = self._placement
            needed = placement is not None and placement.assignments[part.number].backup == seat.member
            self._changed.notify_all()
        if not needed:
            time.sleep(BREATH_S)
        self._report(seat.member, cause)

    def _report(self, server: str, cause: str) -> None:
        placement = self._placement
        if placement is not None and placement.seat_of(server) is not None:
            self._session.say(messages.ServerUnreachableMsg(server, placement.number, cause))

    def _come_to_rest(self, part: ReplicatedPart, number: int) -> None:
        with part.lock:
            # Whoever had the lock before has been acknowledged by the backup, so both hold the same now.
            part.resting = True
        self._session.say(messages.PartReleasedMsg(part.number, number))

    def outstanding(self) -> list[Message]:
        """What the coordinator may not have heard, because it was away; said again with every hello."""
        placement, found = self._placement, list[Message]()
        if placement is None:
            return found
        for (number, name), replica in list(self._replicas.items()):
            holding = placement.assignments[number]
            if replica.complete and not replica.failed and holding.learner == name and holding.since == replica.since:
                found.append(messages.PartCopiedMsg(number, name, replica.since))
        for number, part in list(self._parts.items()):
            if part.resting and placement.assignments[number].handing_off:
                found.append(messages.PartReleasedMsg(number, placement.number))
        return found

    def restore(self, parts: dict[int, tuple[bytes, list[Bytes]]]) -> None:
        """Be the holder of this state in the placement that is to come."""
        with self._changed:
            self._forget(list(self._parts))
            self._restored = parts

    def close(self) -> None:
        """Let go of everything."""
        with self._changed:
            self._closed = True
            self._placement = None
            self._forget(list(self._parts))
            self._changed.notify_all()
        self._wake()

    def _wake(self) -> None:
        """Let those who wait for the ledger look whether it is still here."""
        part = self._parts.get(LEDGER)
        if isinstance(part, LedgerPart) and part.lock.acquire(timeout=0.01):
            try:
                part.changed.notify_all()
            finally:
                part.lock.release()

    # --- committing

    def _commit(self, part: ReplicatedPart, what: bytes, body: memoryview) -> bool:
        """Make a change here and on the backup; under the part's lock. False if this server is not the primary."""
        if not self._backup_attached(part):
            return False
        sent = [(replica, replica.put(what, part.version + 1, body)) for replica in list(part.replicas.values())]
        part.apply(what, body)
        for replica, entry in sent:
            if not self._taken_in(part, replica, entry):
                # What was changed here was promised to nobody; but it was changed, so this copy is worth nothing now.
                part.gone = True
                with self._changed:
                    if self._parts.get(part.number) is part:
                        self._forget([part.number])
                return False
        return True

    def _backup_attached(self, part: ReplicatedPart) -> bool:
        """Wait until there is a connection to the backup, if there is one; False if we are not the primary."""
        while True:
            with self._changed:
                if not self._is_primary(part) or self._placement is None:
                    return False
                backup = self._placement.assignments[part.number].backup
                if not backup or backup in part.replicas:
                    return True
                found = self._replicas.get((part.number, backup))
                self._changed.wait(0.02)
            if found is None or found.failed:
                self._insist(backup, found.failed if found is not None else "there is no connection to it")

    def _insist(self, server: str, cause: str) -> None:
        """Say again whom we cannot reach: the coordinator may have been busy with another placement.

        Never under `_changed`: whoever hears the coordinator has the session's lock, and then wants that one.
        """
        now = time.monotonic()
        if now - self._insisted_at > BREATH_S:
            self._insisted_at = now
            self._report(server, cause)

    def _taken_in(self, part: ReplicatedPart, replica: ReplicaSender, entry: PendingUpdate) -> bool:
        name = replica.seat.member
        while not entry.done.wait(0.05):
            if not replica.complete:
                return True
            if not self._is_primary(part):
                return False
        if not entry.failed or not replica.complete:
            return True
        while True:
            with self._changed:
                if not self._is_primary(part) or self._placement is None:
                    return False
                if not _same(self._placement.assignments[part.number], replica):
                    return True
                self._changed.wait(0.1)
            self._insist(name, entry.failed)

    def _is_primary(self, part: ReplicatedPart) -> bool:
        placement = self._placement
        return (
            not part.gone
            and not self._closed
            and placement is not None
            and placement.generation == part.life
            and placement.assignments[part.number].primary == self._session.me
        )

    def _primary(self, number: int, life: int, *, resting: bool = False) -> ReplicatedPart | None:
        """The part, if this server answers for it."""
        part = self._parts.get(number)
        if part is None or part.life != life or not self._is_primary(part) or (part.resting and not resting):
            return None
        return part


def _same(holding: PartAssignment, replica: ReplicaSender) -> bool:
    """Whether this is the copy that the holding means, and not an earlier one on the same server."""
    name = replica.seat.member
    return (name == holding.backup and replica.complete) or (name == holding.learner and replica.since == holding.since)
