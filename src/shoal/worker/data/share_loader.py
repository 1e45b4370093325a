"""This member's share of global batch k, read ahead, without caring how often the world changes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

from shoal.core.data.sample_order import SampleOrder
from shoal.worker.data.fetch import Batch, Fetcher, ReadKey, always, cut

Span = tuple[int, int]
Foresight = Callable[[int], ReadKey | None]
Spans = Callable[[int], Span | None]

# BatchNorm refuses to train on a single sample.
GHOST_SAMPLES = 2


class ReadAhead(Protocol):
    """Reads ahead in processes of its own."""

    @property
    def pids(self) -> tuple[int, ...]: ...

    def start(self) -> None: ...

    def get(self, key: ReadKey, foresee: Foresight) -> Any: ...

    def look_ahead(self, step: int, foresee: Foresight) -> None: ...

    def close(self) -> None: ...


class Reader:
    """What reads data when asked, or lets `ahead` do it before."""

    def __init__(self, ahead: ReadAhead | None) -> None:
        self._ahead = ahead
        self._ghost_samples: list[Any] = []
        if ahead:
            weakref.finalize(self, ahead.close)

    @property
    def pids(self) -> tuple[int, ...]:
        """The worker processes."""
        return self._ahead.pids if self._ahead else ()

    def start(self) -> None:
        """Start the worker processes before the first batch is asked for; call it from the main thread."""
        if self._ahead:
            self._ahead.start()


class ShareLoader(Reader):
    """Reads slices of global batches from a map-style dataset, ahead of time or, if nothing does that, when asked.

    `micro`, the largest number of samples in one piece, and the sizes of the order's batches may change between steps.
    """

    def __init__(
        self, order: SampleOrder, fetcher: Fetcher, ahead: ReadAhead | None = None, micro: int | None = None
    ) -> None:
        super().__init__(ahead)
        self.micro_batch_size = micro
        self.order = order
        self._fetcher = fetcher

    def sizes(self, span: Span) -> tuple[int, ...]:
        """How many samples each piece that `take` gives for this span has."""
        return cut(span[1] - span[0], self.micro_batch_size)

    def take(self, step: int, span: Span, ahead: Spans) -> list[Batch]:
        """The pieces of this span of global batch `step`; ahead(later step) says what will probably be asked for."""
        if span[0] < span[1]:
            return self._get(self._key(step, span), ahead)
        if self._ahead:
            self._ahead.look_ahead(step, self._foresight(ahead))
        return []

    def placeholder_batch(self, step: int) -> Batch:
        """A tiny batch for a member with an empty share: it computes along, and counts for nothing."""
        if not self._ghost_samples:
            few = (0, min(GHOST_SAMPLES, self.order.size_of(step)))
            self._ghost_samples = self._get(
                self._key(step, few)._replace(micro_batch_size=None, bare=True), lambda _: None
            )
        return self._fetcher.collate(self._ghost_samples)

    def close(self) -> None:
        """End the worker processes."""
        if self._ahead:
            self._ahead.close()

    def _key(self, step: int, span: Span) -> ReadKey:
        place = self.order.position(step)
        return ReadKey(step, place.first + span[0], place.first + span[1], self.micro_batch_size, epoch=place.epoch)

    def _foresight(self, ahead: Spans) -> Foresight:
        def foresee(step: int) -> ReadKey | None:
            span = ahead(step)
            return None if span is None or span[0] == span[1] else self._key(step, span)

        return foresee

    def _get(self, key: ReadKey, ahead: Spans) -> list[Any]:
        if self._ahead:
            pieces: list[Any] = self._ahead.get(key, self._foresight(ahead))
            return pieces
        if self._fetcher.quiet and not key.bare:
            return self._fetcher.read(key, always) or []
        with self._fetcher.generators.preserved():
            return self._fetcher.read(key, always) or []
