"""Gradients that are computed all at once, as flat buffers that are summed over the members of a world."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from shoal.worker.collectives.catch_up import ZeroBuffer
from shoal.worker.collectives.exchange import Exchange, Work

# While one bucket is on its way, the next one is filled.
BUCKET_BYTES = 8 << 20
ALIGNMENT_BYTES = 64


class ArraySpec:
    """The shape and type of an array."""

    def __init__(self, shape: Sequence[int], dtype: DTypeLike) -> None:
        self.shape = tuple(shape)
        # Sums of half precision would lose more than they save.
        self.dtype = np.dtype(np.float64 if np.dtype(dtype) == np.float64 else np.float32)
        self.bytes = int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


class FlatBuffers:
    """Arrays in a few flat buffers, and a tail of other numbers that are summed along with them."""

    def __init__(self, likes: Sequence[ArraySpec], tail: int) -> None:
        self.views: list[NDArray[Any]] = []
        self._buckets: list[NDArray[Any]] = []
        for first, stop in _grouped(likes):
            self._add(likes[first:stop])
        self.tail = np.zeros(tail, np.float64)
        self._tickets: list[Work] = []

    def zero_buffers(self) -> list[ZeroBuffer]:
        """Buffers like ours, for a shadow that takes part without gradients."""
        return [(np.zeros_like(buffer), None, None) for buffer in (*self._buckets, self.tail)]

    def load(self, arrays: Sequence[NDArray[Any]], scale: float, *, add: bool) -> None:
        """Take these arrays times `scale`; `add` them to what was taken before."""
        for view, array in zip(self.views, arrays, strict=True):
            if add:
                view += array * view.dtype.type(scale)
            else:
                np.multiply(array, view.dtype.type(scale), out=view)

    def clear(self) -> None:
        """Take part with zeros."""
        for bucket in self._buckets:
            bucket.fill(0)

    def send(self, exchange: Exchange) -> None:
        """Let the sums begin, all but that of the tail."""
        self._tickets = [exchange.reduce(bucket) for bucket in self._buckets]

    def finish(self, exchange: Exchange, divisor: float) -> None:
        """Sum the tail, too, and wait for all; the arrays, not the tail, are divided afterwards."""
        self._tickets.append(exchange.reduce(self.tail))
        for ticket in self._tickets:
            ticket.wait()
        if divisor != 1.0:
            for bucket in self._buckets:
                bucket /= bucket.dtype.type(divisor)

    def _add(self, likes: Sequence[ArraySpec]) -> None:
        starts, total = [], 0
        for like in likes:
            starts.append(total)
            total += -(-like.bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        raw = np.zeros(total + ALIGNMENT_BYTES, np.uint8)
        offset = -raw.ctypes.data % ALIGNMENT_BYTES
        aligned = raw[offset : offset + total]
        self._buckets.append(aligned.view(likes[0].dtype))
        for start, like in zip(starts, likes, strict=True):
            self.views.append(aligned[start : start + like.bytes].view(like.dtype).reshape(like.shape))


def _grouped(likes: Sequence[ArraySpec]) -> list[tuple[int, int]]:
    """Runs of arrays of one type that fill a bucket."""
    found: list[tuple[int, int]] = []
    room = 0
    for number, like in enumerate(likes):
        if not found or room <= 0 or like.dtype != likes[number - 1].dtype:
            found.append((number, number))
            room = BUCKET_BYTES
        found[-1] = (found[-1][0], number + 1)
        room -= like.bytes
    return found
