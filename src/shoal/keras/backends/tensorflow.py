"""Keras on TensorFlow: one traced function computes gradients, another applies them; NumPy lies between them.

The first function is traced once, with an open number of samples, because the size of a share changes from step to
step. With `jit` XLA compiles it for each size that occurs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from shoal.errors import UnusableModel
from shoal.keras.backends.base import Arrays, KerasBackend, Logs, SumGradients, TrainStepResult
from shoal.keras.backends.optimizer_guard import (
    OptimizerGuard,
    refuse_assigned_weights,
    refuse_losses_per_sample,
    single_apply_call,
)


class TensorFlowBackend(KerasBackend):
    """Backend that traces the model's train step; `traces` counts how often, for tests."""

    def __init__(self, model: Any, guard: OptimizerGuard, jit: bool) -> None:
        super().__init__(model, guard)
        if tf.distribute.has_strategy() or getattr(model, "_distribute_strategy", None) is not None:
            raise UnusableModel(
                "a tf.distribute strategy is active",
                why="it would sum gradients a second time",
                do="build and compile the model outside strategy.scope()",
            )
        self._compute_function: Callable[[Any], tuple[Any, ...]] | None = None
        self._apply_function: Callable[..., Logs] | None = None
        self._metric_results: Callable[[], Logs] = model.get_metrics_result
        self._jit = jit
        self.traces = 0
        if not model.run_eagerly:
            self._metric_results = tf.function(model.get_metrics_result)

    @property
    def arithmetic(self) -> str:
        threads = tf.config.threading.get_intra_op_parallelism_threads()
        devices = {v.value.device for v in self.model.variables}
        return f"{super().arithmetic} {tf.__version__}, {threads} threads, {sorted(devices)}"

    @property
    def compiles(self) -> bool:
        # XLA compiles for one number of samples, and the warm-up step has another one than the steps that follow.
        return not self.model.run_eagerly and not self._jit

    def compute(self, batch: Any) -> TrainStepResult:
        batch = keras.tree.map_structure(lambda leaf: None if leaf is None else tf.convert_to_tensor(leaf), batch)
        if self._compute_function is None:
            self._compute_function = self._compute if self.model.run_eagerly else self._traced(batch)
        logs, *tensor_lists = self._compute_function(batch)
        return TrainStepResult(logs, *([np.asarray(tensor) for tensor in tensors] for tensors in tensor_lists))

    def sum_and_apply(self, sum_gradients: SumGradients, gradients: list[Any], variables: list[Any] | None) -> None:
        indices = [index for index, gradient in enumerate(gradients) if gradient is not None]
        dense = [tf.convert_to_tensor(gradients[index]) for index in indices]

        def apply(sums: Sequence[Any]) -> None:
            self._guard.apply(_with_gaps(len(gradients), indices, sums), variables)

        if tf.executing_eagerly():
            sums = sum_gradients([np.asarray(gradient) for gradient in dense])
            if sums is not None:
                apply([_tensor(array) for array in sums])
            return

        # Inside the script's own tf.function: leave the graph for the sums, and apply them only if there are any.
        def sum_eagerly(*eager: Any) -> list[Any]:
            sums = sum_gradients([np.asarray(gradient) for gradient in eager])
            return [sums is not None, *(eager if sums is None else map(_tensor, sums))]

        complete, *summed = tf.py_function(sum_eagerly, dense, [tf.bool, *(gradient.dtype for gradient in dense)])
        shaped = [tf.ensure_shape(array, like.shape) for array, like in zip(summed, dense, strict=True)]
        tf.cond(complete, lambda: apply(shaped), lambda: None)

    def apply(self, gradients: Arrays, statistics: Arrays, metrics: Arrays) -> Logs:
        if self._apply_function is None:
            self._apply_function = (
                self._apply if self.model.run_eagerly else tf.function(self._apply, jit_compile=self._jit)
            )
        constants = [[tf.constant(array) for array in arrays] for arrays in (statistics, metrics)]
        return dict(self._apply_function([_tensor(gradient) for gradient in gradients], *constants))

    def make_applier(self, optimizer: Any, variables: list[Any]) -> Callable[[Arrays], None]:
        @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
        def apply(gradients: list[Any]) -> None:
            optimizer.apply(gradients, variables)

        function = apply if self.model.run_eagerly else tf.function(apply)
        return lambda gradients: function([tf.convert_to_tensor(gradient) for gradient in gradients])

    def read(self, variable: Any) -> NDArray[Any]:
        return np.asarray(variable.value.read_value() if hasattr(variable.value, "read_value") else variable.value)

    def metric_results(self) -> Logs:
        return dict(self._metric_results())

    def is_out_of_memory(self, error: BaseException) -> bool:
        return isinstance(error, MemoryError | tf.errors.ResourceExhaustedError)

    def _traced(self, batch: Any) -> Callable[[Any], tuple[Any, ...]]:
        spec = keras.tree.map_structure(_open_spec, batch)
        traced: Any = tf.function(self._compute, input_signature=[spec], jit_compile=self._jit)
        return traced  # type: ignore[no-any-return]

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def _compute(self, batch: Any) -> tuple[Any, ...]:
        self.traces += 1
        metrics_before = [tf.identity(variable.value) for variable in self.metric_variables]
        with self._guard.capturing() as captured:
            logs = self.model.train_step(batch)
        call = single_apply_call(captured)
        refuse_assigned_weights(self._guard.assigned, self.model)
        refuse_losses_per_sample(self.model)
        self._gradient_indices = [index for index, gradient in enumerate(call.gradients) if gradient is not None]
        self._applied_variables = call.variables
        # Converted, because the gradients of embeddings are sparse.
        gradients = [tf.convert_to_tensor(call.gradients[index]) for index in self._gradient_indices]
        statistics, metrics_after = (
            [tf.identity(variable.value) for variable in group] for group in (self.statistics, self.metric_variables)
        )
        return logs, gradients, statistics, metrics_before, metrics_after

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def _apply(self, gradients: list[Any], statistics: list[Any], metrics: list[Any]) -> Logs:
        count = len(self._applied_variables or self.model.trainable_variables)
        self._guard.apply(_with_gaps(count, self._gradient_indices, gradients), self._applied_variables)
        for variable, value in zip((*self.statistics, *self.metric_variables), (*statistics, *metrics), strict=True):
            variable.assign(value)
        logs: Logs = self.model.get_metrics_result()
        return logs


def trace_train_step(model: Any, guard: OptimizerGuard, batch: Any) -> None:
    """Trace the train step without executing it, which creates the variables of the layers that it uses."""

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def train_step(data: Any) -> None:
        with guard.capturing():
            model.train_step(data)

    batch = keras.tree.map_structure(lambda leaf: None if leaf is None else tf.convert_to_tensor(leaf), batch)
    spec = keras.tree.map_structure(_open_spec, batch)
    tf.function(train_step, input_signature=[spec]).get_concrete_function()


def _with_gaps(count: int, indices: Sequence[int], gradients: Sequence[Any]) -> list[Any]:
    """Return a list of `count` gradients, with None for variables that have none."""
    with_gaps: list[Any] = [None] * count
    for index, gradient in zip(indices, gradients, strict=True):
        with_gaps[index] = gradient
    return with_gaps


def _open_spec(leaf: Any) -> Any:
    return None if leaf is None else tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype)


def _tensor(array: NDArray[Any]) -> Any:
    """Return a tensor over the same memory; it must be used up before that memory changes."""
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
