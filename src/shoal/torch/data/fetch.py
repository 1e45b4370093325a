"""Readers of PyTorch data: map-style datasets and streams, with torch's collation, generators and worker processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Subset, TensorDataset, default_collate

from shoal.core.data.lanes import LaneLayout
from shoal.core.data.sample_order import SampleOrder
from shoal.core.validation import checked_int
from shoal.errors import BadSize
from shoal.torch.data.worker_processes import WorkerPool
from shoal.worker.data.fetch import Batch, Collate, Fetcher, Watch
from shoal.worker.data.lane import Open, Shards
from shoal.worker.data.rng_state import RngState
from shoal.worker.data.share_loader import ShareLoader
from shoal.worker.data.stream_reader import LaneReader, LaneSource


class TorchRngState(RngState):
    """State of the generators of Python, NumPy and torch's CPU; data is not read on other devices."""

    def seed(self, seed: int) -> None:
        super().seed(seed)
        torch.default_generator.manual_seed(seed)

    def state(self) -> tuple[Any, ...]:
        return *super().state(), torch.default_generator.get_state()

    def restore(self, state: tuple[Any, ...]) -> None:
        super().restore(state)
        torch.default_generator.set_state(state[2])

    def same(self, before: tuple[Any, ...], after: tuple[Any, ...]) -> bool:
        return super().same(before, after) and torch.equal(before[2], after[2])


class TorchFetcher(Fetcher):
    """Fetcher that indexes all rows of a TensorDataset at once."""

    def __init__(self, dataset: Any, order: SampleOrder, collate: Collate | None = None) -> None:
        source, indices = _unwrap(dataset)
        super().__init__(source, order, collate or default_collate, TorchRngState(), indices)
        indexable = type(source) is TensorDataset and collate is None
        self._tensors: tuple[torch.Tensor, ...] | None = source.tensors if indexable else None

    @property
    def quiet(self) -> bool:
        return self._tensors is not None

    def _batch(self, ids: NDArray[np.int64], epoch: int, watch: Watch) -> Batch | None:
        if self._tensors is None:
            return super()._batch(ids, epoch, watch)
        rows = torch.from_numpy(self._indices_of(ids))
        return [tensor[rows] for tensor in self._tensors]


class LoaderParts(NamedTuple):
    """Arguments of a `ShareLoader`."""

    order: SampleOrder
    fetcher: Fetcher
    ahead: WorkerPool | None
    micro: int | None


def loader_parts(
    dataset: Any,
    order: SampleOrder,
    workers: int = 0,
    prefetch: int = 2,
    collate: Collate | None = None,
    micro: int | None = None,
    pin_memory: bool = False,
) -> LoaderParts:
    """Return the parts of a loader that reads a map-style dataset in `workers` processes or, if 0, in this one."""
    workers, prefetch = checked_int("workers", workers, 0), checked_int("prefetch", prefetch)
    micro = None if micro is None else checked_int("micro", micro)
    fetcher = TorchFetcher(dataset, order, collate)
    pin = pin_memory and torch.cuda.is_available()
    return LoaderParts(order, fetcher, WorkerPool(fetcher, workers, prefetch, pin) if workers else None, micro)


def share_loader(dataset: Any, order: SampleOrder, *args: Any, **kwargs: Any) -> ShareLoader:
    """Return a loader of slices of global batches; the other arguments are those of `loader_parts`."""
    return ShareLoader(*loader_parts(dataset, order, *args, **kwargs))


def lane_reader(
    shards: Sequence[Any],
    layout: LaneLayout,
    collate: Collate | None = None,
    open: Open | None = None,
    workers: int = 0,
    prefetch: int = 2,
    pin_memory: bool = False,
) -> LaneReader:
    """Return a reader of a stream; with `workers=1` a separate process reads ahead."""
    if workers not in (0, 1):
        raise BadSize(
            f"invalid workers={workers}", why="a stream is read by one process", do="pass workers=0 or workers=1"
        )
    kept_steps = prefetch * workers + 1
    source = LaneSource(Shards(shards, open), layout, collate or default_collate, TorchRngState(), kept_steps)
    pin = pin_memory and torch.cuda.is_available()
    return LaneReader(source, WorkerPool(source, 1, prefetch, pin) if workers else None)


def _unwrap(dataset: Any) -> tuple[Any, NDArray[np.int64] | None]:
    """Return the dataset inside torch's Subset and its indices; `Subset.__getitems__` would bypass seeding."""
    indices: NDArray[np.int64] | None = None
    while type(dataset) is Subset:
        inner = np.asarray(dataset.indices, dtype=np.int64)
        indices = inner if indices is None else inner[indices]
        dataset = dataset.dataset
    return dataset, indices
