"""Data of a run for `model.fit`: an iterable of this member's share of every global batch.

Keras accepts data adapters of its own class, and asks `Batches`, which is one, for an iterator. Three phases follow:

- Before the run is joined, the iterator yields one example batch, with which Keras builds the model.
- `attach` connects it to the training loop; then it yields the micro-batches that the loop says come next, and stops
  where an epoch ends. The batches themselves are not used by the train function: the iterator only paces Keras.
- Under a script's own loop (`shoal.elastic`), iterating joins the run and yields the batches to train on.

Keras' epochs and the run's steps are mapped by `epoch_of`: by `steps_per_epoch`, by the last steps of the epochs if
they have unequal lengths (`epoch_ends`), or else by the cursor of the feed.

Keras does not tell callbacks which data `fit` was called with. Batches therefore note in a thread-local variable that
they were passed to `fit`, and the Elastic callback reads it.
"""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import numpy as np
from keras.src.trainers.data_adapters.data_adapter import DataAdapter

from shoal.core.batch.auto_batch import AutoBatch
from shoal.core.batch.setting import resolve_batch
from shoal.core.data.rounds import RoundOrder
from shoal.core.data.sample_order import SampleOrder
from shoal.core.validation import checked_int
from shoal.errors import NotAttached, UnusableData, UnusableModel
from shoal.keras.backends.base import check_backend
from shoal.keras.data.arrays import (
    PyDatasetSource,
    SampleSource,
    SourceFetcher,
    SourceWithReaders,
    is_tf_dataset,
    source_of,
)
from shoal.keras.data.read_ahead import ReadAheadConfig
from shoal.keras.fit.fit_arguments import check_use, checked_fit_arguments
from shoal.keras.modes.local_sgd import KerasLocalTrainer
from shoal.keras.modes.served import AnyTrainer
from shoal.worker.data.auto_batch_feed import LOOK_EVERY, AutoFeed
from shoal.worker.data.feed import Feed, IndexedFeed, make_balancer
from shoal.worker.data.fetch import ReadKey, always
from shoal.worker.data.round_feed import FIRST_ROUNDS, BatchLoader, RoundFeed
from shoal.worker.data.sample_signature import signatures
from shoal.worker.data.share_loader import ShareLoader
from shoal.worker.training.training_state import TrainingState

DEFAULT_SHARDS = 16
# More steps than an epoch can have: Keras then iterates until the data ends.
UNLIMITED = 1 << 31

NextMicroBatch = Callable[[], tuple[int, Any] | None]
_thread = threading.local()


