"""Loader of a member's share of global batch k, read ahead where possible, however often the world changes."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from shoal.core.data.sample_order import SampleOrder
from shoal.worker.data.fetch import Batch, Fetcher, ReadKey, always, micro_batch_sizes

Span = tuple[int, int]
PredictRead = Callable[[int], ReadKey | None]
"""Returns what will probably be read for a later step, None if nothing is."""
PredictSpan = Callable[[int], Span | None]
"""Returns the span of a later global batch that will probably be this member's, None if there is none."""

# BatchNorm refuses to train on a single sample.
PLACEHOLDER_SAMPLES = 2


class ReadAhead(Protocol):
    """Reads later steps in the background, in threads or processes of its own."""

    @property
    def pids(self) -> tuple[int, ...]: ...

    def start(self) -> None: ...

    def get(self, key: ReadKey, predict: PredictRead) -> Any: ...

    def look_ahead(self, step: int, predict: PredictRead) -> None: ...

    def close(self) -> None: ...


class Reader:
    """Base of the loaders: reads when asked, or passes on what `ahead` has read before."""

    def __init__(self, ahead: ReadAhead | None) -> None:
        self._ahead = ahead
        self._placeholder_samples: list[Any] = []
        if ahead:
            weakref.finalize(self, _close_in_process, os.getpid(), ahead)

    @property
    def pids(self) -> tuple[int, ...]:
        """The process ids of the workers."""
        return self._ahead.pids if self._ahead else ()

    def start(self) -> None:
        """Start the workers before the first batch is requested; call this from the main thread."""
        if self._ahead:
            self._ahead.start()


class ShareLoader(Reader):
    """Reads spans of global batches from a map-style dataset, ahead of time or on demand.

    `micro_batch_size` and the sizes of the order's batches may change between steps.
    """

    def __init__(
        self, order: SampleOrder, fetcher: Fetcher, ahead: ReadAhead | None = None, micro_batch_size: int | None = None
    ) -> None:
        super().__init__(ahead)
        self.micro_batch_size = micro_batch_size
        self.order = order
        self._fetcher = fetcher

    def sizes(self, span: Span) -> tuple[int, ...]:
        """Return the number of samples in each micro-batch that `take` returns for this span."""
        return micro_batch_sizes(span[1] - span[0], self.micro_batch_size)

    def take(self, step: int, span: Span, predict_span: PredictSpan) -> list[Batch]:
        """Return the micro-batches of a span of global batch `step`, and read ahead what is predicted to follow."""
        if span[0] < span[1]:
            return self._get(self._key(step, span), predict_span)
        if self._ahead:
            self._ahead.look_ahead(step, self._predict_read(predict_span))
        return []

    def placeholder_batch(self, step: int) -> Batch:
        """Return a tiny batch for a member with an empty share; what is computed with it has weight 0."""
        if not self._placeholder_samples:
            key = self._key(step, (0, min(PLACEHOLDER_SAMPLES, self.order.size_of(step))))
            key = key._replace(micro_batch_size=None, bare=True)
            self._placeholder_samples = self._get(key, lambda _: None)
        return self._fetcher.collate(self._placeholder_samples)

    def sample(self, position: int) -> tuple[int, Any]:
        """Return the number of the sample at a position of the first epoch, and the sample."""
        key = ReadKey(0, position, position + 1, None, bare=True)
        with self._fetcher.generators.preserved():
            return int(self.order.ids_at(0, position, position + 1)[0]), self._get(key, lambda _: None)

    def close(self) -> None:
        """End the workers."""
        if self._ahead:
            self._ahead.close()

    def _key(self, step: int, span: Span) -> ReadKey:
        position = self.order.position(step)
        first = position.first
        return ReadKey(step, first + span[0], first + span[1], self.micro_batch_size, epoch=position.epoch)

    def _predict_read(self, predict_span: PredictSpan) -> PredictRead:
        def predict(step: int) -> ReadKey | None:
            span = predict_span(step)
            return None if span is None or span[0] == span[1] else self._key(step, span)

        return predict

    def _get(self, key: ReadKey, predict_span: PredictSpan) -> list[Any]:
        if self._ahead:
            batches: list[Any] = self._ahead.get(key, self._predict_read(predict_span))
            return batches
        if self._fetcher.quiet and not key.bare:
            return self._fetcher.read(key, always) or []
        with self._fetcher.generators.preserved():
            return self._fetcher.read(key, always) or []


def _close_in_process(process: int, ahead: ReadAhead) -> None:
    """Close `ahead`, unless a forked child collects the garbage: there its locks may be held for ever."""
    if os.getpid() == process:
        ahead.close()
