"""What the variables of a model are: weights, statistics of layers, states of random generators, and metrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def seeds_of(model: Any) -> list[Any]:
    """The states of random generators."""
    return [v for v in model.non_trainable_variables if _is_seed(v)]


def weights_of(model: Any) -> set[int]:
    """The ids of all that layers could train, frozen or not; what is frozen changes in no step."""
    return {id(v) for layer in model._flatten_layers() for v in layer._trainable_variables}


def kept_of(model: Any) -> list[Any]:
    """What layers keep for themselves, such as means of what they have seen, or counters."""
    weights = weights_of(model)
    return [v for v in model.non_trainable_variables if not _is_seed(v) and id(v) not in weights]


def statistics_of(model: Any) -> list[Any]:
    """Of what layers keep, that of which a mean can be taken."""
    return [v for v in kept_of(model) if "float" in str(v.dtype)]


def reseed(seeds: Sequence[Any], seed: int) -> None:
    """Let the random numbers of layers start anew."""
    for number, variable in enumerate(seeds):
        halves = np.array([seed & 0xFFFF_FFFF, (seed >> 32) + number], np.uint32)
        variable.assign(halves.astype(str(variable.dtype)))


def loss_in(model: Any, meters: Sequence[Any], changes: Sequence[NDArray[Any]]) -> float:
    """The sum of the losses of the samples that changed the metrics so, if the model keeps count of it."""
    tracker = getattr(model, "_loss_tracker", None)
    held = tracker.variables[0] if tracker is not None and tracker.variables else None
    place = next((number for number, v in enumerate(meters) if v is held), None)
    return float(changes[place]) if place is not None else 0.0


def _is_seed(variable: Any) -> bool:
    return str(variable.path).endswith("seed_generator_state")
