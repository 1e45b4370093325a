"""Replication of one part to one other server.

A new replica, a *learner*, gets a copy of the part and then the updates since. When none is left it is *complete*: from
then on the primary acknowledges no update that the replica has not applied. Whether an update must be waited for is
decided when it is queued, under the sender's own lock (`_guard`), and the replica becomes complete under the same lock
when its queue is empty. So an update is either acknowledged before the replica counts, or waited for; and the sender's
thread never needs the part's lock for that, whose holder may be waiting for this very thread.

A learner that is slower than the trainers would never catch up, and its queue would fill the memory: beyond
`MAX_BACKLOG` updates the primary waits for it too. If it does not answer at all, the coordinator's lease ends the wait.
"""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shoal.core.world import Seat
from shoal.worker.parameter_server import rpc
from shoal.worker.parameter_server.parts import ReplicatedPart
from shoal.worker.parameter_server.rpc import InstallReplica, ReplicateUpdate
from shoal.worker.transport.exchange_broken import ExchangeBroken
from shoal.worker.transport.sockets import disown, shut

# Updates that may be on their way to a learner before the primary waits for it.
MAX_BACKLOG = 16

Connect = Callable[[Seat, threading.Event], socket.socket]


@dataclass(eq=False, slots=True)
class PendingUpdate:
    """Update on its way to a replica; `done` is set when it is acknowledged or has `failed`.

    The primary waits for it if it is `required`.
    """

    call: ReplicateUpdate
    body: memoryview
    required: bool
    done: threading.Event = field(default_factory=threading.Event)
    failed: str = ""


class ReplicaSender:
    """Sends the updates of a part to one other server, in a thread of its own; they are acknowledged in order.

    A `complete` replica has all that the primary has, and from then on no update counts that it did not apply. Until
    then it is given a copy and the updates since, and no thread waits for it unless it falls far behind.
    """

    def __init__(
        self,
        part: ReplicatedPart,
        seat: Seat,
        since: int,
        number: int,
        complete: bool,
        connect: Connect,
        on_complete: Callable[[ReplicatedPart, Seat, int], object],
        on_lost: Callable[[ReplicatedPart, Seat, str], object],
    ) -> None:
        self.seat, self.since = seat, since
        self.complete = complete
        self.failed = ""
        self._part, self._number = part, number
        self._connect, self._on_complete, self._on_lost = connect, on_complete, on_lost
        self._queue: queue.Queue[PendingUpdate | None] = queue.Queue()
        self._cancelled = threading.Event()
        self._guard = threading.Lock()
        self._sock: socket.socket | None = None
        self._in_flight: PendingUpdate | None = None
        self._thread = threading.Thread(target=self._run, name="shoal-replica", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, update: bytes, version: int, body: memoryview) -> PendingUpdate:
        """Queue an update; call it under the part's lock."""
        call = ReplicateUpdate(self._part.generation, self._part.number, self._number, version, update)
        with self._guard:
            pending = PendingUpdate(call, body, required=self.complete or self._queue.qsize() >= MAX_BACKLOG)
            if self.failed:
                pending.failed = self.failed
                pending.done.set()
            else:
                self._queue.put(pending)
        return pending

    def close(self) -> None:
        """Stop replicating; updates that are not acknowledged fail."""
        self._cancelled.set()
        self._fail("the replica is no longer needed")
        if self._sock is not None:
            shut(self._sock)
        self._queue.put(None)

    def _run(self) -> None:
        sock = None
        try:
            sock = self._sock = self._connect(self.seat, self._cancelled)
            if self.complete:
                # Without the part's lock, whose holder may be waiting for this very connection.
                self._part.replicas[self.seat.member] = self
            else:
                self._send_copy(sock)
            while not self._cancelled.is_set():
                self._complete_if_caught_up()
                pending = self._queue.get()
                if pending is None:
                    return
                self._in_flight = pending
                self._call(sock, pending.call, [pending.body])
                self._in_flight = None
                pending.done.set()
        except (OSError, ExchangeBroken) as error:
            lost = not self._cancelled.is_set()
            self._fail(str(error))
            if lost:
                self._on_lost(self._part, self.seat, str(error))
        finally:
            if sock is not None:
                disown(sock)

    def _send_copy(self, sock: socket.socket) -> None:
        part = self._part
        with part.lock:
            meta, buffers = part.capture()
            version = part.version
            part.replicas[self.seat.member] = self
        sizes = tuple(len(buffer) for buffer in buffers)
        self._call(sock, InstallReplica(part.generation, part.number, self._number, version, meta, sizes), buffers)

    def _complete_if_caught_up(self) -> None:
        with self._guard:
            if self.complete or not self._queue.empty() or self._cancelled.is_set():
                return
            self.complete = True
        self._on_complete(self._part, self.seat, self.since)

    def _call(self, sock: socket.socket, call: rpc.ServerCall, buffers: Sequence[rpc.Raw]) -> None:
        rpc.send(sock, call, buffers)
        reply, _ = rpc.receive_reply(sock)
        if reply.kind != "done":
            raise ExchangeBroken(f"{self.seat.member} refused: {reply.reason or reply.kind}", (self.seat.member,))

    def _fail(self, why: str) -> None:
        """Fail every update that is queued or in flight, and wake the threads that wait for them."""
        with self._guard:
            self.failed = self.failed or why
            if (pending := self._in_flight) is not None and not pending.done.is_set():
                pending.failed = self.failed
                pending.done.set()
            while True:
                try:
                    pending = self._queue.get_nowait()
                except queue.Empty:
                    return
                if pending is not None:
                    pending.failed = self.failed
                    pending.done.set()
