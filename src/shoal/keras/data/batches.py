"""The data of a run as `model.fit` takes it: this member's share of every global batch."""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from keras.src.trainers.data_adapters.data_adapter import DataAdapter

from shoal.core.batch.auto_batch import AutoBatch
from shoal.core.batch.setting import resolve_batch
from shoal.core.data.rounds import RoundOrder
from shoal.core.data.sample_order import SampleOrder
from shoal.core.validation import checked_int
from shoal.errors import NotAttached, UnusableData, UnusableModel
from shoal.keras.backends.base import check_backend
from shoal.keras.data.arrays import SampleSource, SourceFetcher, SourceWithReaders, is_tf_dataset, source_of
from shoal.keras.data.read_ahead import ReadAheadConfig
from shoal.keras.fit.fit_arguments import asked_of, check_use
from shoal.keras.modes.local_sgd import KerasLocalTrainer
from shoal.keras.modes.served import AnyTrainer
from shoal.worker.data.auto_batch_feed import LOOK_EVERY, AutoFeed
from shoal.worker.data.feed import Feed, IndexedFeed, make_balancer
from shoal.worker.data.fetch import ReadKey, always
from shoal.worker.data.round_feed import FIRST_ROUNDS, BatchLoader, RoundFeed
from shoal.worker.data.share_loader import ShareLoader
from shoal.worker.training.training_state import TrainingState

SHARDS = 16
# More steps than an epoch can have: Keras goes on until we say that it is over.
UNLIMITED = 1 << 31

Coming = Callable[[], tuple[int, Any] | None]
_fitting = threading.local()


