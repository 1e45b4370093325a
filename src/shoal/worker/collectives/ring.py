"""Ring collectives over plain TCP sockets: all-reduce and all-gather, served by one thread, abortable at any moment.

Theory of operation
-------------------
The ranks of a world form a ring: each sends to the next rank and receives from the previous one. Operations are
submitted from any thread, queued, and carried out in order by the ring's thread, so the caller overlaps them with its
computation and waits on a `RingWork` when it needs the result. Every rank must submit the same operations in the same
order. Each one begins with a header (kind, sequence number, type, size) that is compared with the previous rank's, so
ranks that disagree fail with a message instead of mixing their bytes.

**Reduce** of a large vector is a reduce-scatter followed by an all-gather. The vector is cut into one chunk per rank.
Chunk c starts at rank c and goes round once; each rank adds its own values as it passes, so after size - 1 hops it
holds the complete sum; then the sums go round once more and replace the partial values. Every rank sends and receives
2 (size - 1) / size of the vector. There is no schedule: whatever a rank receives and has added may leave at once, so
sending, receiving and adding overlap (`ring_algorithms`).

**Order of sums.** Floating-point addition is not associative. Each chunk is summed in ring order starting at its own
rank, by a single chain, and the result is copied, so all ranks hold the same bits. They differ between worlds of
different size. A small vector (up to 32 KiB) is cheaper as a gather of whole rows, which every rank adds in rank order.
In exact mode partial sums travel as nodes of one fixed tree, and the bits do not depend on the world (`exact_ring`).

**Gather** sends every rank's record all the way round; after size - 1 hops every rank has all rows.

**Flow control.** A rank that computes does not read, and bytes that are not read would fill its TCP window until
TCP_USER_TIMEOUT took it for dead. Hence at most 64 KiB of an operation are sent before the next rank has shown, by one
byte of credit sent backwards, that it has begun the same operation (`ring_links`).

**Failure and abort.** The thread watches both connections even when idle. A rank that gives up on purpose (`abort`,
`close`) sends a farewell, so its neighbours know that it left; a connection that closes without one makes its rank a
suspect. Either way the rank closes both connections, the break travels round the ring within a round trip, and every
pending operation raises ExchangeBroken. A ring never recovers: the next world has a new one. Buffers of a failed
operation hold undefined values; the step is repeated.

**Catching-up ranks.** A joiner whose state is still on its way takes part in the same operations with zeros, through a
`CatchUpExchange` around its ring. To the other ranks it is a rank like any other, with weight 0.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.worker.collectives.exact_ring import ExactReduce, sum_alone
from shoal.worker.collectives.exchange import Adder, OnBreak, TreePartials, plain_add
from shoal.worker.collectives.ring_algorithms import SEGMENT_BYTES, RingReduce, gather
from shoal.worker.collectives.ring_links import GATHER, REDUCE, TREE_REDUCE, RingLinks, make_header
from shoal.worker.transport.exchange_broken import ExchangeBroken

SMALL_BYTES = 32 << 10
"""Vectors up to this size are gathered whole, in half the hops of a reduce-scatter and all-gather."""


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
        """Wake the waiting threads; called once, when the ring no longer touches the operation's memory."""
        self._result, self._broken = result, broken
        self._gate.release()

    def done(self, timeout_s: float) -> bool:
        """Return whether the operation ends, completely or not, within so many seconds."""
        if not self._gate.acquire(timeout=timeout_s):
            return False
        self._gate.release()
        return True

    def wait(self) -> None:
        """Return when the operation is complete; raise ExchangeBroken if it never will be."""
        with self._gate:
            pass
        if self._broken is not None:
            raise type(self._broken)(self._broken.cause, self._broken.suspects)

    def result(self) -> NDArray[np.float64]:
        """Wait, then return the records of all ranks, one row per rank."""
        self.wait()
        assert self._result is not None
        return self._result


