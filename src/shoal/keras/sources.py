"""What Keras models are fed with, as something that samples can be taken out of in any order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from shoal.core.order import Order
from shoal.errors import UnusableData
from shoal.worker.data.fetch import Batch, Fetcher, Watch
from shoal.worker.data.generators import Generators

Rows = NDArray[np.int64]
KEPT_ITEMS = 4


class Source(ABC):
    """Samples by number. `shuffled` says whether their numbers may be drawn in any order at no extra cost."""

    shuffled = True

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def rows(self, ids: Rows, epoch: int) -> Batch:
        """One batch of these samples."""


class Arrays(Source):
    """NumPy arrays, or whatever can be made into them, in any nesting; the first axis counts samples."""

    def __init__(self, data: tuple[Any, ...]) -> None:
        self._data = keras.tree.map_structure(lambda one: None if one is None else np.asarray(one), data)
        lengths = {one.shape[0] if one.ndim else -1 for one in keras.tree.flatten(self._data) if one is not None}
        if len(lengths) != 1 or -1 in lengths:
            raise UnusableData(
                "the arrays do not have the same number of samples",
                why=f"their first axes have {', '.join(map(str, sorted(lengths))) or 'no'} elements",
                do="give every sample one row in every array",
            )
        self._length = lengths.pop()

    def __len__(self) -> int:
        return self._length

    def rows(self, ids: Rows, epoch: int) -> Batch:  # noqa: ARG002
        return keras.tree.map_structure(lambda one: None if one is None else one[ids], self._data)


class Items(Source):
    """A PyDataset: its items are batches of its own, which are read whole, by whoever has most of one.

    Items are shuffled, samples within an item are not: a PyDataset does that itself.
    """

    shuffled = False

    def __init__(self, dataset: Any, seed: int, shuffle: bool) -> None:
        try:
            count = dataset.num_batches
        except NotImplementedError:
            count = None
        if count is None:
            raise UnusableData(
                "the PyDataset has no length",
                why="without one nobody knows where an epoch ends",
                do="define __len__, the number of its batches",
            )
        if count < 1:
            raise UnusableData("the PyDataset is empty", do="check what it is made from")
        self._dataset, self._count = dataset, int(count)
        self._kept: OrderedDict[int, Any] = OrderedDict()
        self._items = Order(samples=self._count, size=1, epochs=1, seed=seed, shuffle=shuffle)
        self._size = _length(self._item(0))
        # Whichever item is last in an epoch, the short one is: its place does not depend on the order.
        self._last = _length(self._item(self._count - 1))
        if self._last > self._size:
            raise UnusableData("the last item of the PyDataset is longer than the first", do="make all items alike")

    def __len__(self) -> int:
        return (self._count - 1) * self._size + self._last

    def rows(self, ids: Rows, epoch: int) -> Batch:
        parts = []
        numbers, starts = np.unique(ids // self._size, return_index=True)
        for number in numbers[np.argsort(starts)]:
            inside = ids[ids // self._size == number] % self._size
            item = self._item(self._which(int(number), epoch))
            parts.append(keras.tree.map_structure(lambda one, inside=inside: _pick(one, inside), item))
        return keras.tree.map_structure(_joined, *parts) if len(parts) > 1 else parts[0]

    def _which(self, number: int, epoch: int) -> int:
        """The item that takes this place in an epoch; the short one stays last."""
        if number == self._count - 1 and self._last < self._size:
            return number
        shuffled = [int(one) for one in self._items.ids_at(epoch, 0, self._count)]
        if self._last < self._size:
            shuffled.remove(self._count - 1)
        return shuffled[number]

    def _item(self, number: int) -> Any:
        if number not in self._kept:
            self._kept[number] = self._dataset[number]
            while len(self._kept) > KEPT_ITEMS:
                self._kept.popitem(last=False)
        return self._kept[number]


class SourceFetcher(Fetcher):
    """Reads batches from a source, and weighs their samples by class if asked to."""

    def __init__(self, source: Source, order: Order, class_weight: Mapping[int, float] | None = None) -> None:
        super().__init__(source, order, list, Generators())
        self._classes = dict(class_weight) if class_weight is not None else None

    @property
    def quiet(self) -> bool:
        return isinstance(self._source, Arrays)

    def _batch(self, ids: Rows, epoch: int, watch: Watch) -> Batch | None:
        if not watch(int(ids[0])):
            return None
        return self._weighed(self._source.rows(ids, epoch))

    def _one_by_one(self, ids: Rows, epoch: int, watch: Watch) -> list[Any] | None:
        """For ghosts: a batch is all that they need."""
        found = self._batch(ids, epoch, watch)
        return None if found is None else [found]

    def collate(self, samples: list[Any]) -> Batch:
        return samples[0]

    def _weighed(self, batch: Any) -> Any:
        if self._classes is None:
            return batch
        x, y, weight = (*batch, None)[:3]
        labels = np.asarray(y)
        if labels.ndim > 1:
            labels = labels.argmax(-1) if labels.shape[-1] != 1 else labels.reshape(len(labels))
        of_class = np.array([self._classes.get(round(float(one)), 1.0) for one in labels], keras.config.floatx())
        return x, y, of_class if weight is None else of_class * np.asarray(weight)


def source_of(data: Any, y: Any, sample_weight: Any, seed: int, shuffle: bool) -> Source:
    """The source for whatever `model.fit` takes, as far as samples can be taken out of it by number."""
    if isinstance(data, keras.utils.PyDataset):
        _alone(y, sample_weight, "PyDataset")
        return Items(data, seed, shuffle)
    if y is None and sample_weight is None:
        data = data if isinstance(data, tuple) else (data,)
        return Arrays(data)
    return Arrays((data, y) if sample_weight is None else (data, y, sample_weight))


def is_tf_dataset(data: Any) -> bool:
    """Whether this is a tf.data pipeline; TensorFlow is not imported to find out."""
    return any(kind.__name__ == "DatasetV2" and "tensorflow" in kind.__module__ for kind in type(data).__mro__)


def _alone(y: Any, sample_weight: Any, what: str) -> None:
    if y is not None or sample_weight is not None:
        raise UnusableData(f"y and sample_weight cannot be passed beside a {what}", do=f"let the {what} give them")


def _length(item: Any) -> int:
    return int(np.shape(next(one for one in keras.tree.flatten(item) if one is not None))[0])


def _pick(one: Any, inside: Rows) -> Any:
    return None if one is None else np.asarray(one)[inside]


def _joined(*parts: Any) -> Any:
    return None if parts[0] is None else np.concatenate(parts)