class Batches(DataAdapter, ABC):  # type: ignore[misc]
    """Data returned by `shoal.batches`; see the module for its phases."""

    def __init__(
        self, size: int, seed: int, shares: str | None, shuffle: bool, class_weight: Mapping[int, float] | None
    ) -> None:
        self.size, self.seed, self.shares = size, seed, shares
        self.shuffle = shuffle
        self._class_weight = class_weight
        self.epochs = 1
        self._validation_data: Any = None
        # The loop of an elastic optimizer, which iterates in place of Keras.
        self.loop: Callable[[Batches], Iterator[Any]] | None = getattr(_thread, "loop", None)
        self._feed: Feed | None = None
        # Steps of one of Keras' epochs; None if unknown, or if `epoch_ends` holds where each epoch ends.
        self.steps_per_epoch: int | None = None
        self.epoch_ends: tuple[int, ...] = ()
        self._next_micro_batch: NextMicroBatch | None = None
        # The epoch that Keras is in.
        self.current_epoch = 0

    # --- called by the run

    @abstractmethod
    def example(self) -> Any:
        """Return a batch of a few samples, to build the model with."""

    @abstractmethod
    def make_feed(
        self, loop: AnyTrainer, training_state: TrainingState, settings: Any, epochs: int
    ) -> tuple[Feed, dict[str, Any]]:
        """Return the feed for this many of Keras' epochs, and a description that must be the same on all members."""

    def signatures(self, feed: Feed) -> str:
        """Return signatures of a few samples, which must be the same on all members."""
        return feed.signatures()

    def validation_signatures(self) -> str:
        """Return signatures of a few samples of the `validation_data` of `fit`, "" if it has no arrays."""
        given = self._validation_data
        if not isinstance(given, tuple) or not all(isinstance(part, np.ndarray) and len(part) for part in given):
            return ""
        return signatures(lambda position: (position, [part[position] for part in given]), len(given[0]))

    def epoch_of(self, step: int) -> int:
        """Return the epoch of Keras that a step belongs to."""
        assert self._feed is not None
        if self.epoch_ends:
            return bisect_right(self.epoch_ends, step)
        return step // self.steps_per_epoch if self.steps_per_epoch else self._feed.cursor(step).epoch

    def epoch_before(self, step: int) -> int:
        """Return the epoch of Keras that the step before `step` belongs to."""
        assert self._feed is not None
        if self.steps_per_epoch or self.epoch_ends:
            return self.epoch_of(max(0, step - 1))
        cursor = self._feed.cursor(step)
        return max(0, cursor.epoch - 1) if cursor.index == 0 else cursor.epoch

    def in_current_epoch(self, step: int) -> bool:
        """Return whether a step belongs to the epoch that Keras is in, or to an earlier one."""
        return self.epoch_of(step) <= self.current_epoch

    def attach(self, next_micro_batch: NextMicroBatch, feed: Feed) -> None:
        """Connect to a training loop: from now on, yield the micro-batches that it says come next."""
        self._next_micro_batch, self._feed = next_micro_batch, feed

    # --- called by Keras

    def __iter__(self) -> Iterator[Any]:
        if self._next_micro_batch is None and self.loop is not None:
            yield from self.loop(self)
            return
        if self._next_micro_batch is None and passed_to_fit() is not self:
            raise NotAttached(
                "shoal.batches is not attached to a training loop",
                do="call shoal.elastic(optimizer, model) before shoal.batches, or pass the batches to model.fit",
            )
        if self._next_micro_batch is None:
            yield self.example()
            return
        while (coming := self._next_micro_batch()) is not None and self.in_current_epoch(coming[0]):
            yield coming[1]

    def get_tf_dataset(self) -> Any:
        return self._note_passed_to_fit()

    def get_torch_dataloader(self) -> Any:
        return self._note_passed_to_fit()

    def get_numpy_iterator(self) -> Any:
        return self._note_passed_to_fit()

    def on_epoch_end(self) -> None:
        # Keras calls this before any callback, and calls nothing else before them if the model is already built.
        self._note_passed_to_fit()

    def _note_passed_to_fit(self) -> Batches:
        check_use(self)
        if self._next_micro_batch is None:
            arguments = checked_fit_arguments(self)
            self._validation_data = arguments.get("validation_data")
            class_weight = arguments.get("class_weight")
            if class_weight is not None:
                if self._class_weight not in (None, class_weight):
                    raise UnusableData("class_weight was passed to model.fit and to shoal.batches", do="pass it to one")
                self._class_weight = class_weight
        _thread.batches = self
        return self

    @property
    def _variant_tensor(self) -> Any:
        """Raises: only a tf.distribute strategy that wants to distribute the data itself reads it."""
        raise UnusableModel(
            "the model was created in the scope of a tf.distribute strategy",
            why="it would sum gradients a second time",
            do="create and compile the model outside strategy.scope()",
        )

    @property
    def num_batches(self) -> int:
        return UNLIMITED

    @property
    def batch_size(self) -> int | None:
        return None

    @property
    def has_partial_batch(self) -> bool:
        return False

    @property
    def partial_batch_size(self) -> int | None:
        return None


