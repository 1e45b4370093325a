"""The data of a run as `model.fit` takes it: this member's share of every global batch."""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import keras
import numpy as np
from keras.src.trainers.data_adapters.data_adapter import DataAdapter

from shoal.core.batch import wanted
from shoal.core.goodput import AutoBatch
from shoal.core.order import Order
from shoal.core.stream import LaneLayout
from shoal.errors import UnusableData, UnusableModel
from shoal.keras.sources import Source, SourceFetcher, is_tf_dataset, source_of
from shoal.keras.ticketed import AnyTrainer
from shoal.worker.data.auto import LOOK_EVERY, AutoFeed
from shoal.worker.data.dealing import balance_of
from shoal.worker.data.feed import Feed, IndexedFeed, StreamFeed
from shoal.worker.data.fetch import Key, always
from shoal.worker.data.generators import Generators
from shoal.worker.data.lane import Shards
from shoal.worker.data.loader import ShareLoader
from shoal.worker.data.stream import LaneReader, LaneSource
from shoal.worker.keeper import StateKeeper

# More steps than an epoch can have: Keras goes on until we say that it is over.
UNLIMITED = 1 << 31

Coming = Callable[[], tuple[int, Any] | None]
_fitting = threading.local()


class Batches(DataAdapter, ABC):  # type: ignore[misc]
    """What `shoal.batches` gives. Before the run begins it gives Keras a few samples to build the model with."""

    def __init__(self, size: int, seed: int, shares: str | None) -> None:
        self.size, self.seed, self.shares = size, seed, shares
        self.epochs = 1
        # Who iterates over it, if it is not Keras: the loop of an elastic optimizer.
        self.loop: Callable[[Batches], Iterator[Any]] | None = getattr(_fitting, "loop", None)
        self._feed: Feed | None = None
        # Steps of one of Keras' epochs; none if that has to be found out.
        self.length: int | None = None
        self.coming: Coming | None = None
        # Which of its epochs Keras is in.
        self.now = 0

    # --- what a run asks

    @abstractmethod
    def few(self) -> Any:
        """A few samples, to build the model with."""

    @abstractmethod
    def feed(self, loop: AnyTrainer, keeper: StateKeeper, settings: Any, epochs: int) -> tuple[Feed, dict[str, Any]]:
        """What feeds a run of so many of Keras' epochs, and what members must agree on to share it."""

    def epoch_of(self, step: int) -> int:
        """Which of Keras' epochs a step belongs to."""
        assert self._feed is not None
        return step // self.length if self.length else self._feed.cursor(step).epoch

    def epoch_before(self, step: int) -> int:
        """Which of Keras' epochs the step before this one, which comes next, belongs to."""
        assert self._feed is not None
        if self.length:
            return max(0, step - 1) // self.length
        cursor = self._feed.cursor(step)
        return max(0, cursor.epoch - 1) if cursor.index == 0 else cursor.epoch

    # --- what Keras asks

    def __iter__(self) -> Iterator[Any]:
        if self.coming is None and self.loop is not None:
            yield from self.loop(self)
            return
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

    def _passed_to_fit(self) -> Batches:
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
        source: Source,
        size: int,
        seed: int,
        shares: str | None,
        *,
        shuffle: bool,
        last: Literal["keep", "drop"],
        micro: int | None,
        class_weight: Mapping[int, float] | None,
    ) -> None:
        super().__init__(size, seed, shares)
        self._source, self._micro, self._classes = source, micro, class_weight
        self._how: dict[str, Any] = {"seed": seed, "last": last, "shuffle": shuffle and source.shuffled}

    def few(self) -> Any:
        order = Order(samples=len(self._source), size=min(2, len(self._source)), epochs=1, **self._how)
        found = SourceFetcher(self._source, order, self._classes).read(Key(0, 0, order.size, None), always)
        assert found is not None
        return found[0]

    def feed(self, loop: AnyTrainer, keeper: StateKeeper, settings: Any, epochs: int) -> tuple[Feed, dict[str, Any]]:
        wished = wanted(settings.batch, self.size, len(self._source))
        order = Order(samples=len(self._source), size=wished.size, epochs=epochs, **self._how)
        if wished.bounds is not None and self.length is not None:
            raise UnusableData("steps_per_epoch has no meaning with batch=auto", do="leave it out, or pass a batch")
        if self.length is None and wished.bounds is None:
            self.length = order.steps_per_epoch
        elif self.length is not None:
            needed = math.ceil(epochs * self.length / order.steps_per_epoch)
            how = self._how | {"epochs": max(1, needed), "limit": epochs * self.length}
            order = Order(samples=len(self._source), size=wished.size, **how)
        balance = balance_of(settings, self.shares, ahead=0)
        balance.rules.check(wished.size)
        keeper.parts["shares"] = balance
        loader = ShareLoader(order, SourceFetcher(self._source, order, self._classes), None, self._micro)
        described = {"samples": order.samples, "size": order.size, "epochs": epochs} | self._how
        if wished.bounds is None:
            return IndexedFeed(order, loader, balance), described
        auto = AutoBatch(order.size, wished.bounds, loop.law(settings.batch_law), ahead=1)
        loop.auto = auto
        loop.soundings.every = min(settings.noise_every or LOOK_EVERY, LOOK_EVERY)
        keeper.parts["batch"] = feed = AutoFeed(order, loader, balance, auto, loop.soundings.noise)
        return feed, described


