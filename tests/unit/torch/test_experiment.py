"""The loop of an experiment trains, schedules, evaluates and saves as the user would write it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from shoal.errors import BadExperiment
from shoal.torch import experiment as torch_experiment
from shoal.torch.run import Run
from shoal.worker.experiment import Experiment
from shoal.worker.session.standalone import StandaloneSession

X = torch.randn(16, 2, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(X, X.sum(1, keepdim=True))


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch_experiment, "join", lambda: Run(StandaloneSession(), "alone", str(tmp_path)))


def experiment(**changes: Any) -> Experiment:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fields: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "data": DATA,
        "size": 8,
        "epochs": 3,
        "loss": torch.nn.functional.mse_loss,
    }
    return Experiment(**(fields | changes))


@pytest.mark.parametrize(("each", "steps"), [("step", 6), ("epoch", 3)])
def test_scheduler_steps_as_often_as_the_experiment_says(each: Any, steps: int) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    torch_experiment.train(
        experiment(model=model, optimizer=optimizer, scheduler=scheduler, scheduler_each=each), evaluates=False
    )
    assert scheduler.last_epoch == steps


def test_model_is_evaluated_each_epoch_in_evaluation_mode_and_saved(tmp_path: Path) -> None:
    modes: list[bool] = []

    def evaluation(model: torch.nn.Module) -> dict[str, float]:
        modes.append(model.training)
        return {"error": float(torch.nn.functional.mse_loss(model(X), X.sum(1, keepdim=True)))}

    trained = experiment(evaluation=evaluation, save="model.pt")
    torch_experiment.train(trained, evaluates=True)
    assert modes == [False] * 3
    assert trained.model.training
    assert torch.equal(torch.load(tmp_path / "model.pt")["weight"], trained.model.weight)


def test_training_step_returns_the_loss_and_its_weight() -> None:
    seen: list[int] = []

    def training_step(model: torch.nn.Module, batch: Any) -> tuple[torch.Tensor, float]:
        seen.append(len(batch[0]))
        return model(batch[0]).square().mean(), 2.0

    torch_experiment.train(experiment(loss=None, training_step=training_step), evaluates=False)
    assert seen == [8] * 6


def test_batches_that_are_no_pairs_are_refused() -> None:
    with pytest.raises(BadExperiment, match="needs pairs of inputs and targets") as raised:
        torch_experiment.train(experiment(data=TensorDataset(X)), evaluates=False)
    assert "training_step" in raised.value.do
