"""Scoring of a Keras model by an evaluator: the request that a script makes, and metric results as numbers."""

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


def evaluation_request(
    evaluate: Any,
    model: Any,
    best: str | None = None,
    patience: int | None = None,
    export: str | os.PathLike[str] | None = None,
) -> evaluation_evaluate.EvaluationRequest | None:
    """Return the script's request, None if it has none; `evaluate` is a function or data for `model.evaluate`."""
    if evaluate is None:
        if best is not None or patience is not None or export is not None:
            raise BadEvaluation("best, patience and export require evaluate", do="pass evaluate=(x_val, y_val)")
        return None
    if export is not None and not os.fspath(export).endswith(SUFFIXES):
        raise BadEvaluation(
            f"invalid export path {os.fspath(export)} — a Keras model is saved as .keras or .h5",
            do="let its name end with .keras",
        )
    return evaluation_evaluate.evaluation_request(
        evaluate if callable(evaluate) else _scoring(evaluate, model), best, patience, export
    )


def _scoring(data: Any, model: Any) -> Callable[[], Any]:
    x, y, weight = keras.utils.unpack_x_y_sample_weight(data)

    def score() -> Any:
        return scalars_of(model.evaluate(x, y, sample_weight=weight, verbose=0, return_dict=True))

    return score


def scalars_of(logs: Mapping[str, Any]) -> dict[str, float]:
    """Return the metric results that are single numbers; some, such as F1Score, have one number per class."""
    scalars = {}
    for name, value in logs.items():
        with contextlib.suppress(TypeError):
            scalars[name] = to_float(value)
    return scalars
