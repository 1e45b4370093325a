"""The elements of a tf.data pipeline by number, as far as its operations let them be computed so.

`tf.data.experimental.at` does this too, but holds on to functions of the pipeline that TensorFlow drops whenever a seed
is set, and the process dies of it. Here each operation is followed back to where its elements come from, and the
functions of the pipeline are called as functions of ours.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

Flat = list[Any]

# They change nothing about the elements, or their order only.
PASSING = ("OptionsDataset", "PrefetchDataset", "ShuffleDataset")


class PipelineNode(ABC):
    """`length` elements, each of them the tensors of its `spec` in a list; `shuffled` if their order was to be random.

    `one` and `many` are called while a function is traced. Of elements that are batches the last may be `short`; if
    others may be, too, they are `uneven`, and nobody can tell where a sample is.
    """

    def __init__(self, length: int, spec: Any, shuffled: bool = False, short: bool = False) -> None:
        self.length, self.spec, self.shuffled, self.short = length, spec, shuffled, short
        self.uneven = False

    @abstractmethod
    def one(self, number: Any) -> Flat:
        """An element."""

    def many(self, numbers: Any) -> Flat:
        """Several elements, stacked."""
        found = tf.map_fn(self.one, numbers, fn_output_signature=tf.nest.flatten(self.spec))
        return list(found)


class Slices(PipelineNode):
    """Rows of tensors."""

    def __init__(self, tensors: Sequence[Any], spec: Any, shuffled: bool = False) -> None:
        super().__init__(int(tensors[0].shape[0]), spec, shuffled)
        self._tensors = list(tensors)

    def one(self, number: Any) -> Flat:
        return [tensor[number] for tensor in self._tensors]

    def many(self, numbers: Any) -> Flat:
        return [tf.gather(tensor, numbers) for tensor in self._tensors]

    def rows(self) -> Slices | None:
        """The rows of the rows, if these are batches."""
        if len({tensor.shape[1] if tensor.shape.rank > 1 else None for tensor in self._tensors}) != 1:
            return None
        flat = [tf.reshape(tensor, [-1, *tensor.shape[2:]]) for tensor in self._tensors]
        return Slices(flat, _row(self.spec), self.shuffled)


class Mapped(PipelineNode):
    """What a function makes of each element."""

    def __init__(self, inner: PipelineNode, function: Callable[..., Iterable[Any]], spec: Any) -> None:
        super().__init__(inner.length, spec, inner.shuffled, inner.short)
        self._inner, self._function = inner, function

    def one(self, number: Any) -> Flat:
        return list(self._function(*self._inner.one(number)))


class Batched(PipelineNode):
    """Elements put together to batches; the last of them may be short."""

    def __init__(self, inner: PipelineNode, size: int, spec: Any, whole: bool) -> None:
        length = inner.length // size if whole else -(-inner.length // size)
        super().__init__(length, spec, inner.shuffled, short=length * size > inner.length)
        self.inner, self._size = inner, size

    def one(self, number: Any) -> Flat:
        first = number * self._size
        return self.inner.many(tf.range(first, tf.minimum(first + self._size, self.inner.length)))


class Picked(PipelineNode):
    """Some of the elements, or some of them repeatedly; `place` says which one is which."""

    def __init__(self, inner: PipelineNode, length: int, place: Callable[[Any], Any]) -> None:
        last = length > 0 and place(length - 1) == inner.length - 1
        super().__init__(length, inner.spec, inner.shuffled, inner.short and last)
        self.inner, self._place = inner, place

    def one(self, number: Any) -> Flat:
        return self.inner.one(self._place(number))

    def many(self, numbers: Any) -> Flat:
        return self.inner.many(self._place(numbers))


class Repeated(Picked):
    """All elements, several times."""

    def __init__(self, inner: PipelineNode, times: int) -> None:
        super().__init__(inner, inner.length * times, lambda number: number % inner.length)
        self.times, self.uneven = times, inner.short and times > 1


class Zipped(PipelineNode):
    """Elements side by side."""

    def __init__(self, inner: Sequence[PipelineNode], spec: Any) -> None:
        super().__init__(min(one.length for one in inner), spec, short=any(one.short for one in inner))
        self._inner = inner

    def one(self, number: Any) -> Flat:
        return [leaf for part in self._inner for leaf in part.one(number)]

    def many(self, numbers: Any) -> Flat:
        return [leaf for part in self._inner for leaf in part.many(numbers)]


def node_of(dataset: Any) -> PipelineNode | None:
    """The elements of a pipeline by number; None if one of its operations is not known well enough."""
    try:
        return _node(dataset)
    except AttributeError:
        # Another version of TensorFlow has other insides.
        return None


def samples_of(node: PipelineNode) -> PipelineNode | None:
    """The samples in elements that are batches, if they can be had one by one."""
    if isinstance(node, Batched):
        return node.inner
    if isinstance(node, Repeated):
        once = samples_of(node.inner)
        return Repeated(once, node.times) if once is not None else None
    return node.rows() if isinstance(node, Slices) else None


def operations(dataset: Any) -> Iterable[Any]:
    """This dataset, and all that it is made from."""
    yield dataset
    for below in dataset._inputs():
        yield from operations(below)


def kind_of(dataset: Any) -> str:
    """What operation this is: some of TensorFlow's classes are private, others of the same kind are not."""
    return type(dataset).__name__.lstrip("_")


