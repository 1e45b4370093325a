"""tf.data pipelines: which of them can be indexed, and which cannot be shared out at all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from shoal.errors import UnusableData
from shoal.keras.sources import Found, Items, Rows, Source
from shoal.worker.data.fetch import Batch

INFINITE, UNKNOWN = -1, -2
# What a pipeline ends with that changes nothing about its samples.
PASSING = ("_OptionsDataset", "_PrefetchDataset")
BATCHING = ("_BatchDataset", "_ParallelBatchDataset")
SHUFFLING = "_ShuffleDataset"


class Samples(Source):
    """A pipeline that gives single samples."""

    def __init__(self, dataset: Any) -> None:
        self._length = int(dataset.cardinality())
        spec = dataset.element_spec

        # One call for all samples of a batch: from Python, each of them would cost ten times as much.
        @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])  # type: ignore[untyped-decorator]
        def read(ids: Any) -> Any:
            return tf.map_fn(lambda one: tf.data.experimental.at(dataset, one), ids, fn_output_signature=spec)

        self._read = read

    def __len__(self) -> int:
        return self._length

    def rows(self, ids: Rows, epoch: int) -> Batch:  # noqa: ARG002
        return _arrays(self._read(tf.constant(ids, tf.int64)))


class Elements:
    """A pipeline that gives batches, as a PyDataset is one: its elements by number."""

    def __init__(self, dataset: Any) -> None:
        self.num_batches, self._dataset = int(dataset.cardinality()), dataset

    def __getitem__(self, number: int) -> Batch:
        return _arrays(tf.data.experimental.at(self._dataset, number))


def by_index(dataset: Any, batched: bool, seed: int, shuffle: bool) -> Found | None:
    """The pipeline as samples by number; None if it can only be read from its start."""
    inner, eager = _peeled(dataset, shuffle)
    if batched and type(inner).__name__ in BATCHING:
        inner, batched = _taken_apart(inner, shuffle), False
    options = tf.data.Options()
    # The optimiser would put operations together to ones that cannot be indexed.
    options.experimental_optimization.apply_default_optimizations = False
    inner = inner.with_options(options)
    if not _is_indexable(inner):
        return None
    for one in _operations(inner):
        if not _is_seeded(one):
            raise UnusableData(
                "the tf.data pipeline shuffles by itself",
                why="without a seed it does so differently in every member, and samples would be lost",
                do="leave shuffle() out: shoal.batches shuffles all samples anew in every epoch",
            )
    source = Items(Elements(inner), seed, shuffle, "tf.data pipeline") if batched else Samples(inner)
    return Found(source, workers=int(eager))


def check(dataset: Any, batched: bool) -> None:
    """Raise if nothing can be made of this pipeline."""
    count = int(dataset.cardinality())
    if count == INFINITE or (count == UNKNOWN and _goes_on(dataset)):
        raise UnusableData(
            "the tf.data pipeline has no end",
            why="with repeat() nobody knows where an epoch ends",
            do="leave repeat() out, and pass epochs, and steps_per_epoch if you like, to model.fit",
        )
    if count == 0:
        raise UnusableData("the tf.data pipeline is empty", do="check what it is made from")
    leaves = tf.nest.flatten(dataset.element_spec)
    if not all(isinstance(leaf, tf.TensorSpec) for leaf in leaves):
        raise UnusableData(
            "the tf.data pipeline gives ragged or sparse tensors",
            why="they cannot be cut into shares",
            do="make them dense in the pipeline: .map(lambda x: x.to_tensor(shape=…))",
        )
    if batched:
        firsts = {leaf.shape[0] if leaf.shape.rank else -1 for leaf in leaves if leaf.shape.rank is not None} - {None}
        if -1 in firsts or len(firsts) > 1:
            raise UnusableData(
                "the elements of the tf.data pipeline are not batches",
                why=f"they are {', '.join(str(leaf.shape) for leaf in leaves)}",
                do="pass batched=False if each of them is one sample, or end the pipeline with .batch(…)",
            )


def check_stream(dataset: Any) -> None:
    """Raise if a pipeline that is read from its start would give other samples, or another order, in every member."""
    for one in _operations(dataset):
        if not _is_seeded(one) or getattr(one, "_reshuffle_each_iteration", False):
            raise UnusableData(
                "the tf.data pipeline gives its samples in another order whenever it is read",
                why="members that each read a part of it would lose some and repeat others",
                do="shuffle(…, seed=1, reshuffle_each_iteration=False), list_files(…, shuffle=False)",
            )
        if getattr(one, "_deterministic", None) == "false":
            raise UnusableData(
                "the tf.data pipeline gives its samples in any order",
                why="members that each read a part of it would lose some and repeat others",
                do="leave deterministic=False out",
            )


def _peeled(dataset: Any, shuffle: bool) -> tuple[Any, bool]:
    """What is below the operations that change no sample, and whether one of them reads ahead.

    The order of a run shuffles better than a buffer does, so that takes its place.
    """
    eager = False
    while (kind := type(dataset).__name__) in PASSING or (kind == SHUFFLING and shuffle):
        eager = eager or kind == "_PrefetchDataset"
        dataset = dataset._input_dataset
    return dataset, eager


def _taken_apart(batching: Any, shuffle: bool) -> Any:
    """The samples below a batch(…); without those that it drops."""
    inner, _ = _peeled(batching._input_dataset, shuffle)
    count, size = int(inner.cardinality()), int(batching._batch_size)
    return inner.take(count - count % size) if bool(batching._drop_remainder) and count > 0 else inner


def _is_indexable(dataset: Any) -> bool:
    count = int(dataset.cardinality())
    if count <= 0:
        return False
    try:
        for number in (0, count - 1):
            tf.data.experimental.at(dataset, number)
    except (tf.errors.UnimplementedError, tf.errors.FailedPreconditionError):
        return False
    return True


def _goes_on(dataset: Any) -> bool:
    """Whether there is a repeat() without an end that nothing ends."""
    kind = type(dataset).__name__
    if kind == "_RepeatDataset" and int(dataset._count) < 0:
        return True
    return kind != "_TakeDataset" and any(map(_goes_on, dataset._inputs()))


def _operations(dataset: Any) -> Iterator[Any]:
    """This dataset, and all that it is made from."""
    yield dataset
    for below in dataset._inputs():
        yield from _operations(below)


def _is_seeded(operation: Any) -> bool:
    seeds = [getattr(operation, name, None) for name in ("_seed", "_seed2")]
    return any(one is None or int(one) for one in seeds)


def _arrays(element: Any) -> Any:
    return keras.tree.map_structure(np.asarray, element)
