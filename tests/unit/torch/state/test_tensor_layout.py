"""Tensors are laid out in few byte buffers and rebuilt over them; an invalid layout is refused."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
import torch

from shoal.errors import StateMalformed
from shoal.torch.state.tensor_layout import SMALL_BYTES, TensorInfo, lay_out, memory_of, rebuild


def copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    infos, buffers = lay_out(tensors, ())
    return rebuild(infos, [buffer.numpy() for buffer in buffers])


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12).reshape(3, 4).T,
        torch.tensor(1.5, dtype=torch.bfloat16),
        torch.empty(0, 3),
        torch.zeros(2).expand(3, 2),
        torch.arange(10.0)[::3],
    ],
    ids=["transposed", "scalar", "empty", "expanded", "strided"],
)
def test_tensor_is_rebuilt(tensor: torch.Tensor) -> None:
    (copy,) = copies([tensor])
    assert copy.dtype == tensor.dtype
    assert torch.equal(copy, tensor)


def test_live_memory_is_not_copied_and_other_memory_is() -> None:
    tensors = [torch.zeros(SMALL_BYTES), torch.zeros(SMALL_BYTES)]
    _, buffers = lay_out(tensors, {memory_of(tensors[0])})
    tensors[0][0] = tensors[1][0] = 1.0
    values = [buffer.view(torch.float32)[0].item() for buffer in buffers]
    assert values == [1.0, 0.0]


def test_small_tensors_share_one_aligned_buffer() -> None:
    infos, buffers = lay_out([torch.ones(n) for n in range(1, 9)], ())
    assert len(buffers) == 1
    assert all(info.offset_bytes % 64 == 0 for info in infos)


def test_few_rows_of_a_large_storage_are_sent_without_the_rest() -> None:
    large = torch.zeros(100_000)
    _, buffers = lay_out([large[:10], large[-10:]], ())
    assert sum(buffer.numel() for buffer in buffers) < 1000


def test_tensors_that_do_not_overlap_have_storages_of_their_own() -> None:
    first, second = copies([torch.ones(4), torch.zeros(4)])
    assert memory_of(first) != memory_of(second)
    assert second.storage_offset() == 0


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "float7"},
        {"buffer": 1},
        {"buffer": -1},
        {"offset_bytes": -4},
        {"offset_bytes": 4},
        {"shape": [5]},
        {"shape": [1 << 62]},
        {"strides": [-1]},
        {"strides": [1, 1]},
        {"shape": [-1]},
    ],
    ids=str,
)
def test_layout_that_does_not_fit_its_buffers_is_refused(change: dict[str, object]) -> None:
    good = TensorInfo(0, 0, "float32", [4], [1])
    buffers = [np.zeros(16, np.uint8)]
    assert rebuild([good], buffers)[0].tolist() == [0.0] * 4
    with pytest.raises(StateMalformed):
        rebuild([msgspec.structs.replace(good, **change)], buffers)
