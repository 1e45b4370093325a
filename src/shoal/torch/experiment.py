"""Training of a PyTorch experiment (`shoal.run`): the loop that the user does not have to write."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from shoal.errors import BadExperiment
from shoal.torch import join
from shoal.worker.evaluation.evaluate import check_scores
from shoal.worker.experiment import Experiment


def train(experiment: Experiment, *, evaluates: bool) -> None:
    """Run the training loop; `evaluates` makes members evaluate the model at the end of every epoch."""
    model, optimizer, scheduler = experiment.model, experiment.optimizer, experiment.scheduler
    run = join()
    run.attach(*(part for part in (model, optimizer, scheduler) if part is not None))
    if experiment.evaluation is not None:
        options: dict[str, Any] = {"best": experiment.best, "patience": experiment.patience}
        run.evaluate(partial(experiment.evaluation, model), export=experiment.export, **options)
    batches = run.batches(experiment.data, experiment.size, experiment.epochs, experiment.seed, **experiment.batching)
    for batch in batches:
        loss, weight = _loss(experiment, batch)
        run.backward(loss, weight)
        optimizer.step()
        ended = run.epoch_ended
        if scheduler is not None and (experiment.scheduler_each == "step" or ended):
            scheduler.step()
        optimizer.zero_grad()
        run.log(loss=loss)
        if ended and evaluates and experiment.evaluation is not None:
            run.log(**evaluate(experiment))
    if experiment.save:
        run.save(experiment.save)


def evaluate(experiment: Experiment) -> dict[str, float]:
    """Return the scores of the model, which is in evaluation mode meanwhile."""
    model = experiment.model
    training = model.training
    model.eval()
    with torch.no_grad():
        scores = experiment.evaluation(model)
    model.train(training)
    return check_scores(scores, None)


def _loss(experiment: Experiment, batch: Any) -> tuple[Any, float | None]:
    if experiment.training_step is not None:
        result = experiment.training_step(experiment.model, batch)
        return result if isinstance(result, tuple) else (result, None)
    assert experiment.loss is not None
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise BadExperiment(
            f"invalid batch of type {type(batch).__name__} — loss= needs pairs of inputs and targets",
            do="pass training_step=… instead of loss=…",
        )
    return experiment.loss(experiment.model(batch[0]), batch[1]), None
