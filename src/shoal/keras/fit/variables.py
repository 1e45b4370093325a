"""Kinds of variables in a model: weights, layer state, states of random generators, and metrics.

Each kind is treated differently by a distributed step. Weights change through summed gradients alone. Layer state with
a mean (moving averages) is averaged over the members; other layer state (counters) is not. Random
states are seeded from the step. Metrics are summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def seed_variables(model: Any) -> list[Any]:
    """Return the states of the layers' random generators."""
    return [v for v in model.non_trainable_variables if _is_seed(v)]


def weight_ids(model: Any) -> set[int]:
    """Return the ids of all weights, frozen or not; no step changes the frozen ones."""
    return {id(v) for layer in model._flatten_layers() for v in layer._trainable_variables}


def layer_state(model: Any) -> list[Any]:
    """Return the variables that layers update in a forward pass, such as moving means or counters."""
    weights = weight_ids(model)
    return [v for v in model.non_trainable_variables if not _is_seed(v) and id(v) not in weights]


def layer_statistics(model: Any) -> list[Any]:
    """Return the part of the layer state that can be averaged."""
    return [v for v in layer_state(model) if "float" in str(v.dtype)]


def reseed(variables: Sequence[Any], seed: int) -> None:
    """Set the states of random generators as a function of `seed`."""
    for number, variable in enumerate(variables):
        halves = np.array([seed & 0xFFFF_FFFF, (seed >> 32) + number], np.uint32)
        variable.assign(halves.astype(str(variable.dtype)))


def summed_loss(model: Any, metric_variables: Sequence[Any], changes: Sequence[NDArray[Any]]) -> float:
    """Return the change of the model's loss tracker, the sum of the samples' losses; 0 if the model has no tracker."""
    tracker = getattr(model, "_loss_tracker", None)
    total = tracker.variables[0] if tracker is not None and tracker.variables else None
    index = next((number for number, variable in enumerate(metric_variables) if variable is total), None)
    return float(changes[index]) if index is not None else 0.0


def _is_seed(variable: Any) -> bool:
    return str(variable.path).endswith("seed_generator_state")
