"""Batches of a dataset are read by their numbers, alike in this process and in any other."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from shoal.core.data.lanes import LaneLayout
from shoal.core.data.sample_order import SampleOrder
from shoal.errors import BadSize
from shoal.torch.data.fetch import TorchFetcher, TorchRngState, lane_reader, loader_parts
from shoal.worker.data.fetch import ReadKey

ORDER = SampleOrder(samples=8, size=4, epochs=2, seed=3)


class Noisy(Dataset[Any]):
    """Samples that draw from all three generators."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return index, random.random(), np.random.rand(), torch.rand(())


def read(dataset: Any, epoch: int, start: int, stop: int, order: SampleOrder = ORDER) -> Any:
    (batch,) = TorchFetcher(dataset, order).read(ReadKey(0, start, stop, None, epoch=epoch), lambda _: True) or [None]
    return batch


def test_rows_of_a_tensor_dataset_are_those_of_its_samples() -> None:
    rows = TensorDataset(torch.arange(8), torch.arange(8) * 2)

    class Plain(Dataset[Any]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> Any:
            return rows[index]

    fast, slow = read(rows, 1, 1, 4), read(Plain(), 1, 1, 4)
    assert [column.tolist() for column in fast] == [column.tolist() for column in slow]
    assert len(fast[0]) == 3


def test_augmentation_depends_on_the_sample_and_the_epoch_only() -> None:
    whole, part, later = read(Noisy(), 0, 0, 4), read(Noisy(), 0, 2, 4), read(Noisy(), 1, 0, 4)
    assert [column[2:].tolist() for column in whole] == [column.tolist() for column in part]
    assert whole[1].tolist() != later[1].tolist()


def test_state_of_the_generators_can_be_compared_and_restored() -> None:
    state = TorchRngState()
    state.seed(1)
    before = state.state()
    drawn = torch.rand(())
    assert not state.same(before, state.state())
    state.restore(before)
    assert torch.rand(()) == drawn


def test_nested_subsets_are_resolved_to_the_dataset_inside() -> None:
    inner = Subset(TensorDataset(torch.arange(100)), range(10, 20))
    (column,) = read(Subset(inner, [7, 5, 3]), 0, 0, 3, SampleOrder(samples=3, size=3, epochs=1, shuffle=False))
    assert column.tolist() == [17, 15, 13]


@pytest.mark.parametrize("arguments", [{"workers": -1}, {"workers": 1, "prefetch": 0}, {"micro": 0}], ids=str)
def test_invalid_numbers_are_refused(arguments: dict[str, int]) -> None:
    with pytest.raises(BadSize):
        loader_parts(TensorDataset(torch.arange(8)), ORDER, **arguments)


def test_stream_has_at_most_one_worker() -> None:
    layout = LaneLayout.of(1, 2, None, 1, 0, False)
    with pytest.raises(BadSize, match="workers=2"):
        lane_reader([[1, 2]], layout, workers=2)
