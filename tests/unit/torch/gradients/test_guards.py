"""Guarded scalers follow the commit of a step, and the loss that is shown is not scaled."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from shoal.errors import ModelMismatch, UnusableBackward
from shoal.torch.gradients.guards import guard_optimizer, reset_scaler
from shoal.torch.run import Run
from shoal.torch.state.capture import capture_bytes, restore
from shoal.worker.session.standalone import StandaloneSession

DATA = TensorDataset(torch.ones(8, 2))


def trained(directory: Path, scaler: torch.amp.GradScaler) -> tuple[Run, torch.nn.Module]:
    run = Run(StandaloneSession(), "alone", str(directory))
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.attach(model, optimizer, scaler)
    for (x,) in run.batches(DATA, size=4):
        run.backward(scaler.scale((model(x) - 3.0).square().mean()))
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return run, model


def test_disabled_scaler_survives_a_step_that_is_repeated() -> None:
    reset_scaler(torch.amp.GradScaler("cpu", enabled=False))


def test_loss_is_shown_unscaled(tmp_path: Path) -> None:
    plain, model = trained(tmp_path, torch.amp.GradScaler("cpu", enabled=False))
    scaled, same = trained(tmp_path, torch.amp.GradScaler("cpu", init_scale=1024.0))
    assert plain._trainer._loss == pytest.approx(scaled._trainer._loss)
    assert torch.allclose(next(model.parameters()), next(same.parameters()))


def test_scaler_continues_where_another_member_was(tmp_path: Path) -> None:
    ahead = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    trained(tmp_path, ahead)
    joined = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    header, buffers = capture_bytes({"scaler": ahead})
    restore({"scaler": joined}, header, buffers)
    assert joined.get_scale() == ahead.get_scale() == 32.0
    disabled = torch.amp.GradScaler("cpu", enabled=False)
    with pytest.raises(ModelMismatch, match="scaler") as raised:
        restore({"scaler": disabled}, header, buffers)
    assert raised.value.why == "it is disabled on this member but enabled in the run"
    restore({"scaler": disabled}, *capture_bytes({"scaler": disabled}))


def test_optimizer_that_needs_closures_is_refused(tmp_path: Path) -> None:
    run = Run(StandaloneSession(), "alone", str(tmp_path))
    model = torch.nn.Linear(2, 1)
    with pytest.raises(UnusableBackward, match="unsupported optimizer LBFGS"):
        guard_optimizer(run._trainer, torch.optim.LBFGS(model.parameters()))