class IndexedBatches(Batches):
    """Batches of samples that can be read in any order."""

    def __init__(
        self,
        source: SampleSource,
        size: int,
        seed: int,
        shares: str | None,
        *,
        shuffle: bool,
        last: Literal["keep", "drop"],
        micro: int | None,
        class_weight: Mapping[int, float] | None,
        read_ahead: ReadAheadConfig,
    ) -> None:
        super().__init__(size, seed, shares, shuffle, class_weight)
        self._source, self._micro, self._read_ahead = source, micro, read_ahead
        self._order_options: dict[str, Any] = {"seed": seed, "last": last, "shuffle": shuffle and source.shuffled}

    def example(self) -> Any:
        samples = len(self._source)
        order = SampleOrder(samples=samples, size=min(2, samples), epochs=1, **self._order_options)
        fetcher = SourceFetcher(self._source, order, self._class_weight)
        with fetcher.generators.preserved():
            batches = fetcher.read(ReadKey(0, 0, order.size, None), always)
        assert batches is not None
        return batches[0]

    def signatures(self, feed: Feed) -> str:
        return self._source.signatures() if isinstance(self._source, PyDatasetSource) else feed.signatures()

    def make_feed(
        self, loop: AnyTrainer, training_state: TrainingState, settings: Any, epochs: int
    ) -> tuple[Feed, dict[str, Any]]:
        batch = resolve_batch(settings.batch, self.size, len(self._source))
        if isinstance(loop, KerasLocalTrainer):
            if batch.bounds is not None:
                loop.refuse("batch=auto", "pass a number, or train with --sync step")
            return self._make_round_feed(loop.round_length, batch.size, training_state, settings, epochs)
        order = SampleOrder(samples=len(self._source), size=batch.size, epochs=epochs, **self._order_options)
        if batch.bounds is not None and self.steps_per_epoch is not None:
            raise UnusableData(
                "steps_per_epoch cannot be used with batch=auto", do="leave it out, or pass a number as batch"
            )
        if self.steps_per_epoch is None and batch.bounds is None:
            self.steps_per_epoch = order.steps_per_epoch
        elif self.steps_per_epoch is not None:
            limit = epochs * self.steps_per_epoch
            passes = math.ceil(limit / order.steps_per_epoch)
            options = self._order_options | {"epochs": max(1, passes), "limit": limit}
            order = SampleOrder(samples=len(self._source), size=batch.size, **options)
        balancer = make_balancer(settings, self.shares, ahead=self._read_ahead.depth)
        balancer.settings.check(batch.size)
        training_state.parts["shares"] = balancer
        fetcher = SourceFetcher(self._source, order, self._class_weight)
        loader = ShareLoader(order, fetcher, self._read_ahead.start(fetcher), self._micro)
        description = {"samples": order.samples, "size": order.size, "epochs": epochs} | self._order_options
        if batch.bounds is None:
            return IndexedFeed(order, loader, balancer), description
        scaling = loop.lr_scaling(settings.lr_scaling)
        loop.auto = auto = AutoBatch(order.size, batch.bounds, scaling, ahead=max(1, balancer.ahead))
        loop.noise_sampler.every_steps = min(settings.noise_every_steps or LOOK_EVERY, LOOK_EVERY)
        training_state.parts["batch"] = feed = AutoFeed(order, loader, balancer, auto, loop.noise_sampler.noise)
        return feed, description

    def _make_round_feed(
        self, length: int, size: int, training_state: TrainingState, settings: Any, epochs: int
    ) -> tuple[Feed, dict[str, Any]]:
        """Return a feed of rounds of `length` global batches, and its description; `steps_per_epoch` counts batches."""
        samples, every = len(self._source), self.steps_per_epoch
        one_epoch = SampleOrder(samples=samples, size=size, epochs=1, **self._order_options)
        passes = max(1, math.ceil(epochs * every / one_epoch.steps_per_epoch)) if every else epochs
        order = RoundOrder.of(samples, size, length, passes, every=every, **self._order_options)
        self.steps_per_epoch, self.epoch_ends = None if every else order.steps_per_epoch, order.ends
        # Read-ahead is short against a round, so a change of shares need not wait for it.
        balancer = make_balancer(settings, self.shares, 0, FIRST_ROUNDS)
        training_state.parts["shares"] = balancer
        fetcher = SourceFetcher(self._source, order, self._class_weight)
        loader = BatchLoader(order, fetcher, self._read_ahead.start(fetcher), self._micro)
        description = {"samples": samples, "size": size, "epochs": epochs, "length": every} | self._order_options
        return RoundFeed(order, loader, balancer), description