class Ring:
    """The ring of one world; a world of one needs no sockets and no thread.

    `following` and `preceding` are connections to the next and the previous rank, which the ring then owns. `on_break`
    reports a lost neighbour, even while no operation is under way, unless this member gave up by itself.
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
        """Send one small record to all ranks and receive theirs."""
        row = np.array(record, np.float64).reshape(-1)
        return self._submit(RingWork(lambda: self._gather(row)))

    def reduce(self, buffer: NDArray[Any], add: Adder | None = None, part: TreePartials | None = None) -> RingWork:
        """Sum a C-contiguous buffer over all ranks in place, bitwise equal on all; see `Exchange.reduce`."""
        if not buffer.flags.c_contiguous or not buffer.flags.writeable:
            raise ValueError("only a contiguous, writeable buffer can be summed in place")
        flat = buffer.reshape(-1)
        if part is not None:
            part.check(flat)
            return self._submit(RingWork(lambda: self._reduce_tree(flat, add or plain_add, part)))
        return self._submit(RingWork(lambda: self._reduce(flat, add)))

    def has_incoming(self, timeout_s: float) -> bool:
        """Return whether another rank begins an operation within so many seconds; only between operations."""
        return self._links is None or self._links.has_incoming(timeout_s)

    def barrier(self) -> None:
        """Return when every rank has called this."""
        self.gather(np.zeros(1)).wait()

    def abort(self, cause: str) -> None:
        """Fail every operation, pending and future, at once, and let the neighbours notice."""
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
        """The reason why nothing more can be exchanged, None while the ring works."""
        return self._broken

    def _submit(self, work: RingWork) -> RingWork:
        if self._links is None:
            broken = self._broken
            work.finish(work.work() if broken is None else None, broken)
            return work
        with self._lock:
            if self._broken is not None:
                work.finish(broken=self._broken)
                return work
            self._queue.append(work)
            wake, self._resting = self._resting, False
        if wake:
            self._links.wake()
        return work

    def _serve(self) -> None:
        assert self._links is not None
        current: RingWork | None = None
        try:
            # Infinities are the user's business: a gradient scaler looks for them.
            with np.errstate(all="ignore"):
                while True:
                    current = self._take()
                    if current is None:
                        self._links.rest()
                        continue
                    current.finish(current.work())
        except ExchangeBroken as broken:
            self._fail(current, broken)
        except Exception as error:  # noqa: BLE001 - the outer loop: no caller may wait forever, whatever went wrong
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
            own_abort = self._broken is not None
            self._broken = broken = self._broken or broken
            waiting = [current] if current is not None else []
            waiting += self._queue
            self._queue.clear()
        self._links.close()
        for work in waiting:
            work.finish(broken=broken)
        if self._on_break is not None and not own_abort:
            self._on_break(broken.suspects, broken.cause)

    # --- operations, in the ring's thread

    def _gather(self, row: NDArray[np.float64]) -> NDArray[np.float64]:
        if self._links is None:
            return row.reshape(1, -1)
        header = make_header(GATHER, self._next_sequence(), "f8", row.nbytes)
        return np.array(self._rows(header, row))

    def _reduce(self, flat: NDArray[Any], add: Adder | None) -> None:
        if self._links is None:
            return
        header = make_header(REDUCE, self._next_sequence(), flat.dtype.str[1:], flat.nbytes)
        if flat.nbytes > SMALL_BYTES:
            RingReduce(self._links, header, self.rank, flat, add, self._scratch).run()
            return
        first, *others = self._rows(header, flat)
        if add is None:
            # In the order of the ranks on every rank, or the bits would differ.
            for row in others[:-1]:
                first = np.add(first, row)
            np.add(first, others[-1], flat)
            return
        total = first.copy()
        for row in others:
            add(total, row)
        flat[...] = total

    def _reduce_tree(self, flat: NDArray[Any], add: Adder, part: TreePartials) -> None:
        if self._links is None:
            sum_alone(flat, part, add)
            return
        header = make_header(TREE_REDUCE, self._next_sequence(), flat.dtype.str[1:], flat.nbytes)
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
