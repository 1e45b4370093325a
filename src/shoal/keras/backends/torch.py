"""Keras on PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import torch
from numpy.typing import NDArray

from shoal.keras.backends.base import Arrays, Given, KerasBackend, Logs, TrainStepResult
from shoal.keras.backends.optimizer_guard import only
from shoal.worker.training.loop import mentions_out_of_memory


class TorchBackend(KerasBackend):
    """Runs the model's train_step as it is."""

    def seed(self, seed: int) -> None:
        super().seed(seed)
        # Dropout without a seed of its own draws from here.
        torch.default_generator.manual_seed(seed)

    def compute(self, batch: Any) -> TrainStepResult:
        batch = keras.tree.map_structure(
            lambda leaf: None if leaf is None else keras.ops.convert_to_tensor(leaf), batch
        )
        before = [self.read(one).copy() for one in self.meters]
        with self._guard.keeping() as kept:
            logs = self.model.train_step(batch)
        asked = only(kept)
        gradients = self._noted(asked.gradients, asked.variables)
        statistics, after = ([self.read(v) for v in some] for some in (self.statistics, self.meters))
        return TrainStepResult(logs, gradients, statistics, before, after)

    def take(self, given: Given, gradients: list[Any], variables: list[Any] | None) -> None:
        found = given(self._noted(gradients, variables))
        if found is not None:
            self._change(found)

    def _noted(self, gradients: list[Any], variables: list[Any] | None) -> list[NDArray[Any]]:
        self._places = [place for place, one in enumerate(gradients) if one is not None]
        self._variables = variables
        return [gradients[place].detach().cpu().numpy() for place in self._places]

    def apply(self, gradients: Arrays, statistics: Arrays, meters: Arrays) -> Logs:
        self._change(gradients)
        for variable, value in zip((*self.statistics, *self.meters), (*statistics, *meters), strict=True):
            variable.assign(value)
        return self.results()

    def _change(self, gradients: Arrays) -> None:
        whole: list[Any] = [None] * len(self._variables or self.model.trainable_variables)
        variables = self._variables or self.model.trainable_variables
        for place, one in zip(self._places, gradients, strict=True):
            value = variables[place].value
            whole[place] = torch.from_numpy(one).to(device=value.device, dtype=value.dtype)
        with torch.no_grad():
            self._guard.apply(whole, self._variables)

    def applier(self, optimizer: Any, variables: list[Any]) -> Callable[[Arrays], None]:
        def apply(gradients: Arrays) -> None:
            tensors = [
                torch.from_numpy(one).to(device=v.value.device, dtype=v.value.dtype)
                for one, v in zip(gradients, variables, strict=True)
            ]
            with torch.no_grad():
                optimizer.apply(tensors, variables)

        return apply

    def read(self, variable: Any) -> NDArray[Any]:
        found: NDArray[Any] = variable.value.detach().cpu().numpy()
        return found

    def results(self) -> Logs:
        return dict(self.model.get_metrics_result())

    def is_out_of_memory(self, error: BaseException) -> bool:
        return isinstance(error, torch.OutOfMemoryError) or mentions_out_of_memory(error)