class StreamedBatches(Batches):
    """Batches of a tf.data pipeline, which can only be read from its start: shards of it are, side by side."""

    def __init__(self, dataset: Any, size: int, seed: int, shares: str | None, *, shards: int, batched: bool) -> None:
        super().__init__(size, seed, shares)
        if dataset.cardinality() == -1:
            raise UnusableData(
                "the tf.data pipeline has no end",
                why="with repeat() nobody knows where an epoch ends",
                do="leave repeat() out, and pass epochs to model.fit",
            )
        self._dataset, self._shards = dataset.unbatch() if batched else dataset, shards

    def few(self) -> Any:
        return _stacked(list(self._dataset.take(2).as_numpy_iterator()))

    def feed(self, loop: AnyTrainer, keeper: StateKeeper, settings: Any, epochs: int) -> tuple[Feed, dict[str, Any]]:  # noqa: ARG002
        if wanted(settings.batch, self.size, self.size).bounds is not None:
            raise UnusableData("batch=auto cannot be used with a tf.data pipeline", do="pass a number as batch")
        layout = LaneLayout.of(self._shards, self.size, None, epochs, self.seed, False)
        opened = Shards([self._opener(number) for number in range(self._shards)])
        reader = LaneReader(LaneSource(opened, layout, _stacked, Generators(), kept_steps=1))
        feed = StreamFeed(layout, reader, balance_of(settings, self.shares or "equal", ahead=0))
        keeper.parts["shares"], keeper.parts["stream"] = feed.balance, feed
        described = {"shards": self._shards, "size": self.size, "epochs": epochs, "lanes": layout.lanes}
        return feed, described

    def _opener(self, number: int) -> Callable[[], Iterator[Any]]:
        shard = self._dataset.shard(self._shards, number)
        return lambda: iter(shard.as_numpy_iterator())


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
    shards: int = 16,
    batched: bool = True,
) -> Batches:
    """This member's share of every global batch of `size` samples, each sample once an epoch, for `model.fit`.

    `data` is what `model.fit` takes: arrays (with `y` and `sample_weight`), a PyDataset, or a tf.data pipeline, whose
    elements are batches unless `batched=False`; it is read in `shards` parts and must give the same elements in the
    same order whenever it is read. `epochs` is for loops of your own; `model.fit` has its own. `shares`, `last` and
    `micro` are those of `shoal.torch`.
    """
    if is_tf_dataset(data):
        if y is not None or sample_weight is not None or class_weight is not None:
            raise UnusableData(
                "y and weights cannot be passed beside a tf.data pipeline", do="let the pipeline give them"
            )
        found: Batches = StreamedBatches(data, size, seed, shares, shards=shards, batched=batched)
    else:
        source = source_of(data, y, sample_weight, seed, shuffle)
        found = IndexedBatches(
            source, size, seed, shares, shuffle=shuffle, last=last, micro=micro, class_weight=class_weight
        )
    found.epochs = epochs
    return found


def _stacked(samples: Sequence[Any]) -> Any:
    return keras.tree.map_structure(lambda *parts: np.stack(parts), *samples)
