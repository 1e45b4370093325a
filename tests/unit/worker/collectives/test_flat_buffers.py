from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shoal.testing.threaded_world import FixedWorldSession, together
from shoal.worker.collectives import flat_buffers
from shoal.worker.collectives.flat_buffers import ArraySpec, FlatBuffers


def test_half_precision_is_summed_in_float32() -> None:
    specs = [ArraySpec((2, 3), dtype) for dtype in ("float16", "float32", "float64")]
    assert [spec.dtype.name for spec in specs] == ["float32", "float32", "float64"]
    assert [view.dtype.name for view in FlatBuffers(specs, 0).views] == ["float32", "float32", "float64"]


def test_views_are_aligned_and_do_not_overlap() -> None:
    buffers = FlatBuffers([ArraySpec((3,), "float32"), ArraySpec((), "float32"), ArraySpec((2, 2), "float64")], 1)
    for number, view in enumerate(buffers.views):
        assert view.ctypes.data % 64 == 0
        view[...] = number
    assert [set(view.ravel()) for view in buffers.views] == [{0.0}, {1.0}, {2.0}]


def test_micro_batches_are_added_with_their_weights() -> None:
    buffers = FlatBuffers([ArraySpec((2,), "float32")], 0)
    buffers.load([np.array([1, 2], np.float32)], 0.5, add=False)
    buffers.load([np.array([4, 4], np.float32)], 0.25, add=True)
    assert buffers.views[0].tolist() == [1.5, 2.0]
    buffers.load([np.array([1, 2], np.float32)], 1.0, add=False)
    assert buffers.views[0].tolist() == [1.0, 2.0]


def test_sum_over_members_divides_the_arrays_but_not_the_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flat_buffers, "BUCKET_BYTES", 64)  # several buckets, as in a large model

    def body(session: FixedWorldSession) -> tuple[list[Any], list[float]]:
        buffers = FlatBuffers([ArraySpec((20,), "float32"), ArraySpec((3,), "float64")], 2)
        assert len(buffers.zero_buffers()) == 3
        rank = session.rank
        buffers.load([np.full(20, rank + 1, np.float32), np.full(3, 10.0 * rank)], 1.0, add=False)
        buffers.tail[:] = (rank, 1)
        assert session.exchange is not None
        buffers.send(session.exchange)
        buffers.finish(session.exchange, divisor=3.0)
        return [view.tolist() for view in buffers.views], buffers.tail.tolist()

    for views, tail in together(3, body):
        assert views == [[2.0] * 20, [10.0] * 3]
        assert tail == [3.0, 3.0]
