"""The ring: sums and gathers between members over plain sockets, by one thread, abortable at any moment."""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.worker.collectives.exact_ring import ExactReduce, settle
from shoal.worker.collectives.exchange import Adder, OnBreak, TreePartials, plain_add
from shoal.worker.collectives.ring_algorithms import SEGMENT_BYTES, RingReduce, gather
from shoal.worker.collectives.ring_links import GATHER, MERGE, REDUCE, RingLinks, header_of
from shoal.worker.transport.exchange_broken import ExchangeBroken

SMALL_BYTES = 32 << 10
"""Up to here whole vectors go round, in half the hops of a ring of sums."""


class RingWork:
    """One operation of a ring, from its submission to its end."""

    __slots__ = ("_broken", "_gate", "_result", "work")

    def __init__(self, work: Callable[[], NDArray[np.float64] | None]) -> None:
        self.work = work
        self._gate = threading.Lock()
        self._gate.acquire()
        self._broken: ExchangeBroken | None = None
        self._result: NDArray[np.float64] | None = None

    def finish(self, result: NDArray[np.float64] | None = None, broken: ExchangeBroken | None = None) -> None:
        """Let go whoever waits; called once, when nobody touches the operation's memory any more."""
        self._result, self._broken = result, broken
        self._gate.release()

    def done(self, timeout_s: float) -> bool:
        """Whether the operation ends within so many seconds, well or not."""
        if not self._gate.acquire(timeout=timeout_s):
            return False
        self._gate.release()
        return True

    def wait(self) -> None:
        """Return when the operation is complete; raise ExchangeBroken if it never will be."""
        with self._gate:
            pass
        if self._broken is not None:
            raise ExchangeBroken(self._broken.cause, self._broken.suspects)

    def result(self) -> NDArray[np.float64]:
        """Wait, then return the records of all ranks, one row a rank."""
        self.wait()
        assert self._result is not None
        return self._result


