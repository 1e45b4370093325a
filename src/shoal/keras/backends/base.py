"""Interface to Keras' backends, and the choice between them.

A Keras model trains itself: its `train_step` computes a loss, takes gradients, hands them to its optimizer and updates
its metrics, all in one go. An elastic step needs a gap in the middle, between the gradients of this member and the
gradients of the whole global batch. The gap is made in two halves:

- `compute` runs the model's own `train_step`. The `OptimizerGuard` intercepts the call of `optimizer.apply`: nothing is
  applied, and the gradients are returned instead, with what else the step changed: the statistics that layers keep
  (moving means, for example) and the variables of the metrics, the latter as they were before the step and after it.
- `apply` hands the optimizer the gradients it is given, assigns the statistics and the metric variables, and returns
  the metric results. These may be values that no member computed alone.

Between the halves every value is a NumPy array, so that the layers above need to know no tensor library. Gradients come
without the variables that have none; a backend remembers which variables those were, and puts the gaps back when it
applies. This is the same on every member, since all members run the same model.

A script with a loop of its own calls `optimizer.apply` itself. Then there is no `train_step` to run: the guard calls
`sum_and_apply`, which sums the gradients it was given and applies the sums in their place.

The two backends differ in when code runs. PyTorch runs `train_step` eagerly. TensorFlow traces it once into a graph,
with the batch dimension left open because shares differ in size; `apply` is a second graph. Tracing takes seconds, so
`compiles` tells the trainer to do a warm-up step before it joins, while no other member waits for it. JAX keeps all
state in the arguments of its train step, where none of this can reach it, and is refused.
"""

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
SumGradients = Callable[[Arrays], Arrays | None]
"""Takes the gradients of a micro-batch; returns those of the global batch if they are to be applied now."""


class TrainStepResult(NamedTuple):
    """Outcome of a train step on one micro-batch, before its optimizer.

    `statistics` are those of the layers after the step; `metrics_before` and `metrics_after` are the values of the
    metric variables.
    """

    logs: Logs
    gradients: Arrays
    statistics: Arrays
    metrics_before: Arrays
    metrics_after: Arrays


class KerasBackend(ABC):
    """Computes and applies the gradients of one model, as its own `train_step` would.

    `statistics` and `metric_variables` are the variables of layers and metrics that a step changes besides the trained
    ones.
    """

    def __init__(self, model: Any, guard: OptimizerGuard) -> None:
        self.model, self._guard = model, guard
        self.statistics: list[Any] = []
        self.metric_variables: list[Any] = []
        # The variables that the last step applied gradients to, None for all trainable ones; and the indices of those
        # that had a gradient.
        self._applied_variables: list[Any] | None = None
        self._gradient_indices: list[int] = []

    @property
    def optimizer(self) -> Any:
        return self._guard.optimizer

    @property
    def variables_with_gradient(self) -> list[Any]:
        """The variables whose gradients were computed last."""
        variables = self._applied_variables or self.model.trainable_variables
        return [variables[index] for index in self._gradient_indices]

    def release(self) -> None:
        """Restore the `apply` method of the model's optimizer."""
        self._guard.release()

    def seed(self, seed: int) -> None:
        """Seed all random generators but those of layers, which are variables."""
        RngState().seed(seed)

    @property
    def arithmetic(self) -> str:
        """A text that is equal where the same operations give the same bits on equal processors."""
        return f"keras {keras.__version__} on {keras.backend.backend()}"

    @property
    def compiles(self) -> bool:
        """Whether the first step is much slower than others, and a warm-up step avoids that."""
        return False

    @abstractmethod
    def compute(self, batch: Any) -> TrainStepResult:
        """Run the model's train_step up to its optimizer; omit variables without a gradient."""

    @abstractmethod
    def sum_and_apply(self, sum_gradients: SumGradients, gradients: list[Any], variables: list[Any] | None) -> None:
        """Pass the gradients of a script's own loop to `sum_gradients`, and apply what it returns, if anything."""

    @abstractmethod
    def apply(self, gradients: Arrays, statistics: Arrays, metrics: Arrays) -> Logs:
        """Apply gradients, assign layer statistics and metric variables, and return the metric results."""

    @abstractmethod
    def make_applier(self, optimizer: Any, variables: list[Any]) -> Callable[[Arrays], None]:
        """Return a function for a server that applies gradients of these variables with an optimizer built for them."""

    @abstractmethod
    def read(self, variable: Any) -> NDArray[Any]:
        """Return the value of a variable; it may share the variable's memory."""

    @abstractmethod
    def metric_results(self) -> Logs:
        """Return the current results of the model's metrics."""

    @abstractmethod
    def is_out_of_memory(self, error: BaseException) -> bool:
        """Return whether smaller micro-batches may avoid this error."""


def check_backend() -> None:
    """Raise UnusableModel if Keras is set to a backend that Shoal does not support."""
    if (name := keras.backend.backend()) not in BACKENDS:
        raise UnusableModel(
            f"unsupported Keras backend {name!r}",
            why="its train step keeps all state in arguments, where Shoal cannot see it",
            do="set KERAS_BACKEND=tensorflow or KERAS_BACKEND=torch before Keras is imported",
        )


def make_backend(model: Any, guard: OptimizerGuard, jit: bool = False) -> KerasBackend:
    """Return the backend that Keras is set to; `jit` compiles steps with XLA."""
    if keras.backend.backend() == "torch":
        from shoal.keras.backends.torch import TorchBackend

        return TorchBackend(model, guard)
    from shoal.keras.backends.tensorflow import TensorFlowBackend

    return TensorFlowBackend(model, guard, jit)


def build_model(model: Any, guard: OptimizerGuard, batch: Any) -> None:
    """Create the variables of a model, as `fit` would before or in its first step.

    A model without `call`, which has only a `train_step`, cannot be called with symbolic inputs; on TensorFlow plain
    `fit` trains it all the same, because tracing the train step creates what is missing.
    """
    traceable = keras.backend.backend() == "tensorflow" and not model.run_eagerly
    if not traceable or type(model).call is not keras.Model.call:
        model._symbolic_build(data_batch=batch)
        return
    from shoal.keras.backends.tensorflow import trace_train_step

    trace_train_step(model, guard, batch)
