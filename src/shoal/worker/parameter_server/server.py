"""A server: it answers trainers, and takes in what primaries send to the copies that it keeps for them.

Every connection has a thread of its own.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from shoal.core.parameter_server import ticket_ledger
from shoal.core.parameter_server.ticket_ledger import BatchSizes, TicketLedger
from shoal.core.placement import LEDGER, Placement
from shoal.worker.parameter_server import rpc
from shoal.worker.parameter_server.parts import LedgerPart, LedgerUpdate, ParameterShard, ReplicatedPart, ShardStore
from shoal.worker.parameter_server.replicated_parts import ReplicatedParts
from shoal.worker.parameter_server.rpc import (
    AnyCall,
    Disconnect,
    FetchPart,
    InstallReplica,
    PullParameters,
    PushGradients,
    Raw,
    ReplicateUpdate,
    ServerReply,
    TicketRequest,
)
from shoal.worker.parameter_server.served_session import ServedSession
from shoal.worker.transport.handshake import CALL, COPY, PeerHello
from shoal.worker.transport.snapshot import Bytes
from shoal.worker.transport.sockets import disown

POLL_S = 0.5
NEWS_S = 5.0

log = logging.getLogger("shoal.serving")

MOVED = ServerReply("moved", "this server does not answer for that part")
VOID = ServerReply("void", "that life of the state is over")
Reply = tuple[ServerReply, Sequence[Raw]]


class ParameterServer(ReplicatedParts):
    """A shelf that answers."""

    def __init__(self, session: ServedSession, vault: ShardStore, sizes: BatchSizes, ledger: TicketLedger) -> None:
        super().__init__(session, vault, sizes, ledger)
        self._callers: Counter[tuple[str, str]] = Counter()
        self._unseen: dict[str, float] = {}
        self.sealed = True
        session.peers.serve(CALL, self._serve_trainer)
        session.peers.serve(COPY, self._serve_primary)

    # --- what the coordinator says of trainers and checkpoints

    def gone(self, member: str, incarnation: str) -> None:
        """The coordinator has given a trainer up."""
        threading.Thread(target=self._drop, args=(member, incarnation), daemon=True).start()

    def watch(self) -> None:
        """Drop trainers that the ledger counts on, but that have not been connected for a lease.

        A connection that ends is no death: of those the coordinator tells, unless it is away.
        """
        part = self._parts.get(LEDGER)
        if not isinstance(part, LedgerPart) or self._primary(LEDGER, part.life) is not part:
            self._unseen.clear()
            return
        now = time.monotonic()
        for name, trainer in list(part.ledger.trainers.items()):
            if self.connected(name, trainer.session):
                self._unseen.pop(name, None)
            elif now - self._unseen.setdefault(name, now) > self._session.settings.lease_s:
                del self._unseen[name]
                log.warning("nobody waits for %s any more: it has not been connected for a lease", name)
                self._drop(name, trainer.session)

    def connected(self, member: str, session: str) -> bool:
        """Whether a trainer has a connection to this server."""
        return self._callers[member, session] > 0

    @property
    def leads(self) -> bool:
        """Whether this server keeps the ledger, and so writes the checkpoints."""
        part = self._parts.get(LEDGER)
        return part is not None and self._primary(LEDGER, part.life) is part

    @property
    def ledger(self) -> TicketLedger | None:
        part = self._parts.get(LEDGER)
        return part.ledger if isinstance(part, LedgerPart) else None

    def gather(self) -> dict[int, tuple[bytes, list[Bytes]]] | None:
        """A copy of the whole state that can be gone on from; None if it cannot be had now."""
        part, placement = self._parts.get(LEDGER), self._placement
        if not isinstance(part, LedgerPart) or placement is None or not self.leads:
            return None
        with part.lock:
            part.ledger = ticket_ledger.begin_checkpoint(part.ledger)
        found: dict[int, tuple[bytes, list[Bytes]]] = {}
        try:
            for number in range(1, len(placement.assignments)):
                copy = self._copy_of(number, placement)
                if copy is None:
                    return None
                found[number] = copy
        finally:
            with part.lock:
                saved = ticket_ledger.at_checkpoint(part.ledger)
                part.ledger = replace(part.ledger, open_at_checkpoint=None)
        found[LEDGER] = (msgspec.msgpack.encode(saved), [])
        return found

    def _copy_of(self, number: int, placement: Placement) -> tuple[bytes, list[Bytes]] | None:
        holding = placement.assignments[number]
        if holding.primary == self._session.me:
            part = self._parts.get(number)
            return part.capture() if part is not None else None
        seat = placement.seat_of(holding.primary)
        if seat is None:
            return None
        return self._session.fetch(FetchPart(placement.generation, number), seat)

    # --- trainers

    def _serve_trainer(self, hello: PeerHello, sock: socket.socket) -> None:
        member, session = hello.member, hello.incarnation
        with self._changed:
            self._callers[member, session] += 1
        try:
            while True:
                call, body = rpc.receive_call(sock)
                answer, parts = self._answer(hello, call, body)
                rpc.send(sock, answer, parts)
        except OSError as error:
            log.debug("%s is not connected any more: %s", member, error)
        except Exception as error:  # noqa: BLE001 - the outer loop of this thread: the main thread raises it
            self._session.fail(error)
        finally:
            disown(sock)
            with self._changed:
                self._callers[member, session] -= 1

    def _answer(self, hello: PeerHello, call: AnyCall, body: memoryview) -> Reply:
        if isinstance(call, TicketRequest):
            return self._turn(hello, call), ()
        if isinstance(call, PushGradients):
            return self._push(call, body), ()
        if isinstance(call, PullParameters):
            return self._pull(call)
        if isinstance(call, Disconnect):
            self._drop(hello.member, hello.incarnation)
            return ServerReply("done"), ()
        if isinstance(call, FetchPart):
            return self._fetch(call)
        return ServerReply("refused", "trainers do not say this"), ()

    def _turn(self, hello: PeerHello, call: TicketRequest) -> ServerReply:
        part = self._primary(LEDGER, call.life)
        if not isinstance(part, LedgerPart):
            return self._not_here(call.life)
        done, deadline = call.done, time.monotonic() + POLL_S
        while True:
            with part.lock:
                if self._primary(LEDGER, call.life) is not part:
                    return self._not_here(call.life)
                part.seen_number = max(part.seen_number, call.number)
                step = LedgerUpdate(hello.member, hello.incarnation, done, call.seconds, call.wants)
                ledger, outcome = part.outcome(step)
                if ledger != part.ledger and not self._enter(part, step):
                    return MOVED
                done = None
                answer = self._told(part, outcome)
                if answer.kind != "wait" or not call.wants or time.monotonic() > deadline:
                    return answer
                part.changed.wait(min(0.1, POLL_S))

    def _told(self, part: LedgerPart, outcome: ticket_ledger.Outcome) -> ServerReply:
        number = part.seen_number
        if isinstance(outcome, ticket_ledger.TicketGranted):
            return ServerReply("granted", granted=outcome, number=number)
        if isinstance(outcome, ticket_ledger.TicketsExhausted) and not self.sealed:
            # Once trainers are told, all servers end, and nobody is left to write the state.
            return ServerReply("wait", "the last checkpoint is written")
        if isinstance(outcome, ticket_ledger.TicketsExhausted):
            return ServerReply("over", finished_samples=outcome.finished_samples, number=number)
        if isinstance(outcome, ticket_ledger.TicketDelayed):
            return ServerReply(
                "wait", outcome.reason, clock=outcome.clock, low=outcome.min_clock, whom=outcome.waits_for
            )
        return ServerReply("wait", "it is not in the ledger")

    def _drop(self, member: str, session: str) -> None:
        part = self._parts.get(LEDGER)
        if isinstance(part, LedgerPart):
            with part.lock:
                known = part.ledger.trainers.get(member)
                mine = self._primary(LEDGER, part.life) is part
                if known is not None and known.session == session and mine:
                    self._enter(part, LedgerUpdate(member, session, gone=True))

    def _enter(self, part: LedgerPart, step: LedgerUpdate) -> bool:
        """Write an entry of the ledger; False if this server turns out not to keep it any more."""
        done = self._commit(part, msgspec.msgpack.encode(step), memoryview(b""))
        part.changed.notify_all()
        return done

    def _push(self, call: PushGradients, body: memoryview) -> ServerReply:
        part = self._primary(call.part, call.life)
        if not isinstance(part, ParameterShard):
            return self._not_here(call.life)
        with part.lock:
            if self._primary(call.part, call.life) is not part:
                return self._not_here(call.life)
            if part.has(call.ticket):
                return ServerReply("done", version=part.version)
            if self._new_ledger.bound is not None and call.clock < part.floor:
                return ServerReply("stale", f"clock {call.clock} is behind {part.floor}, which all others have reached")
            if not self._commit(part, msgspec.msgpack.encode(call), body):
                return MOVED
            return ServerReply("done", version=part.version)

    def _pull(self, call: PullParameters) -> Reply:
        part = self._primary(call.part, call.life, resting=True)
        if not isinstance(part, ParameterShard):
            return self._not_here(call.life), ()
        version, buffers = part.read(call.version)
        sizes = tuple(len(buffer) for buffer in buffers)
        return ServerReply("done" if buffers else "same", version=version, sizes=sizes), buffers

    def _fetch(self, call: FetchPart) -> Reply:
        part = self._primary(call.part, call.life, resting=True)
        if part is None:
            return self._not_here(call.life), ()
        meta, buffers = part.capture()
        return ServerReply("done", meta=meta, sizes=tuple(len(buffer) for buffer in buffers)), buffers

    def _not_here(self, life: int) -> ServerReply:
        placement = self._placement
        return VOID if placement is not None and placement.generation > life else MOVED

    # --- primaries that keep their copies here

    def _serve_primary(self, hello: PeerHello, sock: socket.socket) -> None:
        try:
            while True:
                call, body = rpc.receive_call(sock)
                if isinstance(call, InstallReplica):
                    answer = self._install(hello.member, call, body)
                elif isinstance(call, ReplicateUpdate):
                    answer = self._take_in(hello.member, call, body)
                elif isinstance(call, FetchPart):
                    answer, parts = self._fetch(call)
                    rpc.send(sock, answer, parts)
                    continue
                else:
                    answer = ServerReply("refused", "primaries do not say this")
                rpc.send(sock, answer)
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
            holding = self._placement.assignments[part]
            copies = (holding.backup, holding.learner)
            return self._placement.generation == life and holding.primary == primary and self._session.me in copies

    def _install(self, primary: str, call: InstallReplica, body: memoryview) -> ServerReply:
        if not self._keeps_here(primary, call.number, call.part, call.life):
            return MOVED
        part: ReplicatedPart
        if call.part == LEDGER:
            part = LedgerPart(call.part, call.life, self._new_ledger, self._sizes)
        else:
            part = ParameterShard(call.part, call.life, self._vault)
        part.install(call.meta, rpc.slices(body, call.sizes))
        part.version = call.version
        with self._changed:
            if (old := self._parts.get(call.part)) is not None:
                old.gone = True
            self._parts[call.part] = part
        return ServerReply("done")

    def _take_in(self, primary: str, call: ReplicateUpdate, body: memoryview) -> ServerReply:
        if not self._keeps_here(primary, call.number, call.part, call.life):
            return MOVED
        part = self._parts.get(call.part)
        if part is None or part.life != call.life:
            return ServerReply("refused", "there is no copy here")
        with part.memory:
            if call.version != part.version + 1:
                return ServerReply("refused", f"entry {call.version} does not follow {part.version}")
            part.apply(call.what, body)
        return ServerReply("done")
