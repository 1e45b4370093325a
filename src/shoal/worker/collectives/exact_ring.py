"""Exact ring reduce: a sum over shards whose bits do not depend on which rank holds which shards.

A global batch is cut into a fixed number of shards, and their gradients are added along one fixed binary tree
(`core.shares.reduction_tree`). As in the plain reduce, each chunk of the vector starts at another rank and goes round
once, but it does not travel as one partial sum. It travels as the fewest tree nodes that cover the shards added so far,
usually one or two. Every rank adds the pairs that are siblings in the tree and passes the other nodes on; after the
last hop one node is left, the root. Then the sums go round once more, as in the plain reduce.

Each partial sum is preceded by the range of shards that it covers, so a rank without shards needs no other knowledge.
The ranks must hold all shards between them; if some are missing at the end, the operation fails.
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

SHARD_RANGE = struct.Struct("<III")
# A member rarely has more nodes; this only decides from which size on a credit is needed.
USUAL_NODES = 4


def sum_alone(flat: NDArray[Any], part: TreePartials, add: Adder) -> None:
    """Write the sum of a single member that holds all shards to `flat`."""
    with np.errstate(all="ignore"):
        remaining = _merge_nodes(merge(NO_SHARDS, part.shard_range), list(part.nodes), add)
    _store_total(flat, remaining, complete=part.shard_range.complete)


class ExactReduce:
    """One sum over shards; writes the total to `flat` on every rank."""

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
        # State of receiving: the header, then hop after hop; each partial sum begins with its range of shards.
        self._hop = self._header_got = 0
        self._range_inbox = memoryview(bytearray(SHARD_RANGE.size))
        self._arrived: ShardRange | None = None
        self._merge = merge(NO_SHARDS, part.shard_range)
        self._rows: NDArray[Any] | None = None
        self._got, self._at = 0, self._spans[0][0]

    def run(self) -> None:
        """Return when this rank has the sum and has passed on everything that the next rank needs."""
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
        """Start the chunk that begins at this rank: nothing arrives for it."""
        self._arrived = NO_SHARDS
        self._send_range(self._part.shard_range)
        self._merge_all()
        self._next_hop()

    # --- sending

    def _push(self) -> tuple[int, bool]:
        """Send what may leave; return how many bytes that was, and whether there was anything to send."""
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

    def _send(self, values: NDArray[Any]) -> None:
        if values.size:
            self._outbox.append(values.view(np.uint8).data)

    def _send_range(self, shards: ShardRange) -> None:
        self._outbox.append(memoryview(SHARD_RANGE.pack(shards.shards, shards.start, shards.stop)))

    # --- receiving

    def _pull(self) -> int:
        """Receive what has arrived; return how many bytes that was."""
        if self._header_got < HEADER_BYTES:
            moved = self._links.receive(self._inbox[self._header_got :])
            self._header_got += moved
            if self._header_got == HEADER_BYTES:
                self._links.compare(self._header, self._inbox)
            return moved
        if self._hop > self._sums:
            return self._pull_sums()
        return self._pull_range() if self._arrived is None else self._pull_nodes()

    def _pull_range(self) -> int:
        moved = self._links.receive(self._range_inbox[self._got :])
        self._got += moved
        if self._got == SHARD_RANGE.size:
            self._got = 0
            arrived = self._arrived = ShardRange(*SHARD_RANGE.unpack(self._range_inbox))
            self._merge = merge(arrived, self._part.shard_range)
            if self._hop < self._sums:
                self._send_range(union(arrived, self._part.shard_range))
            if arrived.empty:
                self._merge_all()
                self._next_hop()
            elif self._at == self._spans[self._hop][1]:
                self._next_hop()
        return moved

    def _pull_nodes(self) -> int:
        """Receive all nodes of one segment, then add what the tree allows and pass on the rest."""
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
            self._merge_segment(list(self._rows[:wanted].reshape(count, -1)), stop)
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

    def _merge_all(self) -> None:
        """Pass on a whole chunk as this rank holds it, because nothing arrives for it."""
        end = self._spans[self._hop][1]
        while self._at < end:
            self._merge_segment([], min(self._at + self._segment, end))

    def _merge_segment(self, rows: list[NDArray[Any]], stop: int) -> None:
        start = self._at
        remaining = _merge_nodes(self._merge, rows + [node[start:stop] for node in self._part.nodes], self._add)
        if self._hop < self._sums:
            for node in remaining:
                self._send(node)
        else:
            assert self._arrived is not None
            _store_total(
                self._flat[start:stop], remaining, complete=union(self._arrived, self._part.shard_range).complete
            )
            self._send(self._flat[start:stop])
        self._at = stop

    def _next_hop(self) -> None:
        self._hop += 1
        self._arrived, self._rows, self._got = None, None, 0
        if self._hop <= self._last:
            self._at = self._spans[self._hop][0]


def _merge_nodes(plan: TreeMerge, operands: list[NDArray[Any]], add: Adder) -> list[NDArray[Any]]:
    """Carry out the additions of a merge in place; return the nodes that remain."""
    for target, source in plan.additions:
        add(operands[target], operands[source])
    return [operands[number] for number in plan.kept]


def _store_total(flat: NDArray[Any], remaining: list[NDArray[Any]], *, complete: bool) -> None:
    """Write the total of all shards, zero without any shard; raise ValueError if some shards are missing."""
    if remaining and not complete:
        raise ValueError("the members do not hold all shards between them")
    if not remaining:
        flat.fill(0)
    elif remaining[0].ctypes.data != flat.ctypes.data:
        flat[...] = remaining[0]
