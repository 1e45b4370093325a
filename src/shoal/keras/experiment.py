"""Training of an `Experiment` with Keras."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import keras

from shoal.keras import Batches, Elastic, Run, batches, join
from shoal.worker.evaluation.evaluate import check_scores
from shoal.worker.experiment import Experiment


def train(experiment: Experiment, *, evaluates: bool) -> None:
    """Fit the experiment's model as a member; with `evaluates` each member evaluates at the end of every epoch."""
    run, model, evaluation = join(), experiment.model, experiment.evaluation
    score = partial(evaluation, model) if callable(evaluation) else None
    request: dict[str, Any] = {"best": experiment.best, "patience": experiment.patience, "export": experiment.export}
    request = request if evaluation is not None else {}
    elastic = Elastic(
        *experiment.callbacks, jit_compile=experiment.jit_compile, evaluate=score or evaluation, **request
    )
    scoring = [_ScoreLogger(run, score)] if evaluates and score is not None else []
    model.fit(
        _batches(experiment),
        epochs=experiment.epochs,
        callbacks=[elastic, *scoring],
        validation_data=evaluation if evaluates and score is None else None,
        verbose=2,
    )
    if experiment.save:
        run.save(experiment.save, model)


class _ScoreLogger(keras.callbacks.Callback):  # type: ignore[misc]
    """Callback that logs the scores of an evaluation function at the end of every epoch."""

    def __init__(self, run: Run, score: Callable[[], Any]) -> None:
        super().__init__()
        self._run, self._score = run, score

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:  # noqa: ARG002
        self._run.log(**check_scores(self._score(), None))


def _batches(experiment: Experiment) -> Batches:
    data = experiment.data
    if isinstance(data, Batches):
        return data
    parts = data if isinstance(data, tuple) else (data,)
    return batches(*parts, size=experiment.size, seed=experiment.seed, **experiment.batching)
