"""How the evaluator of a Keras run scores its model."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from typing import Any

import keras

from shoal.errors import BadEvaluation
from shoal.worker.evaluation import evaluate as evaluation_evaluate
from shoal.worker.training.metrics import to_float

SUFFIXES = (".keras", ".h5")


def wish(
    evaluate: Any,
    model: Any,
    best: str | None = None,
    patience: int | None = None,
    export: str | os.PathLike[str] | None = None,
) -> evaluation_evaluate.EvaluationRequest | None:
    """What a script asks for; `evaluate` is a function, or what `model.evaluate` is given, such as (x, y)."""
    if evaluate is None:
        if best is not None or patience is not None or export is not None:
            raise BadEvaluation("it is said what is best, but not how to evaluate", do="pass evaluate=(x_val, y_val)")
        return None
    if export is not None and not os.fspath(export).endswith(SUFFIXES):
        raise BadEvaluation(f"a Keras model cannot be kept in {os.fspath(export)}", do="let its name end with .keras")
    return evaluation_evaluate.evaluation_request(
        evaluate if callable(evaluate) else _scored(evaluate, model), best, patience, export
    )


def _scored(data: Any, model: Any) -> Callable[[], Any]:
    x, y, weight = keras.utils.unpack_x_y_sample_weight(data)

    def score() -> Any:
        return scalars_of(model.evaluate(x, y, sample_weight=weight, verbose=0, return_dict=True))

    return score


def scalars_of(logs: Mapping[str, Any]) -> dict[str, float]:
    """What of Keras' metrics can be shown with a run: some, such as F1Score, have a number for each class."""
    found = {}
    for name, value in logs.items():
        with contextlib.suppress(TypeError):
            found[name] = to_float(value)
    return found
