"""What `model.fit` was called with: Keras hands nothing of it over to data that is an adapter of its own."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from shoal.errors import NotAttached, UnusableData, UnusableModel

ASKING = ("fit", "evaluate", "predict")
# Those whose meaning is that of an argument of shoal.batches.
OURS = {
    "y": "shoal.batches(x, y, size=…)",
    "sample_weight": "shoal.batches(x, y, sample_weight, size=…)",
    "batch_size": "shoal.batches(…, size=…), the size of the global batch",
}


def check_use(data: Any) -> None:
    """Raise if somebody else than `fit` asks for `data`, or it is to be what `fit` validates with."""
    name, told = _call()
    trains = name == "fit" and told["x"] is data
    if name and not trains:
        raise UnusableData(
            f"shoal.batches cannot be {'validation_data' if name == 'fit' else f'what model.{name} is given'}",
            why="it is this member's share of the training data",
            do="pass the arrays or the dataset themselves",
        )


def asked_of(data: Any) -> Mapping[str, Any]:
    """The arguments of the call of `fit` that asks for `data`; raises if it cannot be done as asked."""
    _, told = _call()
    if not told:
        return {}
    for argument, instead in OURS.items():
        if told[argument] is not None:
            raise UnusableData(
                f"{argument} was passed to model.fit beside shoal.batches", why="Keras ignores it there", do=instead
            )
    if not told["shuffle"] and data.shuffle:
        raise UnusableData(
            "model.fit was called with shuffle=False, but shoal.batches shuffles",
            do="shoal.batches(…, shuffle=False)",
        )
    if told["initial_epoch"]:
        raise UnusableData(
            f"model.fit was called with initial_epoch={told['initial_epoch']}",
            why="the run itself knows in which epoch it is",
            do="leave it out: shoal resume goes on where the run was",
        )
    if told["self"].steps_per_execution > 1:
        raise UnusableModel(
            f"the model was compiled with steps_per_execution={told['self'].steps_per_execution}",
            why="every step is summed over the members",
            do="leave it out",
        )
    _check_callbacks(told["callbacks"])
    return told


def _check_callbacks(callbacks: Any) -> None:
    held = getattr(callbacks, "callbacks", callbacks)
    held = held if isinstance(held, list | tuple) else [held]
    if not any(getattr(one, "makes_elastic", False) for one in held):
        raise NotAttached(
            "model.fit was given shoal.batches, but not shoal.Elastic",
            why="nobody would sum the gradients of the members",
            do="model.fit(shoal.batches(…), callbacks=[shoal.Elastic()])",
        )


def _call() -> tuple[str, Mapping[str, Any]]:
    """The method of the model that is being called, and its arguments; nothing if they cannot be told.

    They are read from its frame: nothing that it calls is given all of them.
    """
    frame = sys._getframe(1)
    while frame is not None:
        inside = str(frame.f_globals.get("__name__", "")).startswith("keras.src.backend")
        if inside and frame.f_code.co_name in ASKING:
            return frame.f_code.co_name, frame.f_locals
        frame = frame.f_back  # type: ignore[assignment]
    return "", {}
