"""A server: it holds parts of the state, answers trainers, and keeps backups complete.

Every connection has a thread. What a trainer is told has happened, has happened on the backup too: a primary answers
only when the backup has taken the entry in, or when the coordinator has said in a newer placement that there is none.
So a server that was replaced without knowing it can promise nothing to anybody.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from shoal.core import clock
from shoal.core.clock import Ledger, Sizes
from shoal.core.shards import LEDGER, Holding, Placement
from shoal.core.world import Seat
from shoal.wire import messages
from shoal.worker import frames
from shoal.worker.frames import Answer, AnyCall, Bye, Entry, Fetch, Install, Pull, Push, Raw, Turn
from shoal.worker.handshake import CALL, COPY, Hello
from shoal.worker.parts import LedgerPart, Part, Shard, Step, Vault
from shoal.worker.placed import PlacedSession
from shoal.worker.replica import Replica, Sent
from shoal.worker.snapshot import Bytes
from shoal.worker.sockets import disown

POLL_S = 0.5
NEWS_S = 5.0
BREATH_S = 0.5

log = logging.getLogger("shoal.serving")

MOVED = Answer("moved", "this server does not answer for that part")
VOID = Answer("void", "that life of the state is over")
Reply = tuple[Answer, Sequence[Raw]]


class Server:
    """The parts that this member holds, by number."""

    def __init__(self, session: PlacedSession, vault: Vault, sizes: Sizes, ledger: Ledger) -> None:
        self._session, self._vault, self._sizes, self._new_ledger = session, vault, sizes, ledger
        self._parts: dict[int, Part] = {}
        self._replicas: dict[tuple[int, str], Replica] = {}
        self._insisted_at = 0.0
        self._restored: dict[int, tuple[bytes, list[Bytes]]] = {}
        self._placement: Placement | None = None
        self._changed = threading.Condition()
        self._callers: dict[str, tuple[str, int]] = {}
        self._unseen: dict[str, float] = {}
        self._closed = False
        session.port.serve(CALL, self._serve_trainer)
        session.port.serve(COPY, self._serve_primary)

    # --- placements, from the link's thread

    def adopt(self, placement: Placement | None) -> None:
        """Hold what a placement says, and no more."""
        with self._changed:
            before, self._placement = self._placement, placement
            if placement is None or (before is not None and before.life != placement.life):
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
            holding = placement.holdings[number]
            if holding.primary == me:
                part = self._parts.get(number) or self._first(number, placement)
                self._equip(part, holding, placement)
            elif (part_held := self._parts.get(number)) is not None:
                self._drop_replicas(part_held, ())
        self._restored.clear()

    def _first(self, number: int, placement: Placement) -> Part:
        """A part at the beginning of a life: as the script built it, or as the checkpoint has it."""
        part = self._make(number, placement.life)
        if number in self._restored:
            part.install(*self._restored[number])
        self._parts[number] = part
        return part

    def _make(self, number: int, life: int) -> Part:
        if number == LEDGER:
            return LedgerPart(number, life, self._new_ledger, self._sizes)
        if number not in self._restored:
            self._vault.renew(number)
        return Shard(number, life, self._vault)

    def _equip(self, part: Part, holding: Holding, placement: Placement) -> None:
        wanted = tuple(name for name in (holding.backup, holding.learner) if name)
        self._drop_replicas(part, wanted, placement)
        for name in wanted:
            seat = placement.seat_of(name)
            if seat is not None and (part.number, name) not in self._replicas:
                self._start_replica(part, seat, holding, placement, complete=name == holding.backup)
        if holding.handing and not part.resting:
            threading.Thread(target=self._come_to_rest, args=(part, placement.number), daemon=True).start()
        elif not holding.handing:
            part.resting = False

    def _start_replica(self, part: Part, seat: Seat, holding: Holding, placement: Placement, complete: bool) -> None:
        replica = Replica(
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

    def _drop_replicas(self, part: Part, wanted: Sequence[str], placement: Placement | None = None) -> None:
        """Let go of copies that are not wanted, or that another process is to have."""
        for (number, name), replica in list(self._replicas.items()):
            if number != part.number:
                continue
            fits = name in wanted and placement is not None and placement.seat_of(name) == replica.seat
            if fits and not replica.failed and placement is not None and _same(placement.holdings[number], replica):
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
        return self._session.port.call(COPY, number, seat, self._session.settings.connect_s, cancelled)

    def _copied(self, part: Part, seat: Seat, since: int) -> None:
        self._session.say(messages.Copied(part.number, seat.member, since))
        with self._changed:
            self._changed.notify_all()

    def _lost_touch(self, part: Part, seat: Seat, cause: str) -> None:
        """A copy is lost; the coordinator says what follows."""
        with self._changed:
            placement = self._placement
            needed = placement is not None and placement.holdings[part.number].backup == seat.member
            self._changed.notify_all()
        if not needed:
            time.sleep(BREATH_S)
        self._report(seat.member, cause)

    def _report(self, server: str, cause: str) -> None:
        placement = self._placement
        if placement is not None and placement.seat_of(server) is not None:
            self._session.say(messages.Unreachable(server, placement.number, cause))

    def _come_to_rest(self, part: Part, number: int) -> None:
        with part.lock:
            # Whoever had the lock before has been acknowledged by the backup, so both hold the same now.
            part.resting = True
        self._session.say(messages.Yielded(part.number, number))

    # --- what the coordinator says of trainers and checkpoints

    def gone(self, member: str, incarnation: str) -> None:
        """The coordinator has given a trainer up."""
        threading.Thread(target=self._drop, args=(member, incarnation), daemon=True).start()

    def restore(self, parts: dict[int, tuple[bytes, list[Bytes]]]) -> None:
        """Be the holder of this state in the placement that is to come."""
        with self._changed:
            self._forget(list(self._parts))
            self._restored = parts

    def watch(self) -> None:
        """Drop trainers that the ledger counts on, but that are not connected any more."""
        part = self._parts.get(LEDGER)
        if not isinstance(part, LedgerPart) or self._primary(LEDGER, part.life) is not part:
            self._unseen.clear()
            return
        now = time.monotonic()
        for name, trainer in list(part.ledger.trainers.items()):
            if self._callers.get(name, ("", 0))[0] == trainer.session:
                self._unseen.pop(name, None)
            elif now - self._unseen.setdefault(name, now) > self._session.settings.lease_s:
                del self._unseen[name]
                self._drop(name, trainer.session)

    @property
    def leads(self) -> bool:
        """Whether this server keeps the ledger, and so writes the checkpoints."""
        part = self._parts.get(LEDGER)
        return part is not None and self._primary(LEDGER, part.life) is part

    @property
    def ledger(self) -> Ledger | None:
        part = self._parts.get(LEDGER)
        return part.ledger if isinstance(part, LedgerPart) else None

    @property
    def holds(self) -> bool:
        return bool(self._parts)

    def gather(self) -> dict[int, tuple[bytes, list[Bytes]]] | None:
        """A copy of the whole state that can be gone on from; None if it cannot be had now."""
        part, placement = self._parts.get(LEDGER), self._placement
        if not isinstance(part, LedgerPart) or placement is None or not self.leads:
            return None
        with part.lock:
            part.ledger = clock.mark(part.ledger)
        found: dict[int, tuple[bytes, list[Bytes]]] = {}
        try:
            for number in range(1, len(placement.holdings)):
                copy = self._copy_of(number, placement)
                if copy is None:
                    return None
                found[number] = copy
        finally:
            with part.lock:
                saved = clock.as_marked(part.ledger)
                part.ledger = replace(part.ledger, marked=None)
        found[LEDGER] = (msgspec.msgpack.encode(saved), [])
        return found

    def _copy_of(self, number: int, placement: Placement) -> tuple[bytes, list[Bytes]] | None:
        holding = placement.holdings[number]
        if holding.primary == self._session.me:
            part = self._parts.get(number)
            return part.capture() if part is not None else None
        seat = placement.seat_of(holding.primary)
        if seat is None:
            return None
        return self._session.fetch(Fetch(placement.life, number), seat)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._placement = None
            self._forget(list(self._parts))
            self._changed.notify_all()
        self._wake()

    # --- trainers

    def _serve_trainer(self, hello: Hello, sock: socket.socket) -> None:
        member, session = hello.member, hello.incarnation
        with self._changed:
            number = self._callers.get(member, ("", 0))[1] + 1
            self._callers[member] = (session, number)
        try:
            while True:
                call, body = frames.receive_call(sock)
                answer, parts = self._answer(hello, call, body)
                frames.send(sock, answer, parts)
        except OSError as error:
            log.debug("%s is not connected any more: %s", member, error)
        except Exception as error:  # noqa: BLE001 - the outer loop of this thread: the main thread raises it
            self._session.fail(error)
        finally:
            disown(sock)
            with self._changed:
                latest = self._callers.get(member) == (session, number)
                if latest:
                    del self._callers[member]
            if latest:
                self._drop(member, session)

    def _answer(self, hello: Hello, call: AnyCall, body: memoryview) -> Reply:
        if isinstance(call, Turn):
            return self._turn(hello, call), ()
        if isinstance(call, Push):
            return self._push(call, body), ()
        if isinstance(call, Pull):
            return self._pull(call)
        if isinstance(call, Bye):
            self._drop(hello.member, hello.incarnation)
            return Answer("done"), ()
        if isinstance(call, Fetch):
            return self._fetch(call)
        return Answer("refused", "trainers do not say this"), ()

    def _turn(self, hello: Hello, call: Turn) -> Answer:
        part = self._primary(LEDGER, call.life)
        if not isinstance(part, LedgerPart):
            return self._not_here(call.life)
        done, deadline = call.done, time.monotonic() + POLL_S
        while True:
            with part.lock:
                if self._primary(LEDGER, call.life) is not part:
                    return self._not_here(call.life)
                part.seen_number = max(part.seen_number, call.number)
                step = Step(hello.member, hello.incarnation, done, call.seconds, call.wants)
                ledger, outcome = part.outcome(step)
                if ledger != part.ledger and not self._enter(part, step):
                    return MOVED
                done = None
                answer = self._told(part, outcome)
                if answer.kind != "wait" or not call.wants or time.monotonic() > deadline:
                    return answer
                part.changed.wait(min(0.1, POLL_S))

    def _told(self, part: LedgerPart, outcome: clock.Outcome) -> Answer:
        number = part.seen_number
        if isinstance(outcome, clock.Granted):
            return Answer("granted", granted=outcome, number=number)
        if isinstance(outcome, clock.Over):
            return Answer("over", finished_samples=outcome.finished_samples, number=number)
        if isinstance(outcome, clock.Wait):
            return Answer("wait", outcome.reason, clock=outcome.clock, low=outcome.low, whom=outcome.whom)
        return Answer("wait", "it is not in the ledger")

    def _drop(self, member: str, session: str) -> None:
        part = self._parts.get(LEDGER)
        if isinstance(part, LedgerPart):
            with part.lock:
                known = part.ledger.trainers.get(member)
                mine = self._primary(LEDGER, part.life) is part
                if known is not None and known.session == session and mine:
                    self._enter(part, Step(member, session, gone=True))

    def _enter(self, part: LedgerPart, step: Step) -> bool:
        """Write an entry of the ledger; False if this server turns out not to keep it any more."""
        done = self._commit(part, msgspec.msgpack.encode(step), memoryview(b""))
        part.changed.notify_all()
        return done

    def _push(self, call: Push, body: memoryview) -> Answer:
        part = self._primary(call.part, call.life)
        if not isinstance(part, Shard):
            return self._not_here(call.life)
        with part.lock:
            if self._primary(call.part, call.life) is not part:
                return self._not_here(call.life)
            if part.has(call.ticket):
                return Answer("done", version=part.version)
            if self._new_ledger.bound is not None and call.clock < part.floor:
                return Answer("stale", f"clock {call.clock} is behind {part.floor}, which all others have reached")
            if not self._commit(part, msgspec.msgpack.encode(call), body):
                return MOVED
            return Answer("done", version=part.version)

    def _pull(self, call: Pull) -> Reply:
        part = self._primary(call.part, call.life, resting=True)
        if not isinstance(part, Shard):
            return self._not_here(call.life), ()
        version, buffers = part.read(call.version)
        sizes = tuple(len(buffer) for buffer in buffers)
        return Answer("done" if buffers else "same", version=version, sizes=sizes), buffers

    def _fetch(self, call: Fetch) -> Reply:
        part = self._primary(call.part, call.life, resting=True)
        if part is None:
            return self._not_here(call.life), ()
        meta, buffers = part.capture()
        return Answer("done", meta=meta, sizes=tuple(len(buffer) for buffer in buffers)), buffers

    # --- committing

    def _commit(self, part: Part, what: bytes, body: memoryview) -> bool:
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

    def _backup_attached(self, part: Part) -> bool:
        """Wait until there is a connection to the backup, if there is one; False if we are not the primary."""
        with self._changed:
            while self._is_primary(part):
                assert self._placement is not None
                backup = self._placement.holdings[part.number].backup
                if not backup or backup in part.replicas:
                    return True
                found = self._replicas.get((part.number, backup))
                if found is None or found.failed:
                    self._insist(backup, found.failed if found is not None else "there is no connection to it")
                self._changed.wait(0.02)
            return False

    def _insist(self, server: str, cause: str) -> None:
        """Say again whom we cannot reach: the coordinator may have been busy with another placement."""
        now = time.monotonic()
        if now - self._insisted_at > BREATH_S:
            self._insisted_at = now
            self._report(server, cause)

    def _taken_in(self, part: Part, replica: Replica, entry: Sent) -> bool:
        name = replica.seat.member
        while not entry.done.wait(0.05):
            if not replica.complete:
                return True
            if not self._is_primary(part):
                return False
        if not entry.failed or not replica.complete:
            return True
        with self._changed:
            while self._is_primary(part):
                assert self._placement is not None
                holding = self._placement.holdings[part.number]
                if not _same(holding, replica):
                    return True
                self._insist(name, entry.failed)
                self._changed.wait(0.1)
            return False

    def _is_primary(self, part: Part) -> bool:
        placement = self._placement
        return (
            not part.gone
            and not self._closed
            and placement is not None
            and placement.life == part.life
            and placement.holdings[part.number].primary == self._session.me
        )

    def _primary(self, number: int, life: int, *, resting: bool = False) -> Part | None:
        """The part, if this server answers for it."""
        part = self._parts.get(number)
        if part is None or part.life != life or not self._is_primary(part) or (part.resting and not resting):
            return None
        return part

    def _not_here(self, life: int) -> Answer:
        placement = self._placement
        return VOID if placement is not None and placement.life > life else MOVED

    def _wake(self) -> None:
        part = self._parts.get(LEDGER)
        if isinstance(part, LedgerPart) and part.lock.acquire(timeout=0.01):
            try:
                part.changed.notify_all()
            finally:
                part.lock.release()

    # --- primaries that keep their copies here

    def _serve_primary(self, hello: Hello, sock: socket.socket) -> None:
        try:
            while True:
                call, body = frames.receive_call(sock)
                if isinstance(call, Install):
                    answer = self._install(hello.member, call, body)
                elif isinstance(call, Entry):
                    answer = self._take_in(hello.member, call, body)
                elif isinstance(call, Fetch):
                    answer, parts = self._fetch(call)
                    frames.send(sock, answer, parts)
                    continue
                else:
                    answer = Answer("refused", "primaries do not say this")
                frames.send(sock, answer)
        except OSError as error:
            log.debug("%s keeps no copy here any more: %s", hello.member, error)
        except Exception as error:  # noqa: BLE001 - the outer loop of this thread: the main thread raises it
            self._session.fail(error)
        finally:
            disown(sock)

    def _keeps_here(self, primary: str, number: int, part: int, life: int) -> bool:
        """Whether that member may change our copy; waits for the news if it knows a later placement than we do."""
        deadline = time.monotonic() + NEWS_S
        with self._changed:
            while self._placement is None or self._placement.number < number:
                if self._closed or time.monotonic() > deadline:
                    return False
                self._changed.wait(0.1)
            holding = self._placement.holdings[part]
            copies = (holding.backup, holding.learner)
            return self._placement.life == life and holding.primary == primary and self._session.me in copies

    def _install(self, primary: str, call: Install, body: memoryview) -> Answer:
        if not self._keeps_here(primary, call.number, call.part, call.life):
            return MOVED
        part: Part
        if call.part == LEDGER:
            part = LedgerPart(call.part, call.life, self._new_ledger, self._sizes)
        else:
            part = Shard(call.part, call.life, self._vault)
        part.install(call.meta, frames.slices(body, call.sizes))
        part.version = call.version
        with self._changed:
            if (old := self._parts.get(call.part)) is not None:
                old.gone = True
            self._parts[call.part] = part
        return Answer("done")

    def _take_in(self, primary: str, call: Entry, body: memoryview) -> Answer:
        if not self._keeps_here(primary, call.number, call.part, call.life):
            return MOVED
        part = self._parts.get(call.part)
        if part is None or part.life != call.life:
            return Answer("refused", "there is no copy here")
        with part.memory:
            if call.version != part.version + 1:
                return Answer("refused", f"entry {call.version} does not follow {part.version}")
            part.apply(call.what, body)
        return Answer("done")


def _same(holding: Holding, replica: Replica) -> bool:
    """Whether this is the copy that the holding means, and not an earlier one on the same server."""
    name = replica.seat.member
    return (name == holding.backup and replica.complete) or (name == holding.learner and replica.since == holding.since)