class Batches(DataAdapter, ABC):  # type: ignore[misc]
    """What `shoal.batches` gives. Before the run begins it gives Keras a few samples to build the model with."""

    def __init__(
        self, size: int, seed: int, shares: str | None, shuffle: bool, class_weight: Mapping[int, float] | None
    ) -> None:
        self.size, self.seed, self.shares = size, seed, shares
        self.shuffle = shuffle
        self._classes = class_weight
        self.epochs = 1
        # Who iterates over it, if it is not Keras: the loop of an elastic optimizer.
        self.loop: Callable[[Batches], Iterator[Any]] | None = getattr(_fitting, "loop", None)
        self._feed: Feed | None = None
        # Steps of one of Keras' epochs; none if that has to be found out, or if `ends` says where each of them ends.
        self.length: int | None = None
        self.ends: tuple[int, ...] = ()
        self.coming: Coming | None = None
        # Which of its epochs Keras is in.
        self.now = 0

    # --- what a run asks

    @abstractmethod
    def few(self) -> Any:
        """A few samples, to build the model with."""

    @abstractmethod
    def feed(
        self, loop: AnyTrainer, training_state: TrainingState, settings: Any, epochs: int
    ) -> tuple[Feed, dict[str, Any]]:
        """What feeds a run of so many of Keras' epochs, and what members must agree on to share it."""

    def epoch_of(self, step: int) -> int:
        """Which of Keras' epochs a step belongs to."""
        assert self._feed is not None
        if self.ends:
            return bisect_right(self.ends, step)
        return step // self.length if self.length else self._feed.cursor(step).epoch

    def epoch_before(self, step: int) -> int:
        """Which of Keras' epochs the step before this one, which comes next, belongs to."""
        assert self._feed is not None
        if self.length or self.ends:
            return self.epoch_of(max(0, step - 1))
        cursor = self._feed.cursor(step)
        return max(0, cursor.epoch - 1) if cursor.index == 0 else cursor.epoch

    # --- what Keras asks

    def __iter__(self) -> Iterator[Any]:
        if self.coming is None and self.loop is not None:
            yield from self.loop(self)
            return
        if self.coming is None and passed_to_fit() is not self:
            raise NotAttached(
                "nobody trains with these batches",
                do="call shoal.elastic(optimizer, model) before shoal.batches, or pass them to model.fit",
            )
        if self.coming is None:
            yield self.few()
            return
        while (found := self.coming()) is not None and self.in_epoch(found[0]):
            yield found[1]

    def in_epoch(self, step: int) -> bool:
        """Whether a step belongs to Keras' epoch, or to one that Keras has ended already."""
        return self.epoch_of(step) <= self.now

    def begin(self, coming: Coming, feed: Feed) -> None:
        """From now on, give out what the run says comes next."""
        self.coming, self._feed = coming, feed

    def get_tf_dataset(self) -> Any:
        return self._passed_to_fit()

    def get_torch_dataloader(self) -> Any:
        return self._passed_to_fit()

    def get_numpy_iterator(self) -> Any:
        return self._passed_to_fit()

    def on_epoch_end(self) -> None:
        # Said before callbacks hear anything; Keras does not look at the data first if the model is built already.
        self._passed_to_fit()

    def _passed_to_fit(self) -> Batches:
        check_use(self)
        if self.coming is None and (classes := asked_of(self).get("class_weight")) is not None:
            if self._classes not in (None, classes):
                raise UnusableData("class_weight was passed to model.fit and to shoal.batches", do="pass it to one")
            self._classes = classes
        # Keras tells callbacks nothing of the data that it is about to fit a model to.
        _fitting.batches = self
        return self

    @property
    def _variant_tensor(self) -> Any:
        """Asked for by a tf.distribute strategy that wants to distribute the data itself."""
        raise UnusableModel(
            "the model was made in the scope of a tf.distribute strategy",
            why="it would sum gradients a second time",
            do="make and compile the model outside strategy.scope()",
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
    """Batches of samples that can be taken out in any order."""

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
        reading: ReadAheadConfig,
    ) -> None:
        super().__init__(size, seed, shares, shuffle, class_weight)
        self._source, self._micro, self._reading = source, micro, reading
        self._how: dict[str, Any] = {"seed": seed, "last": last, "shuffle": shuffle and source.shuffled}

    def few(self) -> Any:
        order = SampleOrder(samples=len(self._source), size=min(2, len(self._source)), epochs=1, **self._how)
        fetcher = SourceFetcher(self._source, order, self._classes)
        with fetcher.generators.preserved():
            found = fetcher.read(ReadKey(0, 0, order.size, None), always)
        assert found is not None
        return found[0]

    def feed(
        self, loop: AnyTrainer, training_state: TrainingState, settings: Any, epochs: int
    ) -> tuple[Feed, dict[str, Any]]:
        wished = resolve_batch(settings.batch, self.size, len(self._source))
        if isinstance(loop, KerasLocalTrainer):
            if wished.bounds is not None:
                loop.refuse("batch=auto", "pass a number, or train with --sync step")
            return self._rounds(loop.length, wished.size, training_state, settings, epochs)
        order = SampleOrder(samples=len(self._source), size=wished.size, epochs=epochs, **self._how)
        if wished.bounds is not None and self.length is not None:
            raise UnusableData("steps_per_epoch has no meaning with batch=auto", do="leave it out, or pass a batch")
        if self.length is None and wished.bounds is None:
            self.length = order.steps_per_epoch
        elif self.length is not None:
            needed = math.ceil(epochs * self.length / order.steps_per_epoch)
            how = self._how | {"epochs": max(1, needed), "limit": epochs * self.length}
            order = SampleOrder(samples=len(self._source), size=wished.size, **how)
        balance = make_balancer(settings, self.shares, ahead=self._reading.depth)
        balance.settings.check(wished.size)
        training_state.parts["shares"] = balance
        fetcher = SourceFetcher(self._source, order, self._classes)
        loader = ShareLoader(order, fetcher, self._reading.ahead(fetcher), self._micro)
        described = {"samples": order.samples, "size": order.size, "epochs": epochs} | self._how
        if wished.bounds is None:
            return IndexedFeed(order, loader, balance), described
        auto = AutoBatch(order.size, wished.bounds, loop.law(settings.lr_scaling), ahead=max(1, balance.ahead))
        loop.auto = auto
        loop.noise_sampler.every_steps = min(settings.noise_every_steps or LOOK_EVERY, LOOK_EVERY)
        training_state.parts["batch"] = feed = AutoFeed(order, loader, balance, auto, loop.noise_sampler.noise)
        return feed, described

    def _rounds(
        self, length: int, size: int, training_state: TrainingState, settings: Any, epochs: int
    ) -> tuple[Feed, dict[str, Any]]:
        """Rounds of so many global batches; `steps_per_epoch` counts those."""
        samples, every = len(self._source), self.length
        plain = SampleOrder(samples=samples, size=size, epochs=1, **self._how)
        needed = max(1, math.ceil(epochs * every / plain.steps_per_epoch)) if every else epochs
        order = RoundOrder.of(samples, size, length, needed, every=every, **self._how)
        self.length, self.ends = None if every else order.steps_per_epoch, order.ends
        # What is read ahead of a round is little.
        balance = make_balancer(settings, self.shares, 0, FIRST_ROUNDS)
        training_state.parts["shares"] = balance
        fetcher = SourceFetcher(self._source, order, self._classes)
        loader = BatchLoader(order, fetcher, self._reading.ahead(fetcher), self._micro)
        described = {"samples": samples, "size": size, "epochs": epochs, "length": every} | self._how
        return RoundFeed(order, loader, balance), described


