"""Keras on PyTorch: `train_step` runs eagerly, as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import torch
from numpy.typing import NDArray

from shoal.keras.backends.base import Arrays, KerasBackend, Logs, SumGradients, TrainStepResult
from shoal.keras.backends.optimizer_guard import refuse_assigned_weights, refuse_losses_per_sample, single_apply_call
from shoal.worker.training.loop import mentions_out_of_memory


class TorchBackend(KerasBackend):
    """Backend whose variables are PyTorch tensors, on any device; their gradients are copied to the CPU."""

    @property
    def arithmetic(self) -> str:
        devices = {v.value.device.type for v in self.model.variables}
        return f"{super().arithmetic} {torch.__version__}, {torch.get_num_threads()} threads, {sorted(devices)}"

    def seed(self, seed: int) -> None:
        super().seed(seed)
        # Dropout without a seed of its own draws from this generator.
        torch.default_generator.manual_seed(seed)

    def compute(self, batch: Any) -> TrainStepResult:
        batch = keras.tree.map_structure(
            lambda leaf: None if leaf is None else keras.ops.convert_to_tensor(leaf), batch
        )
        metrics_before = [self.read(variable).copy() for variable in self.metric_variables]
        with self._guard.capturing() as captured:
            logs = self.model.train_step(batch)
        call = single_apply_call(captured)
        refuse_assigned_weights(self._guard.assigned, self.model)
        refuse_losses_per_sample(self.model)
        gradients = self._to_arrays(call.gradients, call.variables)
        statistics, metrics_after = (
            [self.read(variable) for variable in group] for group in (self.statistics, self.metric_variables)
        )
        return TrainStepResult(logs, gradients, statistics, metrics_before, metrics_after)

    def sum_and_apply(self, sum_gradients: SumGradients, gradients: list[Any], variables: list[Any] | None) -> None:
        sums = sum_gradients(self._to_arrays(gradients, variables))
        if sums is not None:
            self._apply_gradients(sums)

    def _to_arrays(self, gradients: list[Any], variables: list[Any] | None) -> list[NDArray[Any]]:
        """Return the gradients that exist, and remember which variables they belong to."""
        self._gradient_indices = [index for index, gradient in enumerate(gradients) if gradient is not None]
        self._applied_variables = variables
        return [gradients[index].detach().cpu().numpy() for index in self._gradient_indices]

    def apply(self, gradients: Arrays, statistics: Arrays, metrics: Arrays) -> Logs:
        self._apply_gradients(gradients)
        for variable, value in zip((*self.statistics, *self.metric_variables), (*statistics, *metrics), strict=True):
            variable.assign(value)
        return self.metric_results()

    def _apply_gradients(self, gradients: Arrays) -> None:
        variables = self._applied_variables or self.model.trainable_variables
        with_gaps: list[Any] = [None] * len(variables)
        for index, gradient in zip(self._gradient_indices, gradients, strict=True):
            with_gaps[index] = _like(variables[index], gradient)
        with torch.no_grad():
            self._guard.apply(with_gaps, self._applied_variables)

    def make_applier(self, optimizer: Any, variables: list[Any]) -> Callable[[Arrays], None]:
        def apply(gradients: Arrays) -> None:
            tensors = [_like(variable, gradient) for variable, gradient in zip(variables, gradients, strict=True)]
            with torch.no_grad():
                optimizer.apply(tensors, variables)

        return apply

    def read(self, variable: Any) -> NDArray[Any]:
        value: NDArray[Any] = variable.value.detach().cpu().numpy()
        return value

    def metric_results(self) -> Logs:
        return dict(self.model.get_metrics_result())

    def is_out_of_memory(self, error: BaseException) -> bool:
        return isinstance(error, torch.OutOfMemoryError) or mentions_out_of_memory(error)


def _like(variable: Any, gradient: NDArray[Any]) -> torch.Tensor:
    """Return a gradient on the device and with the type of its variable."""
    return torch.from_numpy(gradient).to(device=variable.value.device, dtype=variable.value.dtype)
