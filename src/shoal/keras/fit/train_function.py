"""What `model.fit` asks of a loop: each call of the train function takes pieces out of it until one has made a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

from shoal.keras.backends.base import KerasBackend, Logs
from shoal.worker.data.feed import Feed


class TrainFunction(ABC):
    """Goes with a loop of `shoal.worker`, whose body it is."""

    feed: Feed | None
    epoch_of: Callable[[int], int]
    _backend: KerasBackend
    _batches: Iterator[Any] | None = None
    _held: Any = None

    @property
    @abstractmethod
    def committed(self) -> bool:
        """Whether the last piece made a step."""

    @property
    @abstractmethod
    def _next_step(self) -> int | None:
        """The step that the next piece is of; None if there is none."""

    @abstractmethod
    def train(self, feed: Feed, identity: str, seed: int) -> Iterator[Any]:
        """The pieces of this member."""

    @abstractmethod
    def _piece(self, batch: Any) -> Logs:
        """Compute one of them; what the metrics say after it."""

    def begin(self, feed: Feed, identity: str, seed: int) -> None:
        """Join the run; returns when the first step of this member can be done. A server never returns."""
        self.feed = feed
        self._batches = self.train(feed, identity, seed)
        self._held = next(self._batches, None)

    def coming(self) -> tuple[int, Any] | None:
        """The number of the next step and our first piece of it; None after the last one."""
        if self._held is None and self._batches is not None:
            self._held = next(self._batches, None)
        step = self._next_step
        return None if self._held is None or step is None else (step, self._held)

    def step(self) -> Logs:
        """Do one step, however often it has to be done; what the metrics say after it."""
        logs: Logs = {}
        found = self.coming()
        epoch = self.epoch_of(found[0]) if found is not None else 0
        # What others did without us and handed over may have been the last step of an epoch, which Keras has to end.
        while found is not None and self.epoch_of(found[0]) <= epoch:
            self._held = None
            logs = self._piece(found[1])
            if self.committed:
                break
            found = self.coming()
        return logs

    def results(self) -> Logs:
        """What the metrics say now."""
        return self._backend.results()

    def end(self) -> None:
        """The script is done with the loop, wherever that is."""
        if self._batches is not None:
            self._batches.close()  # type: ignore[attr-defined]

    def release(self) -> None:
        """The model's optimizer is the script's own again."""
        self._backend.release()

    @property
    def model(self) -> Any:
        return self._backend.model
