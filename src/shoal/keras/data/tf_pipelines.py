"""tf.data pipelines as sample sources: which can be indexed, and which cannot be used at all."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from shoal.errors import UnusableData
from shoal.keras.data.arrays import PyDatasetSource, Rows, SampleSource, SourceWithReaders
from shoal.keras.data.tf_indexing import PipelineNode, is_fixed, kind_of, node_of, operations, samples_of
from shoal.worker.data.fetch import Batch

INFINITE, UNKNOWN = -1, -2


class PipelineSamples(SampleSource):
    """Source of a pipeline whose elements are samples."""

    def __init__(self, node: PipelineNode) -> None:
        self._length, self._spec = node.length, node.spec

        @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)], autograph=False)  # type: ignore[untyped-decorator]
        def read(ids: Any) -> Any:
            with tf.device("CPU:0"):
                return node.elements(ids)

        self._read = read

    def __len__(self) -> int:
        return self._length

    def rows(self, ids: Rows, epoch: int) -> Batch:  # noqa: ARG002
        return _arrays(self._spec, self._read(tf.constant(ids, tf.int64)))


class PipelineBatches:
    """Pipeline whose elements are batches, with the interface of a PyDataset."""

    def __init__(self, node: PipelineNode) -> None:
        self.num_batches, self._spec = node.length, node.spec

        @tf.function(input_signature=[tf.TensorSpec([], tf.int64)], autograph=False)  # type: ignore[untyped-decorator]
        def read(number: Any) -> Any:
            with tf.device("CPU:0"):
                return node.element(number)

        self._read = read

    def __getitem__(self, number: int) -> Batch:
        return _arrays(self._spec, self._read(tf.constant(number, tf.int64)))


def by_index(dataset: Any, batched: bool, seed: int, shuffle: bool) -> SourceWithReaders | None:
    """Return the pipeline's samples by number; None if it can only be read from its start."""
    node = node_of(dataset)
    if node is None or node.length < 1 or (node.shuffled and not shuffle):
        return None
    workers = int(any(kind_of(operation) == "PrefetchDataset" for operation in operations(dataset)))
    # Single samples if possible: Shoal groups them into global batches itself, and drops no remainder.
    samples = samples_of(node) if batched else node
    if samples is None and node.uneven:
        return None
    return SourceWithReaders(
        PyDatasetSource(PipelineBatches(node), seed, shuffle, "tf.data pipeline")
        if samples is None
        else PipelineSamples(samples),
        workers,
    )


def check(dataset: Any, batched: bool) -> None:
    """Raise UnusableData if the pipeline can be neither indexed nor read as a stream."""
    count = int(dataset.cardinality())
    if count == INFINITE or (count == UNKNOWN and _is_endless(dataset)):
        raise UnusableData(
            "the tf.data pipeline has no end",
            why="with repeat() it is not known where an epoch ends",
            do="leave repeat() out, and pass epochs, and steps_per_epoch if you like, to model.fit",
        )
    if count == 0:
        raise UnusableData("the tf.data pipeline is empty", do="check the code that creates it")
    leaves = tf.nest.flatten(dataset.element_spec)
    if not all(isinstance(leaf, tf.TensorSpec) for leaf in leaves):
        raise UnusableData(
            "the tf.data pipeline yields ragged or sparse tensors",
            why="they cannot be split into shares",
            do="make them dense in the pipeline: .map(lambda x: x.to_tensor(shape=…))",
        )
    firsts = {leaf.shape[0] if leaf.shape.rank else -1 for leaf in leaves if leaf.shape.rank is not None} - {None}
    if batched and (-1 in firsts or len(firsts) > 1):
        raise UnusableData(
            "the elements of the tf.data pipeline are not batches",
            why=f"their shapes are {', '.join(str(leaf.shape) for leaf in leaves)}",
            do="pass batched=False if each of them is one sample, or end the pipeline with .batch(…)",
        )


def check_stream(dataset: Any) -> None:
    """Raise UnusableData if the order of the samples would differ between members, or between two readings."""
    if not is_fixed(dataset):
        raise UnusableData(
            "the tf.data pipeline yields its samples in another order each time it is read",
            why="members that each read a part of it would lose some samples and repeat others",
            do="shuffle(…, seed=1, reshuffle_each_iteration=False), list_files(…, shuffle=False), and no "
            "deterministic=False",
        )


def _is_endless(dataset: Any) -> bool:
    """Return whether the pipeline repeats without end, and no take() limits it."""
    kind = kind_of(dataset)
    if kind == "RepeatDataset" and int(dataset._count) < 0:
        return True
    return kind != "TakeDataset" and any(map(_is_endless, dataset._inputs()))


def _arrays(spec: Any, flat: list[Any]) -> Any:
    return keras.tree.map_structure(np.asarray, tf.nest.pack_sequence_as(spec, flat))
