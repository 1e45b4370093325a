"""This member's share of global batch k, read ahead, without caring how often the world changes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from shoal.core.order import Order
from shoal.errors import BadSize
from shoal.torch.fetch import Batch, Collate, Fetcher, Key, always, cut, preserved
from shoal.torch.prefetch import Prefetch

Span = tuple[int, int]
Ahead = Callable[[int], Span | None]

# BatchNorm refuses to train on a single sample.
GHOST_SAMPLES = 2


class ShareLoader:
    """Reads slices of global batches from a map-style dataset, in `workers` processes or, with none, in this one.

    `micro`, the largest number of samples in one piece, and the sizes of the order's batches may change between steps.
    """

    def __init__(
        self,
        dataset: Any,
        order: Order,
        workers: int = 0,
        prefetch: int = 2,
        collate: Collate | None = None,
        micro: int | None = None,
        pin_memory: bool = False,
    ) -> None:
        for name, value, least in (("workers", workers, 0), ("prefetch", prefetch, 1), ("micro", micro or 1, 1)):
            if value < least:
                raise BadSize(f"{name}={value}", why=f"it must be at least {least}", do=f"pass {name}={least} or more")
        self.micro = micro
        self.order = order
        self._fetcher = Fetcher(dataset, order, collate)
        self._pin = pin_memory and torch.cuda.is_available()
        self._prefetch = Prefetch(self._fetcher, workers, prefetch, self._pin) if workers else None
        self._ghost_samples: list[Any] = []
        if self._prefetch:
            weakref.finalize(self, self._prefetch.close)

    @property
    def pids(self) -> tuple[int, ...]:
        """The worker processes."""
        return self._prefetch.pids if self._prefetch else ()

    def start(self) -> None:
        """Start the worker processes before the first batch is asked for; call it from the main thread."""
        if self._prefetch:
            self._prefetch.start()

    def sizes(self, span: Span) -> tuple[int, ...]:
        """How many samples each piece that `take` gives for this span has."""
        return cut(span[1] - span[0], self.micro)

    def take(self, step: int, span: Span, ahead: Ahead) -> list[Batch]:
        """The pieces of this span of global batch `step`; ahead(later step) says what will probably be asked for."""
        if span[0] < span[1]:
            return self._get(self._key(step, span), ahead)
        if self._prefetch:
            self._prefetch.look_ahead(step, self._foresight(ahead))
        return []

    def ghost(self, step: int) -> Batch:
        """A tiny batch for a member with an empty share: it computes along, and counts for nothing."""
        if not self._ghost_samples:
            few = (0, min(GHOST_SAMPLES, self.order.size_of(step)))
            self._ghost_samples = self._get(self._key(step, few)._replace(micro=None, bare=True), lambda _: None)
        return self._fetcher.collate(self._ghost_samples)

    def close(self) -> None:
        """End the worker processes."""
        if self._prefetch:
            self._prefetch.close()

    def _key(self, step: int, span: Span) -> Key:
        place = self.order.place(step)
        return Key(step, place.first + span[0], place.first + span[1], self.micro, epoch=place.epoch)

    def _foresight(self, ahead: Ahead) -> Callable[[int], Key | None]:
        def foresee(step: int) -> Key | None:
            span = ahead(step)
            return None if span is None or span[0] == span[1] else self._key(step, span)

        return foresee

    def _get(self, key: Key, ahead: Ahead) -> list[Any]:
        if self._prefetch:
            pieces: list[Any] = self._prefetch.get(key, self._foresight(ahead))
            return pieces
        if self._fetcher.quiet and not key.bare:
            return self._fetcher.read(key, always) or []
        with preserved():
            return self._fetcher.read(key, always) or []
