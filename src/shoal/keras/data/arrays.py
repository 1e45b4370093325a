"""What Keras models are fed with, as something that samples can be taken out of in any order."""

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
from shoal.errors import ShoalError, UnusableData
from shoal.worker.data.fetch import Batch, Fetcher, Watch, sample_failure, sample_seed
from shoal.worker.data.rng_state import RngState

Rows = NDArray[np.int64]
KEPT_ITEMS = 4


class SampleSource(ABC):
    """Samples by number. `shuffled` says whether their numbers may be drawn in any order at no extra cost."""

    shuffled = True

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def rows(self, ids: Rows, epoch: int) -> Batch:
        """One batch of these samples."""


class SourceWithReaders(NamedTuple):
    """A source, and who reads ahead from it if nothing else is asked for: so many threads, or processes."""

    source: SampleSource
    workers: int = 0
    processes: bool = False


class ArraySource(SampleSource):
    """NumPy arrays, or whatever can be made into them, in any nesting; the first axis counts samples.

    As in Keras, whose models have but one type of numbers, double precision becomes what `floatx` is.
    """

    def __init__(self, data: tuple[Any, ...]) -> None:
        self._data = keras.tree.map_structure(lambda one: None if one is None else np.asarray(one), data)
        arrays = _leaves(self._data)
        single = next((given for given, one in zip(_leaves(data), arrays, strict=True) if not one.ndim), None)
        if single is not None:
            raise UnusableData(
                f"a {type(single).__name__} cannot be shared out",
                why="samples are taken out of the data by their numbers",
                do="pass arrays, a keras.utils.PyDataset, or a tf.data pipeline",
            )
        lengths = {one.shape[0] for one in arrays}
        if lengths == {0}:
            raise UnusableData("the arrays are empty", do="check what they are made from")
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
        return keras.tree.map_structure(lambda one: None if one is None else _in_floatx(one[ids]), self._data)