def is_fixed(dataset: Any) -> bool:
    """Whether a pipeline gives the same elements in the same order whenever, and in whichever process, it is read."""
    return all(
        _is_seeded(one)
        and not getattr(one, "_reshuffle_each_iteration", False)
        and getattr(one, "_deterministic", None) != "false"
        for one in operations(dataset)
    )


def _node(dataset: Any) -> PipelineNode | None:
    kind, spec = kind_of(dataset), dataset.element_spec
    if kind == "TensorSliceDataset":
        return Slices(dataset._tensors, spec)
    if kind == "RangeDataset":
        start, stop, step = (int(getattr(dataset, name)) for name in ("_start", "_stop", "_step"))
        return Slices([tf.range(start, stop, step, spec.dtype)], spec)
    if kind == "ZipDataset":
        parts = [_node(one) for one in tf.nest.flatten(dataset._datasets)]
        known = [part for part in parts if part is not None and not part.shuffled and not part.uneven]
        return Zipped(known, spec) if len(known) == len(parts) else None
    if kind == "CacheDataset":
        return _cached(dataset) if not dataset._filename.numpy() else None
    inner = _node(dataset._input_dataset) if hasattr(dataset, "_input_dataset") else None
    return _around(dataset, inner, kind, spec) if inner is not None else None


def _around(dataset: Any, inner: PipelineNode, kind: str, spec: Any) -> PipelineNode | None:
    if kind in PASSING:
        inner.shuffled = inner.shuffled or kind == "ShuffleDataset"
        return inner
    if inner.uneven:
        return None
    if kind in ("MapDataset", "ParallelMapDataset"):
        return Mapped(inner, dataset._map_func.function, spec)
    if kind in ("BatchDataset", "ParallelBatchDataset"):
        return Batched(inner, int(dataset._batch_size), spec, bool(dataset._drop_remainder))
    if kind == "RepeatDataset" and int(dataset._count) >= 0:
        return Repeated(inner, int(dataset._count))
    # Which elements these are depends on how they were shuffled.
    return _part(dataset, inner, kind) if not inner.shuffled else None


def _part(dataset: Any, inner: PipelineNode, kind: str) -> PipelineNode | None:
    if kind == "TakeDataset":
        count = int(dataset._count)
        return inner if count < 0 else Picked(inner, min(count, inner.length), lambda number: number)
    if kind == "SkipDataset" and (count := int(dataset._count)) >= 0:
        return Picked(inner, max(0, inner.length - count), lambda number: number + count)
    if kind == "ShardDataset":
        shards, index = int(dataset._num_shards), int(dataset._index)
        return Picked(inner, len(range(index, inner.length, shards)), lambda number: number * shards + index)
    return None


def _cached(dataset: Any) -> PipelineNode | None:
    """All elements of a pipeline that is to be kept in memory: they are read now, once."""
    below, shuffled = dataset._input_dataset, False
    while kind_of(below) in PASSING:
        shuffled = shuffled or kind_of(below) == "ShuffleDataset"
        below = below._input_dataset
    if not is_fixed(below):
        return None
    read = [tf.nest.flatten(one) for one in below.as_numpy_iterator()]
    leaves = list(zip(*read, strict=True))
    spec = dataset.element_spec
    if not leaves:
        return None
    if all(len({one.shape for one in leaf}) == 1 for leaf in leaves):
        return Slices([tf.constant(np.stack(leaf)) for leaf in leaves], spec, shuffled)
    # Batches, of which the last one is short?
    sizes = {tuple(len(one) if one.ndim else 0 for one in leaf) for leaf in leaves}
    lengths = sizes.pop()
    regular = not sizes and lengths[0] > 0 and len(set(lengths[:-1])) == 1 and 0 < lengths[-1] <= lengths[0]
    if not regular or any(len({one.shape[1:] for one in leaf}) > 1 for leaf in leaves):
        return None
    rows = Slices([tf.constant(np.concatenate(leaf)) for leaf in leaves], _row(spec), shuffled)
    return Batched(rows, lengths[0], spec, whole=False)


def _row(spec: Any) -> Any:
    return tf.nest.map_structure(lambda leaf: tf.TensorSpec(leaf.shape[1:], leaf.dtype), spec)


def _is_seeded(operation: Any) -> bool:
    seeds = [getattr(operation, name, None) for name in ("_seed", "_seed2")]
    return any(one is None or int(one) for one in seeds)
