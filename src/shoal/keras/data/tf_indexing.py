"""Indexing of tf.data pipelines: the elements of a pipeline by number, as far as its operations allow.

A tf.data pipeline is made to be read from its start. A member needs its share of batch k, for any k, and a joining
member must not read all that came before. Many pipelines can be indexed after all, since they only transform arrays:

    from_tensor_slices(x) -> shuffle -> map(f) -> batch(32) -> prefetch

A pipeline is a chain (with zip, a tree) of dataset objects, each of which refers to its inputs. `node_of` follows the
chain back to its source and builds a `PipelineNode` for each operation on the way; a node knows its length and how to
compute its element n from the elements of its input. Here element n of the batch node needs the elements 32n to 32n+31
of the map node, which calls f on rows of x.

- *Sources* are tensors (`Slices`), ranges, and `cache()`, whose elements are read once, when the node is built.
- *Transparent* operations (prefetch, options, shuffle) change at most the order. From a shuffle on, nodes are marked
  `shuffled`: the elements are taken unshuffled, and Shoal shuffles the samples itself, by a seed that all members know.
- `take`, `skip`, `shard` select elements by position. After a shuffle it is not known which elements those are, so the
  pipeline is not indexed.
- `filter`, `flat_map`, generators, files and all unknown operations have no element n: `node_of` returns None, and the
  pipeline is read as a stream (`tf_stream`).

If the elements are batches, `samples_of` undoes the batching, so that shares are cut from single samples. Where that is
not possible, for instance after a map over batches, batches stay the unit, and all but the last must have the same
size. `Repeated` batches with a short one in the middle are `uneven`: the position of a sample cannot be computed.

`tf.data.experimental.at` does something similar, but it keeps references to functions of the pipeline that TensorFlow
frees whenever a seed is set, and the process crashes. Here the functions are called while a function of our own is
traced, which keeps them alive. Attributes of the dataset classes are private to TensorFlow: an AttributeError, after a
change in another version, means "cannot be indexed".
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

Flat = list[Any]

# Operations that change nothing but the order of the elements.
TRANSPARENT = ("OptionsDataset", "PrefetchDataset", "ShuffleDataset")


class PipelineNode(ABC):
    """One operation of a pipeline: `length` elements, each a list of the tensors of `spec`.

    `shuffled` if the pipeline asks for a random order. Among elements that are batches the last may be `short`; if
    others may be too, the node is `uneven`. `element` and `elements` are called while a function is traced.
    """

    def __init__(self, length: int, spec: Any, shuffled: bool = False, short: bool = False) -> None:
        self.length, self.spec, self.shuffled, self.short = length, spec, shuffled, short
        self.uneven = False

    @abstractmethod
    def element(self, number: Any) -> Flat:
        """Return one element."""

    def elements(self, numbers: Any) -> Flat:
        """Return several elements, stacked."""
        return list(tf.map_fn(self.element, numbers, fn_output_signature=tf.nest.flatten(self.spec)))


class Slices(PipelineNode):
    """Source: rows of tensors."""

    def __init__(self, tensors: Sequence[Any], spec: Any, shuffled: bool = False) -> None:
        super().__init__(int(tensors[0].shape[0]), spec, shuffled)
        self._tensors = list(tensors)

    def element(self, number: Any) -> Flat:
        return [tensor[number] for tensor in self._tensors]

    def elements(self, numbers: Any) -> Flat:
        return [tf.gather(tensor, numbers) for tensor in self._tensors]

    def rows(self) -> Slices | None:
        """Return the rows of the rows, if these are batches of one size; else None."""
        if len({tensor.shape[1] if tensor.shape.rank > 1 else None for tensor in self._tensors}) != 1:
            return None
        flat = [tf.reshape(tensor, [-1, *tensor.shape[2:]]) for tensor in self._tensors]
        return Slices(flat, _row_spec(self.spec), self.shuffled)


class Mapped(PipelineNode):
    """The results of a function for each element."""

    def __init__(self, inner: PipelineNode, function: Callable[..., Iterable[Any]], spec: Any) -> None:
        super().__init__(inner.length, spec, inner.shuffled, inner.short)
        self._inner, self._function = inner, function

    def element(self, number: Any) -> Flat:
        return list(self._function(*self._inner.element(number)))


class Batched(PipelineNode):
    """Elements grouped into batches; the last one may be short, unless `drop_remainder`."""

    def __init__(self, inner: PipelineNode, size: int, spec: Any, drop_remainder: bool) -> None:
        length = inner.length // size if drop_remainder else -(-inner.length // size)
        super().__init__(length, spec, inner.shuffled, short=length * size > inner.length)
        self.inner, self._size = inner, size

    def element(self, number: Any) -> Flat:
        first = number * self._size
        return self.inner.elements(tf.range(first, tf.minimum(first + self._size, self.inner.length)))


class Picked(PipelineNode):
    """A selection of the elements, possibly with repetitions; `inner_number` maps its numbers to those of `inner`."""

    def __init__(self, inner: PipelineNode, length: int, inner_number: Callable[[Any], Any]) -> None:
        ends_alike = length > 0 and inner_number(length - 1) == inner.length - 1
        super().__init__(length, inner.spec, inner.shuffled, inner.short and ends_alike)
        self.inner, self._inner_number = inner, inner_number

    def element(self, number: Any) -> Flat:
        return self.inner.element(self._inner_number(number))

    def elements(self, numbers: Any) -> Flat:
        return self.inner.elements(self._inner_number(numbers))


class Repeated(Picked):
    """All elements, `times` times."""

    def __init__(self, inner: PipelineNode, times: int) -> None:
        super().__init__(inner, inner.length * times, lambda number: number % inner.length)
        self.times, self.uneven = times, inner.short and times > 1


class Zipped(PipelineNode):
    """Elements side by side."""

    def __init__(self, inner: Sequence[PipelineNode], spec: Any) -> None:
        super().__init__(min(node.length for node in inner), spec, short=any(node.short for node in inner))
        self._inner = inner

    def element(self, number: Any) -> Flat:
        return [leaf for part in self._inner for leaf in part.element(number)]

    def elements(self, numbers: Any) -> Flat:
        return [leaf for part in self._inner for leaf in part.elements(numbers)]


def node_of(dataset: Any) -> PipelineNode | None:
    """Return the node of a pipeline's last operation; None if the pipeline cannot be indexed."""
    try:
        return _node(dataset)
    except AttributeError:
        # Another version of TensorFlow names its private attributes differently.
        return None


