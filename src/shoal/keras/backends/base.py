"""What differs between Keras' backends: how gradients are computed and applied, and how variables are read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
from numpy.typing import NDArray

from shoal.errors import UnusableModel
from shoal.keras.backends.optimizer_guard import OptimizerGuard
from shoal.worker.data.rng_state import RngState

BACKENDS = ("tensorflow", "torch")

Logs = dict[str, Any]
Arrays = list[NDArray[Any]]
Given = Callable[[Arrays], Arrays | None]
"""Takes the gradients of a piece; returns those of the whole global batch if they are to be applied now."""


class TrainStepResult(NamedTuple):
    """What a train step made of one batch.

    `statistics` are what layers keep, after it; `before` and `after` are what metrics hold.
    """

    logs: Logs
    gradients: Arrays
    statistics: Arrays
    before: Arrays
    after: Arrays


class KerasBackend(ABC):
    """Computes and applies the gradients of one model, as its own `train_step` would.

    `statistics` and `meters` are the variables of layers and metrics that a step changes besides what it trains.
    """

    def __init__(self, model: Any, guard: OptimizerGuard) -> None:
        self.model, self._guard = model, guard
        self.statistics: list[Any] = []
        self.meters: list[Any] = []
        # Which of the variables had a gradient; which they were, if they are not all that the model trains.
        self._places: list[int] = []
        self._variables: list[Any] | None = None

    @property
    def optimizer(self) -> Any:
        return self._guard.optimizer

    @property
    def trained(self) -> list[Any]:
        """The variables whose gradients were computed last."""
        variables = self._variables or self.model.trainable_variables
        return [variables[place] for place in self._places]

    def release(self) -> None:
        """Let the model's optimizer be as it was."""
        self._guard.release()

    def seed(self, seed: int) -> None:
        """Let all random numbers start anew but those of layers, which are variables."""
        RngState().seed(seed)

    @property
    def compiles(self) -> bool:
        """Whether the first step takes far longer than others, and that can be got over with beforehand."""
        return False

    @abstractmethod
    def compute(self, batch: Any) -> TrainStepResult:
        """Run the model's train_step up to its optimizer; those variables that have no gradient are left out."""

    @abstractmethod
    def take(self, given: Given, gradients: list[Any], variables: list[Any] | None) -> None:
        """Apply what `given` makes of these gradients, which a loop of the script's own computed, if anything."""

    @abstractmethod
    def apply(self, gradients: Arrays, statistics: Arrays, meters: Arrays) -> Logs:
        """What the optimizer would have done with these gradients; what the metrics say when they hold `meters`."""

    @abstractmethod
    def applier(self, optimizer: Any, variables: list[Any]) -> Callable[[Arrays], None]:
        """What applies gradients of these variables with an optimizer that was built for them, on a server."""

    @abstractmethod
    def read(self, variable: Any) -> NDArray[Any]:
        """The value of a variable; it may change with the variable."""

    @abstractmethod
    def results(self) -> Logs:
        """What the model's metrics say now."""

    @abstractmethod
    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether smaller pieces may help."""


def check_backend() -> None:
    """Raise if Keras is set to a backend that cannot be used: it would ask things of us that we do not have."""
    if (name := keras.backend.backend()) not in BACKENDS:
        raise UnusableModel(
            f"Keras' {name} backend cannot be used",
            why="its train step keeps all state in arguments, where Shoal does not see it",
            do="set KERAS_BACKEND=tensorflow or KERAS_BACKEND=torch before Keras is imported",
        )


def backend_of(model: Any, guard: OptimizerGuard, jit: bool = False) -> KerasBackend:
    """The backend that Keras is set to; `jit` says whether to compile steps."""
    if keras.backend.backend() == "torch":
        from shoal.keras.backends.torch import TorchBackend

        return TorchBackend(model, guard)
    from shoal.keras.backends.tensorflow import TensorFlowBackend

    return TensorFlowBackend(model, guard, jit)
