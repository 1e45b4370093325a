"""What differs between Keras' backends: how gradients are computed and applied, and how variables are read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import keras
from numpy.typing import NDArray

from shoal.errors import UnusableModel
from shoal.keras.guard import Guard

Logs = dict[str, Any]
Given = Callable[[list[NDArray[Any]]], list[NDArray[Any]] | None]
"""Takes the gradients of a piece; returns those of the whole global batch if they are to be applied now."""


class Backend(ABC):
    """Computes and applies the gradients of one model, as its own `train_step` would."""

    def __init__(self, model: Any, guard: Guard) -> None:
        self.model, self._guard = model, guard

    @property
    def optimizer(self) -> Any:
        return self._guard.optimizer

    def release(self) -> None:
        """Let the model's optimizer be as it was."""
        self._guard.release()

    @abstractmethod
    def gradients(self, batch: Any) -> tuple[Logs, list[NDArray[Any]]]:
        """Run the model's train_step up to its optimizer; those variables that have no gradient are left out."""

    @abstractmethod
    def take(self, given: Given, gradients: list[Any], variables: list[Any] | None) -> None:
        """Apply what `given` makes of these gradients, which a loop of the script's own computed, if anything."""

    @abstractmethod
    def apply(self, gradients: Sequence[NDArray[Any]]) -> None:
        """What the optimizer would have done with these gradients."""

    @abstractmethod
    def read(self, variable: Any) -> NDArray[Any]:
        """The value of a variable; it may change with the variable."""

    @abstractmethod
    def results(self) -> Logs:
        """What the model's metrics say now."""

    @abstractmethod
    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether smaller pieces may help."""


def backend_of(model: Any, guard: Guard) -> Backend:
    """The backend that Keras is set to."""
    name = keras.backend.backend()
    if name == "tensorflow":
        from shoal.keras.tensorflow import TensorFlow

        return TensorFlow(model, guard)
    if name == "torch":
        from shoal.keras.torch import Torch

        return Torch(model, guard)
    raise UnusableModel(
        f"Keras' {name} backend cannot be used",
        why="its train step keeps all state in arguments, where Shoal does not see it",
        do="set KERAS_BACKEND=tensorflow or KERAS_BACKEND=torch before Keras is imported",
    )