class Ring:
    """One world's ring; a world of one needs no sockets and no thread.

    `following` and `preceding` are connections to the next and the previous rank, which this ring then owns.
    `on_break` hears of a lost neighbour even while no operation is under way, unless this member gave up by itself.
    """

    def __init__(
        self,
        rank: int,
        members: Sequence[str],
        following: socket.socket | None = None,
        preceding: socket.socket | None = None,
        on_break: OnBreak | None = None,
    ) -> None:
        self.rank = rank
        self.size = len(members)
        self._on_break = on_break
        self._queue: deque[RingWork] = deque()
        self._lock = threading.Lock()
        self._resting = False
        self._broken: ExchangeBroken | None = None
        self._sequence = 0
        self._links: RingLinks | None = None
        self._thread: threading.Thread | None = None
        self._scratch = np.empty(SEGMENT_BYTES if self.size > 1 else 0, np.uint8)
        if self.size > 1:
            assert following is not None
            assert preceding is not None
            names = (members[(rank + 1) % self.size], members[rank - 1])
            self._links = RingLinks(self.size, following, preceding, names)
            self._thread = threading.Thread(target=self._serve, name="shoal-ring", daemon=True)
            self._thread.start()

    def gather(self, record: NDArray[np.float64]) -> RingWork:
        """Send one small record to all and receive everybody's."""
        row = np.array(record, np.float64).reshape(-1)
        return self._submit(RingWork(lambda: self._gather(row)))

    def reduce(self, buffer: NDArray[Any], add: Adder | None = None, part: TreePartials | None = None) -> RingWork:
        """Sum a C-contiguous buffer over all ranks in place; bitwise equal on all ranks.

        With `part`, which all ranks then pass, the sum is that of the shards that they hold between them: its bits
        do not depend on who holds which, and what was in the buffer does not count.
        """
        if not buffer.flags.c_contiguous or not buffer.flags.writeable:
            raise ValueError("only a contiguous, writeable buffer can be summed in place")
        flat = buffer.reshape(-1)
        if part is not None:
            part.check(flat)
            return self._submit(RingWork(lambda: self._merge(flat, add or plain_add, part)))
        return self._submit(RingWork(lambda: self._sum(flat, add)))

    def stirs(self, timeout_s: float) -> bool:
        """Whether another rank begins an operation within so many seconds; for a rank that has none under way."""
        return self._links is None or self._links.stirs(timeout_s)

    def barrier(self) -> None:
        """Return when every rank has come here."""
        self.gather(np.zeros(1)).wait()

    def abort(self, cause: str) -> None:
        """Fail every operation, pending and future, at once, and let the links see it."""
        with self._lock:
            if self._broken is None:
                self._broken = ExchangeBroken(cause)
        if self._links is not None:
            self._links.stop(cause)

    def close(self) -> None:
        """End the thread and close both connections; operations under way fail."""
        self.abort("this member closed the ring")
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    @property
    def broken(self) -> ExchangeBroken | None:
        """Why nothing more can be exchanged; None while all is well."""
        return self._broken

    def _submit(self, ticket: RingWork) -> RingWork:
        if self._links is None:
            broken = self._broken
            ticket.finish(ticket.work() if broken is None else None, broken)
            return ticket
        with self._lock:
            if self._broken is not None:
                ticket.finish(broken=self._broken)
                return ticket
            self._queue.append(ticket)
            wake, self._resting = self._resting, False
        if wake:
            self._links.wake()
        return ticket

    def _serve(self) -> None:
        assert self._links is not None
        current: RingWork | None = None
        try:
            # infinities are the user's business: a gradient scaler looks for them
            with np.errstate(all="ignore"):
                while True:
                    current = self._take()
                    if current is None:
                        self._links.rest()
                        continue
                    current.finish(current.work())
        except ExchangeBroken as broken:
            self._fail(current, broken)
        except Exception as error:  # noqa: BLE001 - the outer loop: whatever it is, nobody may wait forever
            self._fail(current, ExchangeBroken(f"the ring failed here: {type(error).__name__}: {error}"))

    def _take(self) -> RingWork | None:
        with self._lock:
            if self._queue:
                return self._queue.popleft()
            self._resting = True
            return None

    def _fail(self, current: RingWork | None, broken: ExchangeBroken) -> None:
        assert self._links is not None
        with self._lock:
            ours = self._broken is not None
            self._broken = broken = self._broken or broken
            waiting = [current] if current is not None else []
            waiting += self._queue
            self._queue.clear()
        self._links.close()
        for ticket in waiting:
            ticket.finish(broken=broken)
        if self._on_break is not None and not ours:
            self._on_break(broken.suspects, broken.cause)

    # --- operations, in the ring's thread

    def _gather(self, row: NDArray[np.float64]) -> NDArray[np.float64]:
        if self._links is None:
            return row.reshape(1, -1)
        header = header_of(GATHER, self._next_sequence(), "f8", row.nbytes)
        return np.array(self._rows(header, row))

    def _sum(self, flat: NDArray[Any], add: Adder | None) -> None:
        if self._links is None:
            return
        header = header_of(REDUCE, self._next_sequence(), flat.dtype.str[1:], flat.nbytes)
        if flat.nbytes > SMALL_BYTES:
            RingReduce(self._links, header, self.rank, flat, add, self._scratch).run()
            return
        first, *others = self._rows(header, flat)
        if add is None:
            # in the order of the ranks on every rank, or the bits would differ
            for row in others[:-1]:
                first = np.add(first, row)
            np.add(first, others[-1], flat)
            return
        total = first.copy()
        for row in others:
            add(total, row)
        flat[...] = total

    def _merge(self, flat: NDArray[Any], add: Adder, part: TreePartials) -> None:
        if self._links is None:
            settle(flat, part, add)
            return
        header = header_of(MERGE, self._next_sequence(), flat.dtype.str[1:], flat.nbytes)
        ExactReduce(self._links, header, self.rank, flat, add, part).run()

    def _rows(self, header: bytes, own: NDArray[Any]) -> list[NDArray[Any]]:
        assert self._links is not None
        arrived = np.frombuffer(gather(self._links, header, own.view(np.uint8).data), own.dtype)
        rows = [own] * self.size
        for hop in range(1, self.size):
            rows[self.rank - hop] = arrived[(hop - 1) * own.size : hop * own.size]
        return rows

    def _next_sequence(self) -> int:
        self._sequence += 1
        return self._sequence