def forget_passed() -> None:
    """The fit is over."""
    _fitting.batches = None


def iterate_with(loop: Callable[[Batches], Iterator[Any]] | None) -> None:
    """Whoever iterates over batches that are made from now on in this thread gets what this loop gives."""
    _fitting.loop = loop


def passed_to_fit() -> Batches | None:
    """The data that `model.fit` was called with last, in this thread, if it came from `shoal.batches`."""
    found: Batches | None = getattr(_fitting, "batches", None)
    return found


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
    """This member's share of every global batch of `size` samples, each sample once an epoch, for `model.fit`.

    `data` is what `model.fit` takes: arrays (with `y` and `sample_weight`), a PyDataset, or a tf.data pipeline, whose
    elements are batches unless `batched=False`. A pipeline that cannot be indexed, or with `shards`, is read as a
    stream in so many parts, and must give the same elements in the same order whenever it is read. `workers` read
    `prefetch` steps ahead each: as many as a PyDataset says, one for a pipeline that ends with prefetch(), else none.
    `epochs` is for loops of your own; `model.fit` has its own. `shares`, `last` and `micro` are those of `shoal.torch`.
    """
    check_backend()
    size, epochs = checked_int("size", size), checked_int("epochs", epochs)
    micro, shards = (
        None if one is None else checked_int(name, one) for name, one in (("micro", micro), ("shards", shards))
    )
    if is_tf_dataset(data):
        if y is not None or sample_weight is not None:
            raise UnusableData(
                "y and weights cannot be passed beside a tf.data pipeline", do="let the pipeline give them"
            )
        found = _found(data, batched, seed, shuffle, shards)
    else:
        if shards is not None:
            raise UnusableData(
                f"shards={shards} cannot be used with arrays or a PyDataset",
                why="only a tf.data pipeline is read as a stream, in so many parts",
                do="leave it out",
            )
        found = source_of(data, y, sample_weight, seed, shuffle)
    given: dict[str, Any] = {"size": size, "seed": seed, "shares": shares, "class_weight": class_weight}
    if found is not None:
        reading = ReadAheadConfig(found.workers if workers is None else workers, prefetch, found.processes)
        made: Batches = IndexedBatches(found.source, shuffle=shuffle, last=last, micro=micro, reading=reading, **given)
    else:
        made = _streamed(data, batched, shards or SHARDS, given, {"last": last, "micro": micro, "workers": workers})
    made.epochs = epochs
    return made


def _found(pipeline: Any, batched: bool, seed: int, shuffle: bool, shards: int | None) -> SourceWithReaders | None:
    """The samples of a tf.data pipeline by number, if they can be had so and are not asked for in shards."""
    from shoal.keras.data import tf_pipelines

    tf_pipelines.check(pipeline, batched)
    return tf_pipelines.by_index(pipeline, batched, seed, shuffle) if shards is None else None


def _streamed(pipeline: Any, batched: bool, shards: int, given: dict[str, Any], more: dict[str, Any]) -> Batches:
    from shoal.keras.data.tf_stream import StreamedBatches

    for name, value in more.items():
        if value not in (None, 0, "keep"):
            raise UnusableData(
                f"{name}={value!r} cannot be used with a tf.data pipeline that is read as a stream",
                why="it is read from its start, by TensorFlow itself",
                do="leave it out; prefetch(…) in the pipeline reads ahead",
            )
    return StreamedBatches(pipeline, shards=shards, batched=batched, **given)
