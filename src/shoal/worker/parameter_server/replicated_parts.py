"""Parts that a server holds under the current placement, and how an update reaches all copies of a part.

The guarantee: whatever a trainer was told has happened, has happened on the backup too. See the folder's docstring for
the protocol and for the order of the locks.
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

# Least time between two reports of the same unreachable server.
REPORT_INTERVAL_S = 0.5


class ReplicatedParts:
    """The parts of this member by number, and the senders to their replicas on other servers."""

    def __init__(self, session: ServedSession, store: ShardStore, sizes: BatchSizes, ledger: TicketLedger) -> None:
        self._session, self._store, self._sizes, self._initial_ledger = session, store, sizes, ledger
        self._parts: dict[int, ReplicatedPart] = {}
        self._replicas: dict[tuple[int, str], ReplicaSender] = {}
        self._reported_at = 0.0
        self._restored: dict[int, tuple[bytes, list[Bytes]]] = {}
        self._placement: Placement | None = None
        self._changed = threading.Condition()
        self._closed = False

    @property
    def holds_parts(self) -> bool:
        return bool(self._parts)

    # --- placements, in the uplink's thread

    def adopt(self, placement: Placement | None) -> None:
        """Hold exactly the parts that a placement assigns to this server; None means none."""
        with self._changed:
            before, self._placement = self._placement, placement
            if placement is None or (before is not None and before.generation != placement.generation):
                self._discard(list(self._parts))
            if placement is not None:
                self._apply_placement(placement)
            self._changed.notify_all()
        self._wake_ledger_waiters()

    def _apply_placement(self, placement: Placement) -> None:
        me = self._session.me
        assigned = placement.held_by(me)
        self._discard([number for number in self._parts if number not in assigned])
        for number in assigned:
            assignment = placement.assignments[number]
            if assignment.primary == me:
                part = self._parts.get(number) or self._create_first(number, placement)
                self._update_replicas(part, assignment, placement)
            elif (copy := self._parts.get(number)) is not None:
                self._drop_replicas(copy, ())
        self._restored.clear()

    def _create_first(self, number: int, placement: Placement) -> ReplicatedPart:
        """Create a part at the start of a generation: from the checkpoint, else as the script built it."""
        part = self._new_part(number, placement.generation)
        if number not in self._restored and not placement.fresh:
            # Fail rather than invent a state: another server may have a copy and take over.
            self._session.fail(
                RuntimeError(
                    f"part {number} is missing, but placement {placement.number} makes this server its primary"
                )
            )
        if number in self._restored:
            part.install(*self._restored[number])
        self._parts[number] = part
        return part

    def _new_part(self, number: int, generation: int) -> ReplicatedPart:
        if number == LEDGER:
            return LedgerPart(number, generation, self._initial_ledger, self._sizes)
        if number not in self._restored:
            self._store.reset(number)
        return ParameterShard(number, generation, self._store, self._sizes)

    def _update_replicas(self, part: ReplicatedPart, assignment: PartAssignment, placement: Placement) -> None:
        """Replicate to the assigned backup and learner only, and release the part if it is to be handed off."""
        wanted = tuple(name for name in (assignment.backup, assignment.learner) if name)
        self._drop_replicas(part, wanted, placement)
        for name in wanted:
            seat = placement.seat_of(name)
            if seat is not None and (part.number, name) not in self._replicas:
                self._start_replica(part, seat, assignment, placement, complete=name == assignment.backup)
        if assignment.handing_off and not part.released:
            threading.Thread(target=self._release, args=(part, placement.number), daemon=True).start()
        elif not assignment.handing_off:
            part.released = False

    def _start_replica(
        self, part: ReplicatedPart, seat: Seat, assignment: PartAssignment, placement: Placement, complete: bool
    ) -> None:
        replica = ReplicaSender(
            part,
            seat,
            assignment.since,
            placement.number,
            complete,
            self._connect,
            self._on_replica_complete,
            self._on_replica_lost,
        )
        self._replicas[part.number, seat.member] = replica
        replica.start()

    def _drop_replicas(self, part: ReplicatedPart, wanted: Sequence[str], placement: Placement | None = None) -> None:
        """Close replicas of a part that are not wanted, have failed, or belong to another process or assignment."""
        for (number, name), replica in list(self._replicas.items()):
            if number != part.number:
                continue
            fits = name in wanted and placement is not None and placement.seat_of(name) == replica.seat
            if (
                fits
                and not replica.failed
                and placement is not None
                and _matches(placement.assignments[number], replica)
            ):
                continue
            del self._replicas[number, name]
            replica.close()
            part.replicas.pop(name, None)

    def _discard(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            part = self._parts.pop(number)
            part.discarded = True
            self._drop_replicas(part, ())

    def _connect(self, seat: Seat, cancelled: threading.Event) -> socket.socket:
        number = self._placement.number if self._placement is not None else 0
        return self._session.peers.connect(COPY, number, seat, self._session.settings.connect_timeout_s, cancelled)

    def _on_replica_complete(self, part: ReplicatedPart, seat: Seat, since: int) -> None:
        self._session.send(messages.PartCopiedMsg(part.number, seat.member, since))
        with self._changed:
            self._changed.notify_all()

    def _on_replica_lost(self, part: ReplicatedPart, seat: Seat, cause: str) -> None:
        """Report a lost replica; the coordinator answers with another placement."""
        with self._changed:
            placement = self._placement
            is_backup = placement is not None and placement.assignments[part.number].backup == seat.member
            self._changed.notify_all()
        if not is_backup:
            time.sleep(REPORT_INTERVAL_S)
        self._report_unreachable(seat.member, cause)

    def _report_unreachable(self, server: str, cause: str) -> None:
        placement = self._placement
        if placement is not None and placement.seat_of(server) is not None:
            self._session.send(messages.ServerUnreachableMsg(server, placement.number, cause))

    def _release(self, part: ReplicatedPart, number: int) -> None:
        """Take no more updates of a part, and report that its backup may become primary."""
        with part.lock:
            # Earlier holders of the lock waited for the backup's acknowledgement, so both copies are equal now.
            part.released = True
        self._session.send(messages.PartReleasedMsg(part.number, number))

    def unconfirmed(self) -> list[Message]:
        """Return reports that the coordinator may have missed while it was away; sent again with every hello."""
        placement, reports = self._placement, list[Message]()
        if placement is None:
            return reports
        for (number, name), replica in list(self._replicas.items()):
            assignment = placement.assignments[number]
            is_learner = assignment.learner == name and assignment.since == replica.since
            if replica.complete and not replica.failed and is_learner:
                reports.append(messages.PartCopiedMsg(number, name, replica.since))
        for number, part in list(self._parts.items()):
            if part.released and placement.assignments[number].handing_off:
                reports.append(messages.PartReleasedMsg(number, placement.number))
        return reports

    def restore(self, parts: dict[int, tuple[bytes, list[Bytes]]]) -> None:
        """Start the next generation from these parts of a checkpoint."""
        with self._changed:
            self._discard(list(self._parts))
            self._restored = parts

    def close(self) -> None:
        """Discard all parts and close their replicas."""
        with self._changed:
            self._closed = True
            self._placement = None
            self._discard(list(self._parts))
            self._changed.notify_all()
        self._wake_ledger_waiters()

    def _wake_ledger_waiters(self) -> None:
        """Wake threads that wait for the ledger, so that they re-check who owns it."""
        part = self._parts.get(LEDGER)
        if isinstance(part, LedgerPart) and part.lock.acquire(timeout=0.01):
            try:
                part.changed.notify_all()
            finally:
                part.lock.release()

    # --- updates, under the part's lock

    def _commit(self, part: ReplicatedPart, update: bytes, body: memoryview) -> bool:
        """Apply an update here and on the replicas; return False if this server is no longer the primary."""
        if not self._wait_for_backup(part):
            return False
        sent = [(replica, replica.put(update, part.version + 1, body)) for replica in list(part.replicas.values())]
        self._apply(part, update, body)
        for replica, pending in sent:
            if not self._wait_for_acknowledgement(part, replica, pending):
                # The update was promised to no trainer, but this copy contains it and has diverged: discard the copy.
                part.discarded = True
                with self._changed:
                    if self._parts.get(part.number) is part:
                        self._discard([part.number])
                return False
        return True

    def _apply(self, part: ReplicatedPart, update: bytes, body: memoryview) -> None:
        """Apply an update that was checked; if that fails, the part is half changed and this server has to end."""
        try:
            part.apply(update, body)
        except Exception as error:
            self._session.fail(error)
            raise

    def _wait_for_backup(self, part: ReplicatedPart) -> bool:
        """Block until the backup, if there is one, is connected; return False if this server is not the primary."""
        while True:
            with self._changed:
                if not self._is_primary(part) or self._placement is None:
                    return False
                backup = self._placement.assignments[part.number].backup
                if not backup or backup in part.replicas:
                    return True
                replica = self._replicas.get((part.number, backup))
                self._changed.wait(0.02)
            if replica is None or replica.failed:
                self._report_again(backup, replica.failed if replica is not None else "not connected")

    def _report_again(self, server: str, cause: str) -> None:
        """Repeat the report of an unreachable server: the coordinator may have been busy with another placement.

        Never call it under `_changed`: the uplink's thread holds the session's lock when it asks for that one.
        """
        now = time.monotonic()
        if now - self._reported_at > REPORT_INTERVAL_S:
            self._reported_at = now
            self._report_unreachable(server, cause)

    def _wait_for_acknowledgement(self, part: ReplicatedPart, replica: ReplicaSender, pending: PendingUpdate) -> bool:
        """Block until the replica has the update or no longer counts; return False if this server is replaced."""
        if not pending.required:
            return True
        name = replica.seat.member
        while not pending.done.wait(0.05):
            if not self._is_primary(part):
                return False
        if not pending.failed or not replica.complete:
            return True
        while True:
            with self._changed:
                if not self._is_primary(part) or self._placement is None:
                    return False
                if not _matches(self._placement.assignments[part.number], replica):
                    return True
                self._changed.wait(0.1)
            self._report_again(name, pending.failed)

    def _is_primary(self, part: ReplicatedPart) -> bool:
        placement = self._placement
        return (
            not part.discarded
            and not self._closed
            and placement is not None
            and placement.generation == part.generation
            and placement.assignments[part.number].primary == self._session.me
        )

    def _primary_part(self, number: int, generation: int, *, even_released: bool = False) -> ReplicatedPart | None:
        """Return the part if this server answers for it, else None."""
        part = self._parts.get(number)
        if part is None or part.generation != generation or not self._is_primary(part):
            return None
        return part if even_released or not part.released else None


def _matches(assignment: PartAssignment, replica: ReplicaSender) -> bool:
    """Return whether the assignment means this replica, and not an earlier one on the same server."""
    name = replica.seat.member
    is_learner = name == assignment.learner and replica.since == assignment.since
    return (name == assignment.backup and replica.complete) or is_learner
