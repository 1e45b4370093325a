"""Optimizers of shards: each shard has a copy of the script's optimizer, with the same settings and its own state.

So shards on one server may be at different steps, and what an optimizer keeps besides the slots of its variables (its
iterations, its learning rate, products of decays) is never shared between them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import keras

from shoal.errors import UnsupportedWithServers

PLAIN_TYPES = (bool, int, float, str, set, frozenset, re.Pattern)
# Attributes that each optimizer must have for itself.
NOT_COPIED = ("built", "name", "_lock")


def unsupported_feature(optimizer: Any) -> tuple[str, str] | None:
    """Return a feature that needs the gradients of the whole model at once, with what to do instead; None if none."""
    if hasattr(optimizer, "inner_optimizer"):
        return "loss scaling", "train in mixed_bfloat16, which needs none"
    if isinstance(optimizer, getattr(keras.optimizers, "MultiOptimizer", ())):
        return "MultiOptimizer", "compile the model with one plain optimizer"
    if optimizer.global_clipnorm:
        return "global_clipnorm", "clip each gradient by clipnorm or clipvalue"
    return None


def copy_optimizer(optimizer: Any, variables: Sequence[Any]) -> Any:
    """Return an optimizer like the script's, built for these variables."""
    try:
        config = optimizer.get_config()
        rate = optimizer._learning_rate
        if not hasattr(rate, "assign"):
            # A schedule can be shared: it has no state, and is evaluated at the copy's own iterations.
            config["learning_rate"] = rate
        copy = type(optimizer).from_config(config)
    except (NotImplementedError, TypeError, ValueError) as error:
        name = type(optimizer).__name__
        raise UnsupportedWithServers(
            f"{name} cannot be copied for a shard of the model — {type(error).__name__}: {error}",
            why="servers create an optimizer for each shard from the configuration of the script's",
            do=f"let get_config of {name} return what its __init__ takes, or use --sync step",
        ) from error
    for name, value in vars(optimizer).items():
        # The configuration lacks some settings, such as those of exclude_from_weight_decay.
        copied = isinstance(value, PLAIN_TYPES) and name not in NOT_COPIED and not name.startswith("_self_")
        if copied and vars(copy).get(name) != value:
            setattr(copy, name, value)
    copy.build(list(variables))
    return copy


def moving_averages(optimizer: Any, variables: Sequence[Any]) -> list[Any]:
    """Return the moving averages that the optimizer keeps of these variables; none without use_ema."""
    if not optimizer.use_ema:
        return []
    averages = optimizer._model_variables_moving_average
    own = [averages[optimizer._get_variable_index(v)] for v in variables]
    return [average for average in own if average is not None]
