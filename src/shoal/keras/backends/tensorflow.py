"""Keras on TensorFlow: one function computes gradients, another applies them; what is between them is NumPy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from shoal.errors import UnusableModel
from shoal.keras.backends.base import Arrays, Given, KerasBackend, Logs, TrainStepResult
from shoal.keras.backends.optimizer_guard import OptimizerGuard, only


class TensorFlowBackend(KerasBackend):
    """Traced once: the number of samples of a batch is left open."""

    def __init__(self, model: Any, guard: OptimizerGuard, jit: bool) -> None:
        super().__init__(model, guard)
        if tf.distribute.has_strategy() or getattr(model, "_distribute_strategy", None) is not None:
            raise UnusableModel(
                "a tf.distribute strategy is active",
                why="it would sum gradients a second time",
                do="build and compile the model outside strategy.scope()",
            )
        self._computing: Callable[[Any], tuple[Any, ...]] | None = None
        self._applying: Callable[..., Logs] | None = None
        self._results: Callable[[], Logs] = model.get_metrics_result
        self._jit = jit
        self.traces = 0
        if not model.run_eagerly:
            self._results = tf.function(model.get_metrics_result)

    @property
    def compiles(self) -> bool:
        # XLA compiles for one number of samples, which is not the one that comes.
        return not self.model.run_eagerly and not self._jit

    def compute(self, batch: Any) -> TrainStepResult:
        batch = keras.tree.map_structure(lambda leaf: None if leaf is None else tf.convert_to_tensor(leaf), batch)
        if self._computing is None:
            self._computing = self._compute if self.model.run_eagerly else self._traced(batch)
        logs, *found = self._computing(batch)
        gradients, statistics, before, after = ([np.asarray(one) for one in some] for some in found)
        return TrainStepResult(logs, gradients, statistics, before, after)

    def take(self, given: Given, gradients: list[Any], variables: list[Any] | None) -> None:
        places = [place for place, one in enumerate(gradients) if one is not None]
        dense = [tf.convert_to_tensor(gradients[place]) for place in places]

        def apply(summed: Sequence[Any]) -> None:
            whole: list[Any] = [None] * len(gradients)
            for place, one in zip(places, summed, strict=True):
                whole[place] = one
            self._guard.apply(whole, variables)

        if tf.executing_eagerly():
            found = given([np.asarray(one) for one in dense])
            if found is not None:
                apply([_tensor(one) for one in found])
            return

        def ask(*eager: Any) -> list[Any]:
            found = given([np.asarray(one) for one in eager])
            return [found is not None, *(eager if found is None else map(_tensor, found))]

        allowed, *summed = tf.py_function(ask, dense, [tf.bool, *(one.dtype for one in dense)])
        shaped = [tf.ensure_shape(one, like.shape) for one, like in zip(summed, dense, strict=True)]
        tf.cond(allowed, lambda: apply(shaped), lambda: None)

    def apply(self, gradients: Arrays, statistics: Arrays, meters: Arrays) -> Logs:
        if self._applying is None:
            self._applying = (
                self._change if self.model.run_eagerly else tf.function(self._change, jit_compile=self._jit)
            )
        held = [[tf.constant(one) for one in some] for some in (statistics, meters)]
        return dict(self._applying([_tensor(one) for one in gradients], *held))

    def applier(self, optimizer: Any, variables: list[Any]) -> Callable[[Arrays], None]:
        @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
        def apply(gradients: list[Any]) -> None:
            optimizer.apply(gradients, variables)

        applying = apply if self.model.run_eagerly else tf.function(apply)
        return lambda gradients: applying([tf.convert_to_tensor(one) for one in gradients])

    def read(self, variable: Any) -> NDArray[Any]:
        return np.asarray(variable.value.read_value() if hasattr(variable.value, "read_value") else variable.value)

    def results(self) -> Logs:
        return dict(self._results())

    def is_out_of_memory(self, error: BaseException) -> bool:
        return isinstance(error, MemoryError | tf.errors.ResourceExhaustedError)

    def _traced(self, batch: Any) -> Callable[[Any], tuple[Any, ...]]:
        spec = keras.tree.map_structure(_open_spec, batch)
        traced: Any = tf.function(self._compute, input_signature=[spec], jit_compile=self._jit)
        return traced  # type: ignore[no-any-return]

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def _compute(self, batch: Any) -> tuple[Any, ...]:
        self.traces += 1
        before = [tf.identity(one.value) for one in self.meters]
        with self._guard.keeping() as kept:
            logs = self.model.train_step(batch)
        asked = only(kept)
        self._places = [place for place, one in enumerate(asked.gradients) if one is not None]
        self._variables = asked.variables
        # Those of embeddings are sparse.
        gradients = [tf.convert_to_tensor(asked.gradients[place]) for place in self._places]
        statistics, after = ([tf.identity(v.value) for v in some] for some in (self.statistics, self.meters))
        return logs, gradients, statistics, before, after

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def _change(self, gradients: list[Any], statistics: list[Any], meters: list[Any]) -> Logs:
        whole: list[Any] = [None] * len(self._variables or self.model.trainable_variables)
        for place, one in zip(self._places, gradients, strict=True):
            whole[place] = one
        self._guard.apply(whole, self._variables)
        for variable, value in zip((*self.statistics, *self.meters), (*statistics, *meters), strict=True):
            variable.assign(value)
        found: Logs = self.model.get_metrics_result()
        return found


def _open_spec(leaf: Any) -> Any:
    return None if leaf is None else tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype)


def _tensor(array: NDArray[Any]) -> Any:
    """A tensor over the same memory: it is used up before that changes."""
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
