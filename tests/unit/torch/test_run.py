"""First mistakes with `run.attach`, `run.batches` and `run.backward` are refused with the line to change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler
from torch.utils.data import TensorDataset

from shoal.errors import NotAttached, UnusableBackward, UnusableModel
from shoal.torch.run import Run
from shoal.worker.session.standalone import StandaloneSession

DATA = TensorDataset(torch.ones(8, 2))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(StandaloneSession(), "alone", str(tmp_path))


def attached(run: Run) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.attach(model, optimizer)
    return model, optimizer


def test_model_on_the_meta_device_is_refused_by_attach(run: Run) -> None:
    with pytest.raises(UnusableModel, match="meta device") as raised:
        run.attach(torch.nn.Linear(2, 1, device="meta"))
    assert "2 of its tensors have no memory; the first is weight" in raised.value.why
    assert "model.to_empty(device=" in raised.value.do


@pytest.mark.parametrize("stepping", [False, True], ids=["without optimizer.step", "with optimizer.step"])
def test_loss_backward_instead_of_run_backward_is_named(run: Run, stepping: bool) -> None:
    model, optimizer = attached(run)

    def train() -> None:
        for (x,) in run.batches(DATA, size=4):
            model(x).sum().backward()
            if stepping:
                optimizer.step()

    with pytest.raises(UnusableBackward) as raised:
        train()
    expected = "optimizer.step came before run.backward" if stepping else "step 0 ended without run.backward"
    assert raised.value.what == expected
    assert raised.value.why == "the parameters have gradients: loss.backward() was called"
    assert raised.value.do == "replace it with run.backward(loss)"


def test_loss_backward_in_a_later_step_is_named(run: Run) -> None:
    model, optimizer = attached(run)

    def train() -> None:
        for (x,) in run.batches(DATA, size=4):
            loss = model(x).sum()
            run.backward(loss) if run.step == 0 else loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    with pytest.raises(UnusableBackward) as raised:
        train()
    assert "loss.backward() was called" in raised.value.why


def test_step_without_any_backward_is_not_blamed_on_loss_backward(run: Run) -> None:
    model, optimizer = attached(run)

    def train() -> None:
        for (x,) in run.batches(DATA, size=4):
            if run.step == 0:
                run.backward(model(x).sum())
                optimizer.step()  # its gradients stay: they are not zeroed

    with pytest.raises(UnusableBackward, match=r"step 1 ended without run\.backward") as raised:
        train()
    assert raised.value.why == ""


def test_loop_without_an_optimizer_is_refused(run: Run) -> None:
    run.attach(torch.nn.Linear(2, 1))
    with pytest.raises(NotAttached, match=r"run\.attach got no optimizer") as raised:
        run.batches(DATA, size=4)
    assert raised.value.do == "run.attach(model, optimizer)"


def test_loop_without_attach_is_refused(run: Run) -> None:
    with pytest.raises(NotAttached, match=r"run\.attach was not called"):
        run.batches(DATA, size=4)


@pytest.mark.parametrize("before", [True, False], ids=["created before attach", "created after attach"])
def test_scheduler_that_is_not_attached_is_refused(run: Run, before: bool) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = lr_scheduler.StepLR(optimizer, 1) if before else None
    run.attach(model, optimizer)
    scheduler = scheduler or lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(NotAttached, match="StepLR changes the learning rate of SGD but is not attached") as raised:
        run.batches(DATA, size=4)
    assert raised.value.do == "run.attach(model, optimizer, scheduler)"
    assert scheduler.last_epoch == 0


class Warmup:
    """A schedule of the user's own around one of torch's."""

    def __init__(self, scheduler: Any) -> None:
        self.stages = [scheduler]

    def step(self) -> None:
        self.stages[0].step()

    def state_dict(self) -> dict[str, Any]:
        return self.stages[0].state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.stages[0].load_state_dict(state)


@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: lr_scheduler.StepLR(o, 1),
        lambda o: lr_scheduler.SequentialLR(o, [lr_scheduler.ConstantLR(o), lr_scheduler.StepLR(o, 2)], [2]),
        lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)]),
        lambda o: lr_scheduler.ReduceLROnPlateau(o),
        lambda o: Warmup(lr_scheduler.StepLR(o, 1)),
    ],
    ids=["plain", "sequential", "chained", "plateau", "wrapped"],
)
def test_attached_schedulers_are_accepted(run: Run, schedule: Callable[[torch.optim.Optimizer], Any]) -> None:
    _, optimizer = attached(run)
    run.attach(schedule(optimizer))
    run.batches(DATA, size=4)


def test_scheduler_that_is_gone_is_ignored(run: Run) -> None:
    _, optimizer = attached(run)
    lr_scheduler.StepLR(optimizer, 1)
    run.batches(DATA, size=4)
