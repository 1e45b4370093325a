"""Sums round a ring whose bits do not depend on who holds what: partial sums travel as nodes of one fixed tree.

As in a ring of sums each chunk of the vector starts at another rank and goes once round; but what travels is not one
sum: it is the fewest nodes of the tree that the shards so far make up, mostly one or two. Every rank adds what the tree
lets it and passes the rest on. A message says which shards it holds, so a rank without any needs to know nothing.
"""

from __future__ import annotations

import struct
from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.core.shares.reduction_tree import NO_SHARDS, ShardRange, TreeMerge, merge, nodes, union
from shoal.worker.collectives.exchange import Adder, TreePartials
from shoal.worker.collectives.ring_algorithms import SEGMENT_BYTES
from shoal.worker.collectives.ring_links import EAGER_BYTES, HEADER_BYTES, RingLinks

HELD = struct.Struct("<III")
# Nodes of one member rarely number more; it only decides from which size on a credit is asked for.
USUAL_NODES = 4


def settle(flat: NDArray[Any], part: TreePartials, add: Adder) -> None:
    """The sum of one member that holds all shards."""
    with np.errstate(all="ignore"):
        found = _applied(merge(NO_SHARDS, part.held), list(part.nodes), add)
    _store(flat, found, complete=part.held.complete)


