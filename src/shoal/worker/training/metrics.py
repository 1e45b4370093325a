"""Conversion and checks of the numbers that a script logs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from shoal.errors import BadMetric


def to_float(value: Any) -> float:
    """Return a scalar of any framework as a float; raise TypeError if it is not exactly one real number."""
    if isinstance(value, int | float):
        return float(value)
    if value is None or isinstance(value, str | bytes | bytearray | complex):
        raise TypeError(f"a {type(value).__name__} is not a number")
    shape = tuple(getattr(value, "shape", ()))
    if any(length != 1 for length in shape):
        raise TypeError(f"its shape is {shape}")
    try:
        if hasattr(value, "item"):
            return to_float(value.item())
        number = to_float(np.asarray(value).item()) if shape else float(value)
    except (ValueError, RuntimeError, NotImplementedError) as error:
        raise TypeError(str(error)) from error
    # AutoGraph replaces float() inside a tf.function, so the result may be a symbolic tensor.
    if not isinstance(number, float):
        raise TypeError("its value is not known while a tf.function is traced; log what the tf.function returns")
    return number


def bad_metric(name: str, kind: str, error: Exception | str) -> BadMetric:
    """Return the error for a metric that is not a number."""
    return BadMetric(
        f"{name} is a {kind}, not a number",
        where="run.log",
        why=str(error),
        do=f"log one number, such as run.log({name}=value.mean())",
    )


def check_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics as floats; raise BadMetric if one of them is not a number."""
    numbers = {}
    for name, value in metrics.items():
        try:
            numbers[name] = to_float(value)
        except TypeError as error:
            raise bad_metric(name, type(value).__name__, error) from error
    return numbers


def finite_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite metrics; NaN and infinity are not valid JSON and cannot be plotted."""
    # Copied first, because the script may log from another thread meanwhile.
    numbers = {name: float(value) for name, value in list(metrics.items())}
    return {name: value for name, value in numbers.items() if math.isfinite(value)}
