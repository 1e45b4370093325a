"""Arguments of the call of `model.fit` in progress.

Keras passes none of them on to data that is an adapter of its own, as `shoal.batches` is. They are read from the frame
of the call, because no function that `fit` calls gets all of them. Arguments that would be ignored are refused.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from shoal.errors import NotAttached, UnusableData, UnusableModel

METHODS = ("fit", "evaluate", "predict")
# Arguments of fit with the argument of shoal.batches to use instead.
REPLACEMENTS = {
    "y": "shoal.batches(x, y, size=…)",
    "sample_weight": "shoal.batches(x, y, sample_weight, size=…)",
    "batch_size": "shoal.batches(…, size=…), the size of the global batch",
}


def check_use(data: Any) -> None:
    """Raise UnusableData if `data` is used for anything but training in `fit`."""
    method, arguments = _current_call()
    trains = method == "fit" and arguments["x"] is data
    if method and not trains:
        raise UnusableData(
            f"shoal.batches cannot be used {'as validation_data' if method == 'fit' else f'in model.{method}'}",
            why="it yields this member's share of the training data",
            do="pass the arrays or the dataset themselves",
        )


def checked_fit_arguments(data: Any) -> Mapping[str, Any]:
    """Return the arguments of the call of `fit` that trains on `data`; raise if one of them cannot be honoured."""
    _, arguments = _current_call()
    if not arguments:
        return {}
    for argument, replacement in REPLACEMENTS.items():
        if arguments[argument] is not None:
            raise UnusableData(
                f"{argument} was passed to model.fit beside shoal.batches", why="Keras ignores it there", do=replacement
            )
    if not arguments["shuffle"] and data.shuffle:
        raise UnusableData(
            "model.fit was called with shuffle=False, but shoal.batches shuffles",
            do="shoal.batches(…, shuffle=False)",
        )
    if arguments["initial_epoch"]:
        raise UnusableData(
            f"model.fit was called with initial_epoch={arguments['initial_epoch']}",
            why="the run itself records which epoch it is in",
            do="leave it out: shoal resume continues where the run stopped",
        )
    if arguments["self"].steps_per_execution > 1:
        raise UnusableModel(
            f"the model was compiled with steps_per_execution={arguments['self'].steps_per_execution}",
            why="gradients are summed over the members in every step",
            do="leave it out",
        )
    _check_callbacks(arguments["callbacks"])
    return arguments


def _check_callbacks(callbacks: Any) -> None:
    listed = getattr(callbacks, "callbacks", callbacks)
    listed = listed if isinstance(listed, list | tuple) else [listed]
    if not any(getattr(callback, "makes_elastic", False) for callback in listed):
        raise NotAttached(
            "model.fit was given shoal.batches, but not shoal.Elastic",
            why="gradients would not be summed over the members",
            do="model.fit(shoal.batches(…), callbacks=[shoal.Elastic()])",
        )


def _current_call() -> tuple[str, Mapping[str, Any]]:
    """Return the model's method that is being called, and its arguments; empty ones if there is no such call."""
    frame = sys._getframe(1)
    while frame is not None:
        in_keras = str(frame.f_globals.get("__name__", "")).startswith("keras.src.backend")
        if in_keras and frame.f_code.co_name in METHODS:
            return frame.f_code.co_name, frame.f_locals
        frame = frame.f_back  # type: ignore[assignment]
    return "", {}
