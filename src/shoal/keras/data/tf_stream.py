"""A tf.data pipeline that can only be read from its start, as the data of a run."""

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
from shoal.keras.data.arrays import weighed
from shoal.keras.data.batches import Batches
from shoal.keras.data.tf_pipelines import check_stream
from shoal.keras.modes.local_sgd import KerasLocalTrainer
from shoal.keras.modes.served import AnyTrainer
from shoal.worker.data.feed import Feed, StreamFeed, make_balancer
from shoal.worker.data.lane import Shards
from shoal.worker.data.rng_state import RngState
from shoal.worker.data.stream_reader import LaneReader, LaneSource
from shoal.worker.training.training_state import TrainingState


class StreamedBatches(Batches):
    """Shards of a pipeline are read side by side, each by one member."""

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

    def few(self) -> Any:
        first = _ClosingIterator(self._dataset)
        try:
            samples = list(itertools.islice(first, 2))
        finally:
            first.close()
        if not samples:
            raise UnusableData("the tf.data pipeline is empty", do="check what it is made from")
        return self._batch(samples)

    def feed(
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
        # Every pass over the data has a step: with steps_per_epoch there are enough of them, however short it is.
        passes = epochs * (self.length or 1)
        layout = LaneLayout.of(self._shards, self.size, None, passes, self.seed, False)
        opened = Shards([self._opener(number) for number in range(self._shards)])
        reader = LaneReader(LaneSource(opened, layout, self._batch, RngState(), kept_steps=1))
        feed = StreamFeed(layout, reader, make_balancer(settings, self.shares or "equal", ahead=0))
        training_state.parts["shares"], training_state.parts["stream"] = feed.balancer, feed
        described = {"shards": self._shards, "size": self.size, "epochs": epochs, "lanes": layout.lanes}
        return feed, described

    def _batch(self, samples: Sequence[Any]) -> Any:
        stacked = keras.tree.map_structure(lambda *parts: np.stack(parts), *samples)
        return weighed(stacked, self._classes)

    def _opener(self, number: int) -> Callable[[], Iterator[Any]]:
        shard = self._dataset.shard(self._shards, number)
        return lambda: _ClosingIterator(shard)


class _ClosingIterator:
    """An iterator that is let go of at once: TensorFlow waits for all that the pipeline is reading ahead."""

    def __init__(self, dataset: Any) -> None:
        self._held = [dataset.as_numpy_iterator()]

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._held[0])

    def close(self) -> None:
        # The thread holds the last reference.
        threading.Thread(target=self._held.clear, daemon=True).start()
