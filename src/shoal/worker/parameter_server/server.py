"""Parameter server: serves pull, push and ticket requests for the parts it holds.

Every connection has a thread of its own. Connections of trainers carry their requests; connections of primaries carry
the copies and updates of the parts that this server replicates for them.

A frame is checked before anything changes, here or on a backup. One that is malformed or raises costs its connection,
never the server. Only an update that was checked and then fails halfway ends the server: its part can no longer be
trusted, and the backup takes over.
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

# How long a ticket request may wait before the trainer is told the reason and asks again.
LONG_POLL_S = 0.5
# How long to wait for a placement that a primary knows already.
PLACEMENT_WAIT_S = 5.0

log = logging.getLogger("shoal.parameter_server")

MOVED = ServerReply("moved", "this server is not the primary of that part")
VOID = ServerReply("void", "that generation of the state is over")
Reply = tuple[ServerReply, Sequence[Raw]]


class ParameterServer(ReplicatedParts):
    """Server of the parts that the placement assigns to this member.

    `may_end` is False while a final checkpoint is still to be written: until then trainers are not told that training
    is over, because all servers exit as soon as they are.
    """

    def __init__(self, session: ServedSession, store: ShardStore, sizes: BatchSizes, ledger: TicketLedger) -> None:
        super().__init__(session, store, sizes, ledger)
        self._connections: Counter[tuple[str, str]] = Counter()
        self._disconnected_since: dict[str, float] = {}
        self.may_end = True
        session.peers.serve(CALL, self._serve_trainer)
        session.peers.serve(COPY, self._serve_primary)

    # --- liveness of trainers

    def on_trainer_lost(self, member: str, incarnation: str) -> None:
        """Drop a trainer that the coordinator has given up."""
        threading.Thread(target=self._drop_trainer, args=(member, incarnation), daemon=True).start()

    def drop_disconnected_trainers(self) -> None:
        """Drop trainers in the ledger that have had no connection for a lease.

        A closed connection alone does not mean a dead trainer. Deaths are reported by the coordinator; this covers the
        time in which the coordinator is down.
        """
        part = self._parts.get(LEDGER)
        if not isinstance(part, LedgerPart) or self._primary_part(LEDGER, part.generation) is not part:
            self._disconnected_since.clear()
            return
        now = time.monotonic()
        for name, trainer in list(part.ledger.trainers.items()):
            if self.is_connected(name, trainer.session):
                self._disconnected_since.pop(name, None)
            elif now - self._disconnected_since.setdefault(name, now) > self._session.settings.lease_s:
                del self._disconnected_since[name]
                log.warning("dropped trainer %s: not connected for %g s", name, self._session.settings.lease_s)
                self._drop_trainer(name, trainer.session)

    def is_connected(self, member: str, session: str) -> bool:
        """Return whether a trainer has a connection to this server."""
        return self._connections[member, session] > 0

    # --- checkpoints

    @property
    def owns_ledger(self) -> bool:
        """Whether this server is the ledger's primary, and so writes the checkpoints."""
        part = self._parts.get(LEDGER)
        return part is not None and self._primary_part(LEDGER, part.generation) is part

    @property
    def ledger(self) -> TicketLedger | None:
        part = self._parts.get(LEDGER)
        return part.ledger if isinstance(part, LedgerPart) else None

    def gather_state(self) -> dict[int, tuple[bytes, list[Bytes]]] | None:
        """Return a copy of all parts that training can resume from; None if a part is out of reach just now.

        The ledger is marked first and the shards are copied after it, so a shard may contain tickets that the saved
        ledger counts as unfinished. Shards remember the tickets they contain, so those are not applied again.
        """
        part, placement = self._parts.get(LEDGER), self._placement
        if not isinstance(part, LedgerPart) or placement is None or not self.owns_ledger:
            return None
        with part.lock:
            part.ledger = ticket_ledger.begin_checkpoint(part.ledger)
        copies: dict[int, tuple[bytes, list[Bytes]]] = {}
        try:
            for number in range(1, len(placement.assignments)):
                copy = self._copy_of(number, placement)
                if copy is None:
                    return None
                copies[number] = copy
        finally:
            with part.lock:
                saved = ticket_ledger.at_checkpoint(part.ledger)
                part.ledger = replace(part.ledger, open_at_checkpoint=None)
        copies[LEDGER] = (msgspec.msgpack.encode(saved), [])
        return copies

    def _copy_of(self, number: int, placement: Placement) -> tuple[bytes, list[Bytes]] | None:
        assignment = placement.assignments[number]
        if assignment.primary == self._session.me:
            part = self._parts.get(number)
            return part.capture() if part is not None else None
        seat = placement.seat_of(assignment.primary)
        if seat is None:
            return None
        return self._session.fetch(FetchPart(placement.generation, number), seat)

    # --- calls of trainers

    def _serve_trainer(self, hello: PeerHello, sock: socket.socket) -> None:
        member, session = hello.member, hello.incarnation
        with self._changed:
            self._connections[member, session] += 1
        try:
            while True:
                call, body = rpc.receive_call(sock)
                reply, buffers = self._answer(hello, call, body)
                rpc.send(sock, reply, buffers)
        except OSError as error:
            log.log(_level(error), "trainer %s disconnected: %s", member, error)
        except Exception:
            log.exception("a call of trainer %s failed; closed its connection", member)
        finally:
            disown(sock)
            with self._changed:
                self._connections[member, session] -= 1

    def _answer(self, hello: PeerHello, call: AnyCall, body: memoryview) -> Reply:
        if isinstance(call, TicketRequest):
            return self._request_ticket(hello, call), ()
        if isinstance(call, PushGradients):
            return self._push(call, body), ()
        if isinstance(call, PullParameters):
            return self._pull(call)
        if isinstance(call, Disconnect):
            self._drop_trainer(hello.member, hello.incarnation)
            return ServerReply("done"), ()
        if isinstance(call, FetchPart):
            return self._fetch(call)
        return ServerReply("refused", "not a call of a trainer"), ()

    def _request_ticket(self, hello: PeerHello, call: TicketRequest) -> ServerReply:
        part = self._primary_part(LEDGER, call.generation)
        if not isinstance(part, LedgerPart):
            return self._not_primary(call.generation)
        done, deadline = call.done, time.monotonic() + LONG_POLL_S
        while True:
            with part.lock:
                if self._primary_part(LEDGER, call.generation) is not part:
                    return self._not_primary(call.generation)
                part.seen_number = max(part.seen_number, call.number)
                update = LedgerUpdate(hello.member, hello.incarnation, done, call.seconds, call.wants)
                ledger, outcome = part.outcome(update)
                if ledger != part.ledger and not self._update_ledger(part, update):
                    return MOVED
                done = None
                reply = self._ticket_reply(part, outcome)
                if reply.kind != "wait" or not call.wants or time.monotonic() > deadline:
                    return reply
                part.changed.wait(min(0.1, LONG_POLL_S))

    def _ticket_reply(self, part: LedgerPart, outcome: ticket_ledger.Outcome) -> ServerReply:
        number = part.seen_number
        if isinstance(outcome, ticket_ledger.TicketGranted):
            return ServerReply("granted", granted=outcome, number=number)
        if isinstance(outcome, ticket_ledger.TicketsExhausted) and not self.may_end:
            return ServerReply("wait", "the last checkpoint is being written")
        if isinstance(outcome, ticket_ledger.TicketsExhausted):
            return ServerReply("over", finished_samples=outcome.finished_samples, number=number)
        if isinstance(outcome, ticket_ledger.TicketDelayed):
            return ServerReply(
                "wait", outcome.reason, clock=outcome.clock, low=outcome.min_clock, whom=outcome.waits_for
            )
        return ServerReply("wait", "this trainer is not in the ledger")

    def _drop_trainer(self, member: str, session: str) -> None:
        part = self._parts.get(LEDGER)
        if isinstance(part, LedgerPart):
            with part.lock:
                trainer = part.ledger.trainers.get(member)
                is_primary = self._primary_part(LEDGER, part.generation) is part
                if trainer is not None and trainer.session == session and is_primary:
                    self._update_ledger(part, LedgerUpdate(member, session, gone=True))

    def _update_ledger(self, part: LedgerPart, update: LedgerUpdate) -> bool:
        """Commit an update of the ledger; return False if this server is no longer its primary."""
        committed = self._commit(part, msgspec.msgpack.encode(update), memoryview(b""))
        part.changed.notify_all()
        return committed

    def _push(self, call: PushGradients, body: memoryview) -> ServerReply:
        part = self._primary_part(call.part, call.generation)
        if not isinstance(part, ParameterShard):
            return self._not_primary(call.generation)
        with part.lock:
            if self._primary_part(call.part, call.generation) is not part:
                return self._not_primary(call.generation)
            if part.has(call.ticket):
                return ServerReply("done", version=part.version)
            if self._initial_ledger.bound is not None and call.clock < part.floor:
                return ServerReply("stale", f"clock {call.clock} is behind {part.floor}, which all others have reached")
            update = msgspec.msgpack.encode(call)
            part.check(update, body)
            if not self._commit(part, update, body):
                return MOVED
            return ServerReply("done", version=part.version)

    def _pull(self, call: PullParameters) -> Reply:
        part = self._primary_part(call.part, call.generation, even_released=True)
        if not isinstance(part, ParameterShard):
            return self._not_primary(call.generation), ()
        version, buffers = part.read(call.version)
        sizes = tuple(len(buffer) for buffer in buffers)
        return ServerReply("done" if buffers else "same", version=version, sizes=sizes), buffers

    def _fetch(self, call: FetchPart) -> Reply:
        part = self._primary_part(call.part, call.generation, even_released=True)
        if part is None:
            return self._not_primary(call.generation), ()
        meta, buffers = part.capture()
        return ServerReply("done", meta=meta, sizes=tuple(len(buffer) for buffer in buffers)), buffers

    def _not_primary(self, generation: int) -> ServerReply:
        placement = self._placement
        return VOID if placement is not None and placement.generation > generation else MOVED

    # --- calls of primaries that replicate to this server

    def _serve_primary(self, hello: PeerHello, sock: socket.socket) -> None:
        try:
            while True:
                call, body = rpc.receive_call(sock)
                if isinstance(call, InstallReplica):
                    reply = self._install_replica(hello.member, call, body)
                elif isinstance(call, ReplicateUpdate):
                    reply = self._apply_update(hello.member, call, body)
                elif isinstance(call, FetchPart):
                    reply, buffers = self._fetch(call)
                    rpc.send(sock, reply, buffers)
                    continue
                else:
                    reply = ServerReply("refused", "not a call of a primary")
                rpc.send(sock, reply)
        except OSError as error:
            log.log(_level(error), "primary %s disconnected: %s", hello.member, error)
        except Exception:
            log.exception("a call of primary %s failed; closed its connection", hello.member)
        finally:
            disown(sock)

    def _may_replicate(self, primary: str, number: int, part: int, generation: int) -> bool:
        """Return whether that member may change our copy; wait for its placement if it knows a newer one."""
        deadline = time.monotonic() + PLACEMENT_WAIT_S
        with self._changed:
            while self._placement is None or self._placement.number < number:
                if self._closed or time.monotonic() > deadline:
                    return False
                self._changed.wait(0.1)
            if part >= len(self._placement.assignments):
                return False
            assignment = self._placement.assignments[part]
            holds_copy = self._session.me in (assignment.backup, assignment.learner)
            return self._placement.generation == generation and assignment.primary == primary and holds_copy

    def _install_replica(self, primary: str, call: InstallReplica, body: memoryview) -> ServerReply:
        if not self._may_replicate(primary, call.number, call.part, call.generation):
            return MOVED
        part: ReplicatedPart
        if call.part == LEDGER:
            part = LedgerPart(call.part, call.generation, self._initial_ledger, self._sizes)
        else:
            part = ParameterShard(call.part, call.generation, self._store, self._sizes)
        buffers = rpc.split_body(body, call.sizes)
        try:
            part.install(call.meta, buffers)
        except Exception:
            with self._changed:  # the memory of an earlier copy may be half overwritten
                if call.part in self._parts:
                    self._discard([call.part])
            raise
        part.version = call.version
        with self._changed:
            if (old := self._parts.get(call.part)) is not None:
                old.discarded = True
            self._parts[call.part] = part
        return ServerReply("done")

    def _apply_update(self, primary: str, call: ReplicateUpdate, body: memoryview) -> ServerReply:
        if not self._may_replicate(primary, call.number, call.part, call.generation):
            return MOVED
        part = self._parts.get(call.part)
        if part is None or part.generation != call.generation:
            return ServerReply("refused", "this server has no copy of the part")
        with part.memory:
            if call.version != part.version + 1:
                return ServerReply("refused", f"update {call.version} does not follow version {part.version}")
            part.check(call.update, body)
            self._apply(part, call.update, body)
        return ServerReply("done")


def _level(error: OSError) -> int:
    """Return the log level of a connection's end: one that closed is normal, one that sent garbage is not."""
    return logging.WARNING if isinstance(error, rpc.MalformedFrame) else logging.DEBUG
