"""tf.data pipelines that can only be read from their start, as the data of a run.

The pipeline is split by `shard(n, i)` into parts that are read side by side, each by one member. Every member creates
the whole pipeline, so it must yield the same samples in the same order everywhere. `shoal.core.data.lanes` says which
part a sample of a batch comes from, and `shoal.worker.data.stream_reader` reads them.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from shoal.core.batch.setting import resolve_batch
from shoal.core.data.lanes import LaneLayout
from shoal.errors import UnusableData
from shoal.keras.data.arrays import with_class_weight
from shoal.keras.data.batches import Batches
from shoal.keras.data.tf_pipelines import check_stream
from shoal.keras.modes.local_sgd import KerasLocalTrainer
from shoal.keras.modes.served import AnyTrainer
from shoal.worker.data.feed import Feed, StreamFeed, make_balancer
from shoal.worker.data.lane import Shards
from shoal.worker.data.rng_state import RngState
from shoal.worker.data.sample_signature import stream_signatures
from shoal.worker.data.stream_reader import LaneReader, LaneSource
from shoal.worker.training.training_state import TrainingState

# As many as a batch to build the model with needs.
FIRST_SAMPLES = 2


class StreamedBatches(Batches):
    """Batches of a pipeline that is read in `shards` parts, each by one member."""

    def __init__(
        self,
        dataset: Any,
        size: int,
        seed: int,
        shares: str | None,
        *,
        shards: int,
        batched: bool,
        class_weight: Mapping[int, float] | None,
    ) -> None:
        super().__init__(size, seed, shares, False, class_weight)
        check_stream(dataset)
        options = tf.data.Options()
        options.deterministic = True
        self._dataset = (dataset.unbatch() if batched else dataset).with_options(options)
        self._shards = shards

    def example(self) -> Any:
        samples = self._first_samples()
        if not samples:
            raise UnusableData("the tf.data pipeline is empty", do="check the code that creates it")
        return self._batch(samples)

    def signatures(self, feed: Feed) -> str:  # noqa: ARG002
        # Its parts are all of one pipeline, so that its first samples tell as much as those of each part.
        return stream_signatures(lambda _part: self._first_samples(), 1)

    def _first_samples(self) -> list[Any]:
        iterator = _ClosingIterator(self._dataset)
        try:
            return list(itertools.islice(iterator, FIRST_SAMPLES))
        finally:
            iterator.close()

    def make_feed(
        self, loop: AnyTrainer, training_state: TrainingState, settings: Any, epochs: int
    ) -> tuple[Feed, dict[str, Any]]:
        if isinstance(loop, KerasLocalTrainer):
            loop.refuse(
                "a tf.data pipeline that is read as a stream", "pass data with an index, or train with --sync step"
            )
        if resolve_batch(settings.batch, self.size, self.size).bounds is not None:
            raise UnusableData(
                "batch=auto cannot be used with a tf.data pipeline that is read as a stream",
                do="pass a number as batch",
            )
        # The length of the data is unknown, but each pass over it has at least one step: enough passes for all steps.
        passes = epochs * (self.steps_per_epoch or 1)
        layout = LaneLayout.of(self._shards, self.size, None, passes, self.seed, False)
        shards = Shards([self._opener(number) for number in range(self._shards)])
        reader = LaneReader(LaneSource(shards, layout, self._batch, RngState(), kept_steps=1))
        feed = StreamFeed(layout, reader, make_balancer(settings, self.shares or "equal", ahead=0))
        training_state.parts["shares"], training_state.parts["stream"] = feed.balancer, feed
        description = {"shards": self._shards, "size": self.size, "epochs": epochs, "lanes": layout.lanes}
        return feed, description

    def _batch(self, samples: Sequence[Any]) -> Any:
        stacked = keras.tree.map_structure(lambda *parts: np.stack(parts), *samples)
        return with_class_weight(stacked, self._class_weight)

    def _opener(self, number: int) -> Callable[[], Iterator[Any]]:
        shard = self._dataset.shard(self._shards, number)
        return lambda: _ClosingIterator(shard)


class _ClosingIterator:
    """Iterator over a pipeline that `close` releases without blocking.

    TensorFlow frees an iterator only after everything that it reads ahead has arrived.
    """

    def __init__(self, dataset: Any) -> None:
        self._iterators = [dataset.as_numpy_iterator()]

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._iterators[0])

    def close(self) -> None:
        # The thread drops the last reference, and waits in our place.
        threading.Thread(target=self._iterators.clear, daemon=True).start()
