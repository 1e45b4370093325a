"""Trains an experiment with Keras."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import keras

from shoal.keras import Batches, Elastic, Run, batches, join
from shoal.worker.evaluation.evaluate import check_scores
from shoal.worker.experiment import Experiment


def train(experiment: Experiment, *, evaluates: bool) -> None:
    """`model.fit` of a member; `evaluates` says that members evaluate for themselves at the end of every epoch."""
    run, model, evaluation = join(), experiment.model, experiment.evaluation
    score = partial(evaluation, model) if callable(evaluation) else None
    wish: dict[str, Any] = {"best": experiment.best, "patience": experiment.patience, "export": experiment.export}
    wish = wish if evaluation is not None else {}
    elastic = Elastic(*experiment.callbacks, jit_compile=experiment.jit_compile, evaluate=score or evaluation, **wish)
    scoring = [_Scoring(run, score)] if evaluates and score is not None else []
    model.fit(
        _data(experiment),
        epochs=experiment.epochs,
        callbacks=[elastic, *scoring],
        validation_data=evaluation if evaluates and score is None else None,
        verbose=2,
    )
    if experiment.save:
        run.save(experiment.save, model)


class _Scoring(keras.callbacks.Callback):  # type: ignore[misc]
    """Shows with the run what a function finds at the end of an epoch."""

    def __init__(self, run: Run, score: Callable[[], Any]) -> None:
        super().__init__()
        self._run, self._score = run, score

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:  # noqa: ARG002
        self._run.log(**check_scores(self._score(), None))


def _data(experiment: Experiment) -> Batches:
    given = experiment.data
    if isinstance(given, Batches):
        return given
    parts = given if isinstance(given, tuple) else (given,)
    return batches(*parts, size=experiment.size, seed=experiment.seed, **experiment.batching)
