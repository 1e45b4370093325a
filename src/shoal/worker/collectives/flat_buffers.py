"""Flat buffers for gradients that are computed all at once, and their sum over the members of a world."""

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
    """Shape and type of an array; half precision is summed in float32."""

    def __init__(self, shape: Sequence[int], dtype: DTypeLike) -> None:
        self.shape = tuple(shape)
        # Sums of half precision would lose more than they save.
        self.dtype = np.dtype(np.float64 if np.dtype(dtype) == np.float64 else np.float32)
        self.bytes = int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


class FlatBuffers:
    """Arrays packed into a few flat buckets, and a tail of other numbers that are summed along with them.

    `views` are the arrays, in order; each is a view of its bucket.
    """

    def __init__(self, specs: Sequence[ArraySpec], tail: int) -> None:
        self.views: list[NDArray[Any]] = []
        self._buckets: list[NDArray[Any]] = []
        for first, stop in _bucket_ranges(specs):
            self._add_bucket(specs[first:stop])
        self.tail = np.zeros(tail, np.float64)
        self._works: list[Work] = []

    def zero_buffers(self) -> list[ZeroBuffer]:
        """Return buffers of the same shapes, for a catching-up rank without gradients."""
        return [(np.zeros_like(buffer), None, None) for buffer in (*self._buckets, self.tail)]

    def load(self, arrays: Sequence[NDArray[Any]], scale: float, *, add: bool) -> None:
        """Store these arrays times `scale`; with `add`, add them to what was stored before."""
        for view, array in zip(self.views, arrays, strict=True):
            if add:
                view += array * view.dtype.type(scale)
            else:
                np.multiply(array, view.dtype.type(scale), out=view)

    def clear(self) -> None:
        """Set all arrays to zero."""
        for bucket in self._buckets:
            bucket.fill(0)

    def send(self, exchange: Exchange) -> None:
        """Start the sums of all buckets; the tail follows in `finish`."""
        self._works = [exchange.reduce(bucket) for bucket in self._buckets]

    def finish(self, exchange: Exchange, divisor: float) -> None:
        """Sum the tail too and wait for all sums; divide the arrays, not the tail, by `divisor`."""
        self._works.append(exchange.reduce(self.tail))
        for work in self._works:
            work.wait()
        if divisor != 1.0:
            for bucket in self._buckets:
                bucket /= bucket.dtype.type(divisor)

    def _add_bucket(self, specs: Sequence[ArraySpec]) -> None:
        starts, total = [], 0
        for spec in specs:
            starts.append(total)
            total += -(-spec.bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        raw = np.zeros(total + ALIGNMENT_BYTES, np.uint8)
        offset = -raw.ctypes.data % ALIGNMENT_BYTES
        aligned = raw[offset : offset + total]
        self._buckets.append(aligned.view(specs[0].dtype))
        for start, spec in zip(starts, specs, strict=True):
            self.views.append(aligned[start : start + spec.bytes].view(spec.dtype).reshape(spec.shape))


def _bucket_ranges(specs: Sequence[ArraySpec]) -> list[tuple[int, int]]:
    """Return ranges (first, stop) of consecutive arrays of one type, each of about one bucket."""
    ranges: list[tuple[int, int]] = []
    room = 0
    for number, spec in enumerate(specs):
        if not ranges or room <= 0 or spec.dtype != specs[number - 1].dtype:
            ranges.append((number, number))
            room = BUCKET_BYTES
        ranges[-1] = (ranges[-1][0], number + 1)
        room -= spec.bytes
    return ranges
