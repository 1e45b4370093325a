"""How a primary keeps one other copy of a part up to date."""

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

Connect = Callable[[Seat, threading.Event], socket.socket]


@dataclass(eq=False, slots=True)
class PendingUpdate:
    """An entry on its way to a copy."""

    entry: ReplicateUpdate
    body: memoryview
    done: threading.Event = field(default_factory=threading.Event)
    failed: str = ""


class ReplicaSender:
    """The copy of a part on one other server; entries are sent in a thread of their own, and acknowledged in order.

    A copy that is `complete` has all that the primary has; from then on nothing counts that it did not take in. Until
    then it is given a copy, and then what has happened since, without anybody waiting for it.
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
        self._entries: queue.Queue[PendingUpdate | None] = queue.Queue()
        self._cancelled = threading.Event()
        self._guard = threading.Lock()
        self._sock: socket.socket | None = None
        self._in_flight: PendingUpdate | None = None
        self._thread = threading.Thread(target=self._run, name="shoal-replica", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, what: bytes, version: int, body: memoryview) -> PendingUpdate:
        """Send an entry; call it under the part's lock."""
        sent = PendingUpdate(ReplicateUpdate(self._part.life, self._part.number, self._number, version, what), body)
        with self._guard:
            if self.failed:
                sent.failed = self.failed
                sent.done.set()
            else:
                self._entries.put(sent)
        return sent

    def close(self) -> None:
        """Give the copy up."""
        self._cancelled.set()
        self._fail("it is not needed any more")
        if self._sock is not None:
            shut(self._sock)
        self._entries.put(None)

    def _run(self) -> None:
        sock = None
        try:
            sock = self._sock = self._connect(self.seat, self._cancelled)
            if self.complete:
                # Without the lock: whoever has it may be waiting for us.
                self._part.replicas[self.seat.member] = self
            else:
                self._give_copy(sock)
            while not self._cancelled.is_set():
                self._complete_if_idle()
                sent = self._entries.get()
                if sent is None:
                    return
                self._in_flight = sent
                self._ask(sock, sent.entry, [sent.body])
                self._in_flight = None
                sent.done.set()
        except (OSError, ExchangeBroken) as error:
            lost = not self._cancelled.is_set()
            self._fail(str(error))
            if lost:
                self._on_lost(self._part, self.seat, str(error))
        finally:
            if sock is not None:
                disown(sock)

    def _give_copy(self, sock: socket.socket) -> None:
        part = self._part
        with part.lock:
            meta, buffers = part.capture()
            version = part.version
            part.replicas[self.seat.member] = self
        sizes = tuple(len(buffer) for buffer in buffers)
        self._ask(sock, InstallReplica(part.life, part.number, self._number, version, meta, sizes), buffers)

    def _complete_if_idle(self) -> None:
        if self.complete:
            return  # and whoever has the lock may be waiting for us
        with self._part.lock:
            if self.complete or not self._entries.empty() or self._cancelled.is_set():
                return
            self.complete = True
        self._on_complete(self._part, self.seat, self.since)

    def _ask(self, sock: socket.socket, call: rpc.ServerCall, parts: Sequence[rpc.Raw]) -> None:
        rpc.send(sock, call, parts)
        answer, _ = rpc.receive_answer(sock)
        if answer.kind != "done":
            raise ExchangeBroken(f"{self.seat.member} refused: {answer.reason or answer.kind}", (self.seat.member,))

    def _fail(self, why: str) -> None:
        """Nothing more arrives there; tell whoever waits for it."""
        with self._guard:
            self.failed = self.failed or why
            if (sent := self._in_flight) is not None and not sent.done.is_set():
                sent.failed = self.failed
                sent.done.set()
            while True:
                try:
                    sent = self._entries.get_nowait()
                except queue.Empty:
                    return
                if sent is not None:
                    sent.failed = self.failed
                    sent.done.set()