def passed_to_fit() -> Batches | None:
    """Return the batches that `model.fit` in this thread was called with last; None if it had other data."""
    batches: Batches | None = getattr(_thread, "batches", None)
    return batches


def clear_passed_to_fit() -> None:
    """Forget the batches of a `fit` that has ended."""
    _thread.batches = None


def set_loop(loop: Callable[[Batches], Iterator[Any]] | None) -> None:
    """Let batches that are created in this thread from now on be iterated by this loop."""
    _thread.loop = loop


def batches(
    data: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    size: int,
    epochs: int = 1,
    seed: int = 0,
    shuffle: bool = True,
    last: Literal["keep", "drop"] = "keep",
    class_weight: Mapping[int, float] | None = None,
    shares: str | None = None,
    micro: int | None = None,
    workers: int | None = None,
    prefetch: int = 2,
    shards: int | None = None,
    batched: bool = True,
) -> Batches:
    """Return this member's share of every global batch of `size` samples, for `model.fit`; each sample once per epoch.

    `data` is what `model.fit` takes: arrays (with `y` and `sample_weight`), a PyDataset, or a tf.data pipeline, whose
    elements are batches unless `batched=False`. A pipeline that cannot be indexed, or that is given with `shards`, is
    read as a stream in that many parts, and must yield the same elements in the same order every time. `workers` read
    `prefetch` steps ahead each; by default as many as a PyDataset has, one for a pipeline that ends with prefetch(),
    and none otherwise. `epochs` is for loops of your own; `model.fit` has its own. `shares`, `last` and `micro` are
    those of `shoal.torch`.
    """
    check_backend()
    size, epochs = checked_int("size", size), checked_int("epochs", epochs)
    micro, shards = (
        None if value is None else checked_int(name, value) for name, value in (("micro", micro), ("shards", shards))
    )
    if is_tf_dataset(data):
        if y is not None or sample_weight is not None:
            raise UnusableData(
                "y and sample_weight cannot be passed with a tf.data pipeline", do="let the pipeline yield them"
            )
        source = _pipeline_source(data, batched, seed, shuffle, shards)
    else:
        if shards is not None:
            raise UnusableData(
                f"shards={shards} cannot be used with arrays or a PyDataset",
                why="only a tf.data pipeline is read as a stream of several parts",
                do="leave it out",
            )
        source = source_of(data, y, sample_weight, seed, shuffle)
    common: dict[str, Any] = {"size": size, "seed": seed, "shares": shares, "class_weight": class_weight}
    if source is not None:
        read_ahead = ReadAheadConfig(source.workers if workers is None else workers, prefetch, source.processes)
        created: Batches = IndexedBatches(
            source.source, shuffle=shuffle, last=last, micro=micro, read_ahead=read_ahead, **common
        )
    else:
        unusable = {"last": last, "micro": micro, "workers": workers}
        created = _streamed(data, batched, shards or DEFAULT_SHARDS, common, unusable)
    created.epochs = epochs
    return created


def _pipeline_source(
    pipeline: Any, batched: bool, seed: int, shuffle: bool, shards: int | None
) -> SourceWithReaders | None:
    """Return the samples of a tf.data pipeline by number; None if it has to be read as a stream."""
    from shoal.keras.data import tf_pipelines

    tf_pipelines.check(pipeline, batched)
    return tf_pipelines.by_index(pipeline, batched, seed, shuffle) if shards is None else None


def _streamed(pipeline: Any, batched: bool, shards: int, common: dict[str, Any], unusable: dict[str, Any]) -> Batches:
    from shoal.keras.data.tf_stream import StreamedBatches

    for name, value in unusable.items():
        if value not in (None, 0, "keep"):
            raise UnusableData(
                f"{name}={value!r} cannot be used with a tf.data pipeline that is read as a stream",
                why="TensorFlow itself reads it, from its start",
                do="leave it out; prefetch(…) in the pipeline reads ahead",
            )
    return StreamedBatches(pipeline, shards=shards, batched=batched, **common)