class ExactReduce:
    """One sum over shards, written to `flat` on every rank."""

    def __init__(
        self, links: RingLinks, header: bytes, rank: int, flat: NDArray[Any], add: Adder, part: TreePartials
    ) -> None:
        size, item = links.size, flat.itemsize
        self._links, self._flat, self._add, self._part = links, flat, add, part
        self._raw, self._item = flat.view(np.uint8).data, item
        self._header, self._inbox = header, memoryview(bytearray(HEADER_BYTES))
        self._segment = SEGMENT_BYTES // item
        bounds = [flat.size * i // size for i in range(size + 1)]
        chunks = [(rank - hop) % size for hop in range(2 * size - 1)]
        self._spans = [(bounds[chunk], bounds[chunk + 1]) for chunk in chunks]
        self._last, self._sums = 2 * size - 2, size - 1
        self._outbox: deque[memoryview] = deque([memoryview(header)])
        self._sent_bytes = 0
        self._needs_credit = False
        # what is being received: the header, then hop after hop, of which each sum begins with what it holds
        self._hop = self._header_got = 0
        self._notice = memoryview(bytearray(HELD.size))
        self._arrived: ShardRange | None = None
        self._merge = merge(NO_SHARDS, part.held)
        self._rows: NDArray[Any] | None = None
        self._got, self._at = 0, self._spans[0][0]

    def run(self) -> None:
        """Return when the sum is complete everywhere that this rank has to do with."""
        links = self._links
        self._needs_credit = links.begin(self._flat.nbytes * USUAL_NODES)
        self._begin_own()
        while self._outbox or self._hop <= self._last or self._needs_credit:
            if self._needs_credit:
                self._needs_credit = links.lacks_credit(self._sent_bytes)
            moved, writing = self._push()
            if self._hop <= self._last:
                moved += self._pull()
            if not moved:
                reading, unsent = self._hop <= self._last, bool(self._outbox) or self._hop < self._last
                starved = self._needs_credit and (self._sent_bytes >= EAGER_BYTES or not reading)
                links.wait(reading, writing, unsent or self._needs_credit, starved)
            links.check()
        links.end()

    def _begin_own(self) -> None:
        """The chunk that starts here: nothing has arrived for it."""
        self._arrived = NO_SHARDS
        self._tell(self._part.held)
        self._take_over_all()
        self._next_hop()

    # --- sending

    def _push(self) -> tuple[int, bool]:
        """Send what may leave; how much that was, and whether there was anything to send."""
        if not self._outbox:
            return 0, False
        view = self._outbox[0][:SEGMENT_BYTES]
        if self._needs_credit:
            view = view[: max(0, EAGER_BYTES - self._sent_bytes)]
        if not view:
            return 0, False
        count = self._links.send(view, more=len(view) <= HEADER_BYTES and len(self._outbox) > 1)
        self._sent_bytes += count
        if count == len(self._outbox[0]):
            self._outbox.popleft()
        elif count:
            self._outbox[0] = self._outbox[0][count:]
        return count, True

    def _send(self, piece: NDArray[Any]) -> None:
        if piece.size:
            self._outbox.append(piece.view(np.uint8).data)

    def _tell(self, held: ShardRange) -> None:
        self._outbox.append(memoryview(HELD.pack(held.shards, held.start, held.stop)))

    # --- receiving

    def _pull(self) -> int:
        """Receive what is there; how much that was."""
        if self._header_got < HEADER_BYTES:
            moved = self._links.receive(self._inbox[self._header_got :])
            self._header_got += moved
            if self._header_got == HEADER_BYTES:
                self._links.compare(self._header, self._inbox)
            return moved
        if self._hop > self._sums:
            return self._pull_sums()
        return self._pull_notice() if self._arrived is None else self._pull_nodes()

    def _pull_notice(self) -> int:
        moved = self._links.receive(self._notice[self._got :])
        self._got += moved
        if self._got == HELD.size:
            self._got = 0
            arrived = self._arrived = ShardRange(*HELD.unpack(self._notice))
            self._merge = merge(arrived, self._part.held)
            if self._hop < self._sums:
                self._tell(union(arrived, self._part.held))
            if arrived.empty:
                self._take_over_all()
                self._next_hop()
            elif self._at == self._spans[self._hop][1]:
                self._next_hop()
        return moved

    def _pull_nodes(self) -> int:
        """Receive all nodes of one segment, then add what can be added and pass on what is left."""
        assert self._arrived is not None
        stop = min(self._at + self._segment, self._spans[self._hop][1])
        count = len(nodes(self._arrived))
        if self._rows is None:
            longest = min(self._segment, self._spans[self._hop][1] - self._at)
            self._rows = np.empty(count * longest, self._flat.dtype)
        wanted = count * (stop - self._at)
        moved = self._links.receive(self._rows.view(np.uint8).data[self._got : wanted * self._item])
        self._got += moved
        if self._got == wanted * self._item:
            self._take_over(list(self._rows[:wanted].reshape(count, -1)), stop)
            self._got = 0
            if any(number < count for number in self._merge.kept):
                self._rows = None
            if self._at == self._spans[self._hop][1]:
                self._next_hop()
        return moved

    def _pull_sums(self) -> int:
        stop = self._spans[self._hop][1]
        if self._at == stop:
            self._next_hop()
            return 1
        start, limit = self._at * self._item + self._got, min(stop, self._at + self._segment) * self._item
        moved = self._links.receive(self._raw[start:limit])
        if moved and self._hop < self._last:
            self._outbox.append(self._raw[start : start + moved])
        whole, self._got = divmod(self._got + moved, self._item)
        self._at += whole
        if self._at == stop:
            self._next_hop()
        return moved

    def _take_over_all(self) -> None:
        """Nothing arrives for this chunk: it is as we hold it."""
        end = self._spans[self._hop][1]
        while self._at < end:
            self._take_over([], min(self._at + self._segment, end))

    def _take_over(self, rows: list[NDArray[Any]], stop: int) -> None:
        start = self._at
        found = _applied(self._merge, rows + [node[start:stop] for node in self._part.nodes], self._add)
        if self._hop < self._sums:
            for piece in found:
                self._send(piece)
        else:
            assert self._arrived is not None
            _store(self._flat[start:stop], found, complete=union(self._arrived, self._part.held).complete)
            self._send(self._flat[start:stop])
        self._at = stop

    def _next_hop(self) -> None:
        self._hop += 1
        self._arrived, self._rows, self._got = None, None, 0
        if self._hop <= self._last:
            self._at = self._spans[self._hop][0]


def _applied(how: TreeMerge, operands: list[NDArray[Any]], add: Adder) -> list[NDArray[Any]]:
    for target, source in how.additions:
        add(operands[target], operands[source])
    return [operands[number] for number in how.kept]


def _store(flat: NDArray[Any], found: list[NDArray[Any]], *, complete: bool) -> None:
    """Write the total of all shards; without any shard at all it is zero."""
    if found and not complete:
        raise ValueError("the members do not hold all shards between them")
    if not found:
        flat.fill(0)
    elif found[0].ctypes.data != flat.ctypes.data:
        flat[...] = found[0]