def samples_of(node: PipelineNode) -> PipelineNode | None:
    """Return a node of the single samples of a node of batches; None if the batching cannot be undone."""
    if isinstance(node, Batched):
        return node.inner
    if isinstance(node, Repeated):
        samples = samples_of(node.inner)
        return Repeated(samples, node.times) if samples is not None else None
    return node.rows() if isinstance(node, Slices) else None


def operations(dataset: Any) -> Iterable[Any]:
    """Yield this dataset and all datasets that it is made from."""
    yield dataset
    for below in dataset._inputs():
        yield from operations(below)


def kind_of(dataset: Any) -> str:
    """Return the name of a dataset's operation; TensorFlow has some of the classes twice, once with an underscore."""
    return type(dataset).__name__.lstrip("_")


def is_fixed(dataset: Any) -> bool:
    """Return whether a pipeline yields the same elements in the same order in every process, every time it is read."""
    return all(
        _is_seeded(operation)
        and not getattr(operation, "_reshuffle_each_iteration", False)
        and getattr(operation, "_deterministic", None) != "false"
        for operation in operations(dataset)
    )


def _node(dataset: Any) -> PipelineNode | None:
    kind, spec = kind_of(dataset), dataset.element_spec
    if kind == "TensorSliceDataset":
        return Slices(dataset._tensors, spec)
    if kind == "RangeDataset":
        start, stop, step = (int(getattr(dataset, name)) for name in ("_start", "_stop", "_step"))
        return Slices([tf.range(start, stop, step, spec.dtype)], spec)
    if kind == "ZipDataset":
        parts = [_node(part) for part in tf.nest.flatten(dataset._datasets)]
        usable = [part for part in parts if part is not None and not part.shuffled and not part.uneven]
        return Zipped(usable, spec) if len(usable) == len(parts) else None
    if kind == "CacheDataset":
        return _cached_node(dataset) if not dataset._filename.numpy() else None
    inner = _node(dataset._input_dataset) if hasattr(dataset, "_input_dataset") else None
    return _unary_node(dataset, inner, kind, spec) if inner is not None else None


def _unary_node(dataset: Any, inner: PipelineNode, kind: str, spec: Any) -> PipelineNode | None:
    if kind in TRANSPARENT:
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
    # After a shuffle it is not known which elements a selection selects.
    return _selection_node(dataset, inner, kind) if not inner.shuffled else None


def _selection_node(dataset: Any, inner: PipelineNode, kind: str) -> PipelineNode | None:
    if kind == "TakeDataset":
        count = int(dataset._count)
        return inner if count < 0 else Picked(inner, min(count, inner.length), lambda number: number)
    if kind == "SkipDataset" and (count := int(dataset._count)) >= 0:
        return Picked(inner, max(0, inner.length - count), lambda number: number + count)
    if kind == "ShardDataset":
        shards, index = int(dataset._num_shards), int(dataset._index)
        return Picked(inner, len(range(index, inner.length, shards)), lambda number: number * shards + index)
    return None


def _cached_node(dataset: Any) -> PipelineNode | None:
    """Return the elements of `cache()`, which are read here, once; None if they are irregular or not reproducible."""
    below, shuffled = dataset._input_dataset, False
    while kind_of(below) in TRANSPARENT:
        shuffled = shuffled or kind_of(below) == "ShuffleDataset"
        below = below._input_dataset
    if not is_fixed(below):
        return None
    elements = [tf.nest.flatten(element) for element in below.as_numpy_iterator()]
    # One tuple of arrays, over all elements, for each leaf of the structure.
    leaves = list(zip(*elements, strict=True))
    spec = dataset.element_spec
    if not leaves:
        return None
    if all(len({array.shape for array in leaf}) == 1 for leaf in leaves):
        return Slices([tf.constant(np.stack(leaf)) for leaf in leaves], spec, shuffled)
    # The shapes differ; what remains possible are batches of one size, the last of them short.
    sizes = {tuple(len(array) if array.ndim else 0 for array in leaf) for leaf in leaves}
    lengths = sizes.pop()
    regular = not sizes and lengths[0] > 0 and len(set(lengths[:-1])) == 1 and 0 < lengths[-1] <= lengths[0]
    if not regular or any(len({array.shape[1:] for array in leaf}) > 1 for leaf in leaves):
        return None
    rows = Slices([tf.constant(np.concatenate(leaf)) for leaf in leaves], _row_spec(spec), shuffled)
    return Batched(rows, lengths[0], spec, drop_remainder=False)


def _row_spec(spec: Any) -> Any:
    return tf.nest.map_structure(lambda leaf: tf.TensorSpec(leaf.shape[1:], leaf.dtype), spec)


def _is_seeded(operation: Any) -> bool:
    seeds = [getattr(operation, name, None) for name in ("_seed", "_seed2")]
    return any(seed is None or int(seed) for seed in seeds)
