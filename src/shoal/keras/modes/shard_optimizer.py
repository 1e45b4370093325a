"""An optimizer of its own for every shard: of the same kind and settings as the script's, with its own state.

So shards on one server may be at different steps, and whatever an optimizer keeps besides the slots of its variables
(its iterations, its learning rate, products of decays) is never shared between them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import keras

from shoal.errors import UnsupportedWithServers

PLAIN = (bool, int, float, str, set, frozenset, re.Pattern)
OWN = ("built", "name", "_lock")


def refused(optimizer: Any) -> tuple[str, str] | None:
    """What of an optimizer needs the gradients of the whole model at once, and what to do instead."""
    if hasattr(optimizer, "inner_optimizer"):
        return "loss scaling", "train in mixed_bfloat16, which needs none"
    if isinstance(optimizer, getattr(keras.optimizers, "MultiOptimizer", ())):
        return "MultiOptimizer", "compile the model with one plain optimizer"
    if optimizer.global_clipnorm:
        return "global_clipnorm", "clip each gradient by clipnorm or clipvalue"
    return None


def copy_of(optimizer: Any, variables: Sequence[Any]) -> Any:
    """One like the script's, for these variables."""
    try:
        config = optimizer.get_config()
        rate = optimizer._learning_rate
        if not hasattr(rate, "assign"):
            # A schedule keeps no state: it is asked with the copy's own iterations.
            config["learning_rate"] = rate
        found = type(optimizer).from_config(config)
    except (NotImplementedError, TypeError, ValueError) as error:
        kind = type(optimizer).__name__
        raise UnsupportedWithServers(
            f"{kind} cannot be made anew for a part of the model: {type(error).__name__}: {error}",
            why="every server steps with optimizers of its own, which are made from the configuration of the script's",
            do=f"let get_config of {kind} return what its __init__ takes, or use --sync step",
        ) from error
    for name, value in vars(optimizer).items():
        # Such as what exclude_from_weight_decay was told, which is no part of the configuration.
        plain = isinstance(value, PLAIN) and name not in OWN and not name.startswith("_self_")
        if plain and vars(found).get(name) != value:
            setattr(found, name, value)
    found.build(list(variables))
    return found


def averages_of(optimizer: Any, variables: Sequence[Any]) -> list[Any]:
    """The moving averages that an optimizer keeps of these variables, if it was asked to."""
    if not optimizer.use_ema:
        return []
    held = optimizer._model_variables_moving_average
    found = [held[optimizer._get_variable_index(v)] for v in variables]
    return [one for one in found if one is not None]
