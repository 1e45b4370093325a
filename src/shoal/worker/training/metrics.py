"""The numbers that a script shows with its run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from shoal.errors import BadMetric


def number_of(value: Any) -> float:
    """A value as a number, whatever framework it is of; raises TypeError if it is none, or more than one."""
    if isinstance(value, int | float):
        return float(value)
    if value is None or isinstance(value, str | bytes | bytearray | complex):
        raise TypeError(f"a {type(value).__name__} is no number")
    shape = tuple(getattr(value, "shape", ()))
    if any(length != 1 for length in shape):
        raise TypeError(f"its shape is {shape}")
    try:
        if hasattr(value, "item"):
            return number_of(value.item())
        found = number_of(np.asarray(value).item()) if shape else float(value)
    except (ValueError, RuntimeError, NotImplementedError) as error:
        raise TypeError(str(error)) from error
    # In a tf.function, which exchanges what float means, it is another tensor.
    if not isinstance(found, float):
        raise TypeError("its value is not known yet: log what the tf.function returns")
    return found


def refuse(name: str, kind: str, error: Exception | str) -> BadMetric:
    return BadMetric(
        f"{name} is a {kind}, not a number",
        where="run.log",
        why=str(error),
        do=f"log one number, such as run.log({name}=value.mean())",
    )


def checked(metrics: Mapping[str, Any]) -> dict[str, float]:
    """What a script logs, as numbers by name."""
    found = {}
    for name, value in metrics.items():
        try:
            found[name] = number_of(value)
        except TypeError as error:
            raise refuse(name, type(value).__name__, error) from error
    return found


def finite(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Those that can be told: what is no number has no place in a journal, nor on a curve."""
    # The script may log something at the same time.
    numbers = {name: float(value) for name, value in list(metrics.items())}
    return {name: value for name, value in numbers.items() if math.isfinite(value)}
