"""Train function: what `model.fit` calls once per step of the run.

`fit` wants a function that does one step and returns logs. A training loop of `shoal.worker` is a generator that yields
micro-batches, and commits a step after the last one of it. `TrainFunction` joins the two: each call takes micro-batches
from the generator and trains on them until one of them completes a step. One micro-batch is held back between calls,
because only the generator knows which step comes next, and `fit` must know whether its epoch is over before it calls.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

from shoal.keras.backends.base import KerasBackend, Logs
from shoal.worker.data.feed import Feed


class TrainFunction(ABC):
    """Mixin for a loop of `shoal.worker` that runs the loop's body itself; `epoch_of` maps a step to Keras' epoch."""

    feed: Feed | None
    epoch_of: Callable[[int], int]
    _backend: KerasBackend
    _micro_batches: Iterator[Any] | None = None
    _held: Any = None

    @property
    @abstractmethod
    def committed(self) -> bool:
        """Whether the last micro-batch completed a step."""

    @property
    @abstractmethod
    def _next_step(self) -> int | None:
        """The step of the next micro-batch; None if there is none."""

    @abstractmethod
    def train(self, feed: Feed, identity: str, seed: int) -> Iterator[Any]:
        """Yield this member's micro-batches."""

    @abstractmethod
    def _train_micro_batch(self, batch: Any) -> Logs:
        """Train on one micro-batch; return the metric results after it."""

    def begin(self, feed: Feed, identity: str, seed: int) -> None:
        """Join the run; return when this member's first step can be done. A server never returns."""
        self.feed = feed
        self._micro_batches = self.train(feed, identity, seed)
        self._held = next(self._micro_batches, None)

    def next_micro_batch(self) -> tuple[int, Any] | None:
        """Return the number of the next step and its first micro-batch without consuming it; None after the last."""
        if self._held is None and self._micro_batches is not None:
            self._held = next(self._micro_batches, None)
        step = self._next_step
        return None if self._held is None or step is None else (step, self._held)

    def run_step(self) -> Logs:
        """Do one step, as often as it must be repeated, and return the metric results after it."""
        logs: Logs = {}
        coming = self.next_micro_batch()
        epoch = self.epoch_of(coming[0]) if coming is not None else 0
        # The rest of the world may have done the last step of the epoch without us; then Keras has to end the epoch.
        while coming is not None and self.epoch_of(coming[0]) <= epoch:
            self._held = None
            logs = self._train_micro_batch(coming[1])
            if self.committed:
                break
            coming = self.next_micro_batch()
        return logs

    def metric_results(self) -> Logs:
        """Return the current results of the model's metrics."""
        return self._backend.metric_results()

    def end(self) -> None:
        """Leave the loop, whether or not it is at its end."""
        if self._micro_batches is not None:
            self.closing = True
            self._micro_batches.close()  # type: ignore[attr-defined]

    def release(self) -> None:
        """Restore the `apply` method of the model's optimizer."""
        self._backend.release()

    @property
    def model(self) -> Any:
        return self._backend.model
