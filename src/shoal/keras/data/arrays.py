"""Sample sources: what Keras models are trained on, as samples that can be read by number in any order."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple

import keras
import numpy as np
from numpy.typing import NDArray

from shoal.core.data.sample_order import SampleOrder
from shoal.core.nouns import counted
from shoal.errors import ShoalError, UnusableData
from shoal.worker.data.fetch import Batch, Fetcher, Watch, sample_failure, sample_seed
from shoal.worker.data.rng_state import RngState
from shoal.worker.data.sample_signature import signatures

Rows = NDArray[np.int64]
CACHED_ITEMS = 4


class SampleSource(ABC):
    """Samples by number; `shuffled` says whether reading them in random order costs nothing extra."""

    shuffled = True

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def rows(self, ids: Rows, epoch: int) -> Batch:
        """Return these samples as one batch."""


class SourceWithReaders(NamedTuple):
    """A source, and the number and kind of workers that read ahead from it by default."""

    source: SampleSource
    workers: int = 0
    processes: bool = False


class ArraySource(SampleSource):
    """NumPy arrays, or what can be converted to them, in any nesting; the first axis counts samples.

    Floating-point arrays are converted to Keras' `floatx`, as `model.fit` does.
    """

    def __init__(self, data: Any) -> None:
        self._data = keras.tree.map_structure(lambda leaf: None if leaf is None else np.asarray(leaf), data)
        arrays = _leaves(self._data)
        scalar = next((leaf for leaf, array in zip(_leaves(data), arrays, strict=True) if not array.ndim), None)
        if scalar is not None:
            raise UnusableData(
                f"a {type(scalar).__name__} cannot be split into shares",
                why="samples are read by their numbers",
                do="pass arrays, a keras.utils.PyDataset, or a tf.data pipeline",
            )
        lengths = {array.shape[0] for array in arrays}
        if lengths == {0}:
            raise UnusableData("the arrays are empty", do="check the code that creates them")
        if len(lengths) != 1:
            raise UnusableData(
                "the arrays do not have the same number of samples",
                why=f"their first axes have {', '.join(map(str, sorted(lengths))) or 'no'} elements",
                do="give every sample one row in every array",
            )
        self._length = int(lengths.pop())

    def __len__(self) -> int:
        return self._length

    def rows(self, ids: Rows, epoch: int) -> Batch:  # noqa: ARG002
        return keras.tree.map_structure(lambda array: None if array is None else _in_floatx(array[ids]), self._data)


class PyDatasetSource(SampleSource):
    """A PyDataset, or an object with its interface: its items are batches, which are read whole.

    Items are shuffled; samples within an item are not, since a PyDataset does that itself. `seeding` says whether the
    global random generators are seeded before an item is read, so that every member reads the same item.
    """

    shuffled = False

    def __init__(self, dataset: Any, seed: int, shuffle: bool, what: str = "PyDataset") -> None:
        try:
            count = dataset.num_batches
        except NotImplementedError:
            count = None
        if count is None:
            raise UnusableData(
                f"the {what} has no length",
                why="the end of an epoch must be known in advance",
                do="define __len__, the number of its batches",
            )
        if count < 1:
            raise UnusableData(f"the {what} is empty", do="check the code that creates it")
        self.seeding = True
        self._dataset, self._count, self._seed, self._what = dataset, int(count), seed, what
        self._cache: OrderedDict[tuple[int, int], Any] = OrderedDict()
        self._cache_lock = threading.Lock()
        with RngState().preserved():
            self._item_size, self._last_size = (_length(self._item(number, 0)) for number in (0, self._count - 1))
        if self._last_size > self._item_size:
            raise UnusableData(
                f"the last item of the {what} is longer than the first", do="give all items the same size"
            )
        # A short item stays last in every epoch, so that the item of a sample follows from the sample's position.
        full_items = self._count - 1 if self._last_size < self._item_size else self._count
        self._item_order = SampleOrder(samples=full_items, size=1, epochs=1, seed=seed, shuffle=shuffle)

    def __len__(self) -> int:
        return (self._count - 1) * self._item_size + self._last_size

    def rows(self, ids: Rows, epoch: int) -> Batch:
        parts = []
        positions, starts = np.unique(ids // self._item_size, return_index=True)
        for position in positions[np.argsort(starts)]:
            inside = ids[ids // self._item_size == position] % self._item_size
            item = self._checked_item(self._item_at(int(position), epoch), epoch)
            parts.append(keras.tree.map_structure(lambda leaf, inside=inside: _pick(leaf, inside), item))
        return keras.tree.map_structure(_concatenated, *parts) if len(parts) > 1 else parts[0]

    def signatures(self) -> str:
        """Return signatures of the first and the last sample, whose items are read again: cached ones never differ."""
        return signatures(self._sample, len(self), 2)

    def _sample(self, number: int) -> tuple[int, Any]:
        position, inside = divmod(number, self._item_size)
        with RngState().preserved():
            RngState().seed(sample_seed(self._seed, 0, position))
            item = self._dataset[position]
        return number, keras.tree.map_structure(lambda leaf: None if leaf is None else np.asarray(leaf)[inside], item)

    def _item_at(self, position: int, epoch: int) -> int:
        """Return the number of the item at a position in an epoch."""
        if position >= self._item_order.samples:
            return position
        return int(self._item_order.ids_at(epoch, position, position + 1)[0])

    def _checked_item(self, number: int, epoch: int) -> Any:
        item, expected = self._item(number, epoch), self._last_size if number == self._count - 1 else self._item_size
        if _length(item) != expected:
            raise UnusableData(
                f"item {number} of the {self._what} has {counted(_length(item), 'sample')}, not {expected}",
                why="the item of a sample must be known without reading all items",
                do="give all items but the last the same number of samples",
            )
        return item

    def _item(self, number: int, epoch: int) -> Any:
        key = epoch, number
        with self._cache_lock:
            item = self._cache.get(key)
        if item is None:
            if self.seeding:
                RngState().seed(sample_seed(self._seed, epoch, number))
            item = self._dataset[number]
            with self._cache_lock:
                self._cache[key] = item
                while len(self._cache) > CACHED_ITEMS:
                    self._cache.popitem(last=False)
        return item


class SourceFetcher(Fetcher):
    """Reads batches from a source; with `class_weight`, adds sample weights by class."""

    def __init__(
        self, source: SampleSource, order: SampleOrder, class_weight: Mapping[int, float] | None = None
    ) -> None:
        super().__init__(source, order, list, RngState())
        self._class_weight = class_weight

    @property
    def quiet(self) -> bool:
        return not isinstance(self._source, PyDatasetSource)

    def _batch(self, ids: Rows, epoch: int, watch: Watch) -> Batch | None:
        if not watch(int(ids[0])):
            return None
        try:
            batch = self._source.rows(ids, epoch)
        except ShoalError:
            raise
        except Exception as error:
            which = f"samples {', '.join(map(str, ids[:8]))}{' …' if len(ids) > 8 else ''}"
            what = f"one of {which} cannot be read: {type(error).__name__}: {error}"
            raise sample_failure(
                what, which, "find it in the data; all samples must have the same form", error
            ) from error
        return with_class_weight(batch, self._class_weight)

    def _read_singly(self, ids: Rows, epoch: int, watch: Watch) -> list[Any] | None:
        """Read the samples as one batch, which is all that a catching-up member needs."""
        batch = self._batch(ids, epoch, watch)
        return None if batch is None else [batch]

    def collate(self, samples: list[Any]) -> Batch:
        return samples[0]


def with_class_weight(batch: Any, class_weight: Mapping[int, float] | None) -> Any:
    """Return a batch whose sample weights are multiplied by the weights of their classes."""
    if class_weight is None:
        return batch
    x, y, weight = (*batch, None, None)[:3] if isinstance(batch, tuple | list) else (batch, None, None)
    if y is None or keras.tree.is_nested(y):
        raise UnusableData(
            "class_weight needs labels, and one output",
            why=f"the data has {'no labels' if y is None else 'several outputs'}",
            do="pass sample_weight to shoal.batches, or let the data yield weights",
        )
    labels = np.asarray(y)
    if labels.ndim > 1:
        labels = labels.argmax(-1) if labels.shape[-1] != 1 else labels.reshape(len(labels))
    weights = np.array([class_weight.get(round(float(label)), 1.0) for label in labels], keras.config.floatx())
    return x, y, weights if weight is None else weights * np.asarray(weight)


def source_of(data: Any, y: Any, sample_weight: Any, seed: int, shuffle: bool) -> SourceWithReaders:
    """Return the source of a PyDataset or of arrays, as `model.fit` takes them."""
    if isinstance(data, keras.utils.PyDataset):
        if y is not None or sample_weight is not None:
            raise UnusableData(
                "y and sample_weight cannot be passed with a PyDataset", do="let the PyDataset yield them"
            )
        # As in Keras, a single worker thread means no worker.
        workers = data.workers if data.workers > 1 or data.use_multiprocessing else 0
        return SourceWithReaders(PyDatasetSource(data, seed, shuffle), workers, data.use_multiprocessing)
    if y is None and sample_weight is None:
        # As in Keras: a batch of x alone is x itself, unless a list of several inputs could be taken for x and y.
        return SourceWithReaders(ArraySource((data,) if isinstance(data, list) else data))
    return SourceWithReaders(ArraySource((data, y) if sample_weight is None else (data, y, sample_weight)))


def is_tf_dataset(data: Any) -> bool:
    """Return whether `data` is a tf.data pipeline, without importing TensorFlow."""
    return any(base.__name__ == "DatasetV2" and "tensorflow" in base.__module__ for base in type(data).__mro__)


def _leaves(data: Any) -> list[Any]:
    return [leaf for leaf in keras.tree.flatten(data) if leaf is not None]


def _in_floatx(array: NDArray[Any]) -> NDArray[Any]:
    return array.astype(keras.config.floatx(), copy=False) if "float" in str(array.dtype) else array


def _length(item: Any) -> int:
    return int(np.shape(_leaves(item)[0])[0])


def _pick(leaf: Any, inside: Rows) -> Any:
    return None if leaf is None else np.asarray(leaf)[inside]


def _concatenated(*parts: Any) -> Any:
    return None if parts[0] is None else np.concatenate(parts)
