"""Ring algorithms: gather of small records, and reduce of vectors.

In both, a rank sends its own bytes first and then what it receives, in the same order: the outgoing stream of an
operation is the rank's own part followed by the incoming stream. So a byte may leave as soon as it has been received
(and added, in a reduce). Sending, receiving and adding overlap without any schedule.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.worker.collectives.exchange import Adder, plain_add
from shoal.worker.collectives.ring_links import EAGER_BYTES, HEADER_BYTES, RingLinks

SEGMENT_BYTES = 256 << 10


def gather(links: RingLinks, header: bytes, own: memoryview) -> memoryview:
    """Send `own` all the way round; return the rows of the other ranks, the previous rank's first."""
    width, hops = len(own), links.size - 1
    outbox = memoryview(header + own)
    inbox = memoryview(bytearray(HEADER_BYTES + hops * width))
    first, last_in = HEADER_BYTES + width, HEADER_BYTES + hops * width
    last_out = first + (hops - 1) * width
    needs_credit = links.begin(width)
    sent = got = 0
    while sent < last_out or got < last_in or needs_credit:
        limit = min(last_out, first + max(0, got - HEADER_BYTES))
        if needs_credit:
            needs_credit = links.lacks_credit(sent)
        if needs_credit:
            limit = min(limit, EAGER_BYTES)
        moved = 0
        if sent < limit:
            is_own = sent < first
            offset = 0 if is_own else HEADER_BYTES - first
            source, end = (outbox, min(first, limit)) if is_own else (inbox, limit)
            moved = links.send(source[sent + offset : end + offset])
            sent += moved
        if got < last_in:
            arrived = links.receive(inbox[got:])
            if got < HEADER_BYTES <= got + arrived:
                links.compare(header, inbox[:HEADER_BYTES])
            got += arrived
            moved += arrived
        if not moved and (sent < last_out or got < last_in or needs_credit):
            starved = needs_credit and (sent >= EAGER_BYTES or got == last_in)
            links.wait(got < last_in, sent < limit, sent < last_out or needs_credit, starved)
        links.check()
    links.end()
    return inbox[HEADER_BYTES:]


class RingReduce:
    """One sum of a vector in place: a reduce-scatter of its chunks, then an all-gather of the sums.

    `scratch` has room for one segment, which arrives there before it is added.
    """

    def __init__(
        self,
        links: RingLinks,
        header: bytes,
        rank: int,
        flat: NDArray[Any],
        add: Adder | None,
        scratch: NDArray[np.uint8],
    ) -> None:
        size, item = links.size, flat.itemsize
        self._links, self._header = links, memoryview(header)
        self._flat, self._raw, self._item = flat, flat.view(np.uint8).data, item
        self._add: Adder = add if add is not None else plain_add
        bounds = [flat.size * i // size * item for i in range(size + 1)]
        chunks = [(rank - hop) % size for hop in range(2 * size - 1)]
        self._spans = [(bounds[chunk], bounds[chunk + 1]) for chunk in chunks]
        self._last, self._sums = 2 * size - 2, size - 1
        self._scratch, self._scratch_raw, self._addends = scratch, scratch.data, scratch.view(flat.dtype)
        self._inbox = memoryview(bytearray(HEADER_BYTES))
        self._header_sent = self._header_got = 0
        self._sent_bytes = self._filled = 0
        # The span that is being sent and the position in it; the span that is being received is the one after it.
        self._out_at, self._out_pos = 0, self._spans[0][0]
        self._in_at, self._in_pos = 1, self._spans[1][0]
        self._needs_credit = False

    def run(self) -> None:
        """Return when the sum is complete."""
        links = self._links
        self._needs_credit = links.begin(self._flat.nbytes - self._flat.nbytes // links.size)
        while self._out_at < self._last or self._in_at <= self._last or self._needs_credit:
            if self._needs_credit:
                self._needs_credit = links.lacks_credit(self._sent_bytes)
            moved, writing = self._push() if self._out_at < self._last else (0, False)
            if self._in_at <= self._last:
                moved += self._pull()
            if not moved:
                reading, unsent = self._in_at <= self._last, self._out_at < self._last
                starved = self._needs_credit and (self._sent_bytes >= EAGER_BYTES or not reading)
                links.wait(reading, writing, unsent or self._needs_credit, starved)
            links.check()
        links.end()

    def _push(self) -> tuple[int, bool]:
        """Send what may leave; return how many bytes that was, and whether there was anything to send."""
        stop, moved = self._spans[self._out_at][1], 0
        limit = stop if self._out_at == 0 or self._in_at > self._out_at else self._in_pos
        limit = min(limit, self._out_pos + SEGMENT_BYTES)
        if self._needs_credit:
            limit = min(limit, self._out_pos + EAGER_BYTES - self._sent_bytes)
        if self._header_sent < HEADER_BYTES:
            moved = self._links.send(self._header[self._header_sent :], more=limit > self._out_pos)
            self._header_sent += moved
            if self._header_sent < HEADER_BYTES:
                return moved, True
        if writing := self._out_pos < limit:
            count = self._links.send(self._raw[self._out_pos : limit])
            self._out_pos += count
            self._sent_bytes += count
            moved += count
        if self._out_pos == stop:
            self._out_at += 1
            self._out_pos = self._spans[self._out_at][0]
            moved += 1
        return moved, writing

    def _pull(self) -> int:
        """Receive what has arrived, and add or keep it; return how many bytes that was."""
        if self._header_got < HEADER_BYTES:
            moved = self._links.receive(self._inbox[self._header_got :])
            self._header_got += moved
            if self._header_got == HEADER_BYTES:
                self._links.compare(bytes(self._header), self._inbox)
            return moved
        stop, moved = self._spans[self._in_at][1], 0
        if self._in_pos < stop:
            moved = self._pull_addends(stop) if self._in_at <= self._sums else self._pull_sums(stop)
        if self._in_pos == stop:
            self._in_at += 1
            if self._in_at <= self._last:
                self._in_pos = self._spans[self._in_at][0]
            moved += 1
        return moved

    def _pull_sums(self, stop: int) -> int:
        moved = self._links.receive(self._raw[self._in_pos : min(stop, self._in_pos + SEGMENT_BYTES)])
        self._in_pos += moved
        return moved

    def _pull_addends(self, stop: int) -> int:
        room = min(len(self._scratch_raw), stop - self._in_pos)
        moved = self._links.receive(self._scratch_raw[self._filled : room])
        self._filled += moved
        whole = self._filled // self._item
        if moved and whole:
            at = self._in_pos // self._item
            self._add(self._flat[at : at + whole], self._addends[:whole])
            self._in_pos += whole * self._item
            rest = self._filled - whole * self._item
            self._scratch[:rest] = self._scratch[self._filled - rest : self._filled]
            self._filled = rest
        return moved
