"""Trains an experiment with Keras."""

from __future__ import annotations

import keras

from shoal.keras import Batches, Elastic, batches, join
from shoal.worker.experiment import Experiment


def train(experiment: Experiment, *, evaluates: bool) -> None:
    """`model.fit` of a member; `evaluates` says that members evaluate for themselves at the end of every epoch."""
    run = join()
    told = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: run.log(**(logs or {})))  # noqa: ARG005
    experiment.model.fit(
        _data(experiment),
        epochs=experiment.epochs,
        callbacks=[Elastic(), *experiment.callbacks, told],
        validation_data=experiment.evaluation if evaluates else None,
        verbose=2,
    )
    if experiment.save:
        run.save(experiment.save, experiment.model)


def _data(experiment: Experiment) -> Batches:
    given = experiment.data
    if isinstance(given, Batches):
        return given
    parts = given if isinstance(given, tuple) else (given,)
    return batches(*parts, size=experiment.size, seed=experiment.seed, **experiment.batching)
