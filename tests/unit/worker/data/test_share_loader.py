from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from shoal.core.data.sample_order import SampleOrder
from shoal.errors import BadSize, SampleFailed
from shoal.torch.data.fetch import share_loader
from shoal.worker.data.share_loader import Reader, ShareLoader


def nothing_ahead(step: int) -> None:
    return None


class Augmented(Dataset[Any]):
    """Sample i with noise of all three global generators."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        noise = [random.random(), float(np.random.rand()), torch.rand(()).item(), float(np.random.randint(1000))]
        return torch.tensor([index, *noise], dtype=torch.float64)


class AugmentedInBulk(Augmented):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class CountsCalls(Dataset[Any]):
    def __init__(self) -> None:
        self.bulk: list[list[int]] = []

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("asked one by one")

    def __getitems__(self, indices: list[int]) -> list[int]:
        self.bulk.append(indices)
        return indices


def joined(loader: ShareLoader, step: int, spans: list[tuple[int, int]]) -> Any:
    return torch.cat([piece for span in spans for piece in loader.take(step, span, nothing_ahead)])


@pytest.mark.parametrize("dataset", [Augmented(), AugmentedInBulk(), Subset(Augmented(), range(40))])
def test_augmentation_does_not_depend_on_the_split(dataset: Any) -> None:
    order = SampleOrder(40, 16, epochs=2, seed=3)
    whole = joined(share_loader(dataset, order), 4, [(0, 16)])
    for spans in ([(0, 7), (7, 16)], [(0, 1), (1, 2), (2, 16)]):
        assert torch.equal(joined(share_loader(dataset, order, micro=3), 4, spans), whole)


def test_augmentation_differs_between_epochs_samples_and_seeds() -> None:
    order = SampleOrder(40, 40, epochs=2, seed=3)
    loader = share_loader(Augmented(), order)
    draws = [joined(loader, step, [(0, 40)])[:, 1] for step in (0, 1)]
    draws.append(joined(share_loader(Augmented(), SampleOrder(40, 40, seed=4)), 0, [(0, 40)])[:, 1])
    assert torch.cat(draws).unique().numel() == 120


def test_reading_preserves_the_global_random_state() -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), torch.rand(()).item()

    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    expected = draw()
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    loader = share_loader(Augmented(), SampleOrder(40, 16))
    loader.take(0, (0, 16), nothing_ahead)
    loader.placeholder_batch(1)
    assert draw() == expected


def test_tensors_are_indexed_in_one_call_with_the_same_result() -> None:
    data = TensorDataset(torch.arange(20.0).reshape(10, 2), torch.arange(10))
    order = SampleOrder(10, 5, seed=1)
    x, y = share_loader(data, order).take(1, (1, 4), nothing_ahead)[0]
    slow_x, slow_y = share_loader(data, order, collate=torch.utils.data.default_collate).take(1, (1, 4), nothing_ahead)[
        0
    ]
    assert torch.equal(x, slow_x)
    assert torch.equal(y, slow_y)
    assert y.tolist() == order.ids(1, 1, 4).tolist()


def test_subset_of_a_subset_reads_the_right_samples() -> None:
    data = Subset(Subset(TensorDataset(torch.arange(100)), range(50, 100)), [3, 1, 4])
    assert share_loader(data, SampleOrder(3, 3, shuffle=False)).take(0, (0, 3), nothing_ahead)[0][0].tolist() == [
        53,
        51,
        54,
    ]


def test_getitems_is_called_once_per_micro_batch() -> None:
    data = CountsCalls()
    loader = share_loader(data, SampleOrder(10, 6, shuffle=False), micro=3, collate=list)
    assert loader.take(0, (0, 6), nothing_ahead) == [[0, 1, 2], [3, 4, 5]]
    assert data.bulk == [[0, 1, 2], [3, 4, 5]]


def test_micro_batches_are_nearly_equal() -> None:
    loader = share_loader(list(range(40)), SampleOrder(40, 20), micro=4)
    assert loader.sizes((0, 9)) == (3, 3, 3)
    assert [len(piece) for piece in loader.take(0, (0, 9), nothing_ahead)] == [3, 3, 3]
    assert loader.sizes((5, 5)) == ()
    loader.micro_batch_size = None
    assert loader.sizes((0, 9)) == (9,)


def test_empty_share_reads_nothing_and_its_placeholder_has_two_samples() -> None:
    loader = share_loader(Augmented(), SampleOrder(40, 8))
    assert loader.take(0, (3, 3), nothing_ahead) == []
    assert loader.placeholder_batch(0).shape == (2, 5)
    assert share_loader(Augmented(), SampleOrder(40, 1)).placeholder_batch(0).shape == (1, 5)


class FailingDataset(Dataset[Any]):
    def __getitem__(self, index: int) -> Any:
        if index == 7:
            raise KeyError("no such file")
        return torch.zeros(index)


def test_error_in_the_dataset_names_the_sample_and_keeps_its_traceback() -> None:
    with pytest.raises(SampleFailed, match="sample 7 cannot be read: KeyError") as caught:
        share_loader(FailingDataset(), SampleOrder(10, 4, shuffle=False)).take(1, (0, 4), nothing_ahead)
    assert "__getitem__" in caught.value.__notes__[0]


def test_samples_that_cannot_be_collated_are_named() -> None:
    with pytest.raises(SampleFailed, match="samples 1, 2") as caught:
        share_loader(FailingDataset(), SampleOrder(10, 4, shuffle=False)).take(0, (1, 3), nothing_ahead)
    assert "collate" in caught.value.do


@pytest.mark.parametrize("bad", [{"workers": -1}, {"prefetch": 0}, {"micro": -2}])
def test_invalid_options_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(BadSize):
        share_loader(Augmented(), SampleOrder(40, 8), **bad)  # type: ignore[arg-type]


def test_forked_child_that_collects_a_loader_leaves_its_threads_alone() -> None:
    class Ahead:
        def close(self) -> None:
            os.write(ends[1], b"closed")

    ends = os.pipe()
    loader = Reader(Ahead())  # type: ignore[arg-type]
    child = os.fork()
    if child == 0:
        del loader
        os._exit(0)
    os.waitpid(child, 0)
    os.write(ends[1], b"nothing, then ")
    del loader
    assert os.read(ends[0], 100) == b"nothing, then closed"