class PyDatasetSource(SampleSource):
    """A PyDataset, or what is like one: its items are batches of its own, which are read whole.

    Items are shuffled, samples within an item are not: a PyDataset does that itself. `seeding` says whether the global
    random generators are seeded before an item is read, so that it is the same whoever reads it.
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
                why="without one nobody knows where an epoch ends",
                do="define __len__, the number of its batches",
            )
        if count < 1:
            raise UnusableData(f"the {what} is empty", do="check what it is made from")
        self.seeding = True
        self._dataset, self._count, self._seed, self._what = dataset, int(count), seed, what
        self._kept: OrderedDict[tuple[int, int], Any] = OrderedDict()
        self._keeping = threading.Lock()
        with RngState().preserved():
            self._size, self._last = (_length(self._item(number, 0)) for number in (0, self._count - 1))
        if self._last > self._size:
            raise UnusableData(f"the last item of the {what} is longer than the first", do="make all items alike")
        # Whichever item is last in an epoch, the short one is: its place does not depend on the order.
        whole = self._count - 1 if self._last < self._size else self._count
        self._items = SampleOrder(samples=whole, size=1, epochs=1, seed=seed, shuffle=shuffle)

    def __len__(self) -> int:
        return (self._count - 1) * self._size + self._last

    def rows(self, ids: Rows, epoch: int) -> Batch:
        parts = []
        numbers, starts = np.unique(ids // self._size, return_index=True)
        for number in numbers[np.argsort(starts)]:
            inside = ids[ids // self._size == number] % self._size
            item = self._checked(self._which(int(number), epoch), epoch)
            parts.append(keras.tree.map_structure(lambda one, inside=inside: _pick(one, inside), item))
        return keras.tree.map_structure(_joined, *parts) if len(parts) > 1 else parts[0]

    def _which(self, number: int, epoch: int) -> int:
        """The item that takes this place in an epoch; the short one stays last."""
        return int(self._items.ids_at(epoch, number, number + 1)[0]) if number < self._items.samples else number

    def _checked(self, number: int, epoch: int) -> Any:
        item, expected = self._item(number, epoch), self._last if number == self._count - 1 else self._size
        if _length(item) != expected:
            raise UnusableData(
                f"item {number} of the {self._what} has {_length(item)} samples, not {expected}",
                why="where a sample is must be known without reading all items",
                do="give all items but the last as many samples",
            )
        return item

    def _item(self, number: int, epoch: int) -> Any:
        place = epoch, number
        with self._keeping:
            item = self._kept.get(place)
        if item is None:
            if self.seeding:
                RngState().seed(sample_seed(self._seed, epoch, number))
            item = self._dataset[number]
            with self._keeping:
                self._kept[place] = item
                while len(self._kept) > KEPT_ITEMS:
                    self._kept.popitem(last=False)
        return item


class SourceFetcher(Fetcher):
    """Reads batches from a source, and weighs their samples by class if asked to."""

    def __init__(
        self, source: SampleSource, order: SampleOrder, class_weight: Mapping[int, float] | None = None
    ) -> None:
        super().__init__(source, order, list, RngState())
        self._classes = class_weight

    @property
    def quiet(self) -> bool:
        return not isinstance(self._source, PyDatasetSource)

    def _batch(self, ids: Rows, epoch: int, watch: Watch) -> Batch | None:
        if not watch(int(ids[0])):
            return None
        try:
            found = self._source.rows(ids, epoch)
        except ShoalError:
            raise
        except Exception as error:
            which = f"samples {', '.join(map(str, ids[:8]))}{' …' if len(ids) > 8 else ''}"
            what = f"one of {which} cannot be read: {type(error).__name__}: {error}"
            raise sample_failure(what, which, "look for it in the data; all samples must be alike", error) from error
        return weighed(found, self._classes)

    def _read_singly(self, ids: Rows, epoch: int, watch: Watch) -> list[Any] | None:
        """For ghosts: a batch is all that they need."""
        found = self._batch(ids, epoch, watch)
        return None if found is None else [found]

    def collate(self, samples: list[Any]) -> Batch:
        return samples[0]


def weighed(batch: Any, classes: Mapping[int, float] | None) -> Any:
    """A batch whose samples count as much as their class says, on top of the weights that they have."""
    if classes is None:
        return batch
    x, y, weight = (*batch, None, None)[:3] if isinstance(batch, tuple | list) else (batch, None, None)
    if y is None or keras.tree.is_nested(y):
        raise UnusableData(
            "class_weight needs labels, and one output",
            why=f"the data has {'no labels' if y is None else 'several'}",
            do="pass sample_weight to shoal.batches, or let the data give weights",
        )
    labels = np.asarray(y)
    if labels.ndim > 1:
        labels = labels.argmax(-1) if labels.shape[-1] != 1 else labels.reshape(len(labels))
    of_class = np.array([classes.get(round(float(one)), 1.0) for one in labels], keras.config.floatx())
    return x, y, of_class if weight is None else of_class * np.asarray(weight)


def source_of(data: Any, y: Any, sample_weight: Any, seed: int, shuffle: bool) -> SourceWithReaders:
    """The source for whatever `model.fit` takes, as far as samples can be taken out of it by number."""
    if isinstance(data, keras.utils.PyDataset):
        _alone(y, sample_weight, "PyDataset")
        # As Keras does: one worker that is a thread is nobody.
        workers = data.workers if data.workers > 1 or data.use_multiprocessing else 0
        return SourceWithReaders(PyDatasetSource(data, seed, shuffle), workers, data.use_multiprocessing)
    if y is None and sample_weight is None:
        data = data if isinstance(data, tuple) else (data,)
        return SourceWithReaders(ArraySource(data))
    return SourceWithReaders(ArraySource((data, y) if sample_weight is None else (data, y, sample_weight)))


def is_tf_dataset(data: Any) -> bool:
    """Whether this is a tf.data pipeline; TensorFlow is not imported to find out."""
    return any(kind.__name__ == "DatasetV2" and "tensorflow" in kind.__module__ for kind in type(data).__mro__)


def _alone(y: Any, sample_weight: Any, what: str) -> None:
    if y is not None or sample_weight is not None:
        raise UnusableData(f"y and sample_weight cannot be passed beside a {what}", do=f"let the {what} give them")


def _leaves(data: Any) -> list[Any]:
    return [one for one in keras.tree.flatten(data) if one is not None]


def _in_floatx(array: NDArray[Any]) -> NDArray[Any]:
    return array.astype(keras.config.floatx(), copy=False) if "float" in str(array.dtype) else array


def _length(item: Any) -> int:
    return int(np.shape(next(one for one in keras.tree.flatten(item) if one is not None))[0])


def _pick(one: Any, inside: Rows) -> Any:
    return None if one is None else np.asarray(one)[inside]


def _joined(*parts: Any) -> Any:
    return None if parts[0] is None else np.concatenate(parts)
