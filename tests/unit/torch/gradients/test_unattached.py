"""Whatever a script trains without attaching it is refused, by name and with the line to change."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import TensorDataset

from shoal.errors import NotAttached, UnusableBackward
from shoal.torch.gradients.unattached import check_attached, instances, is_checked_step
from shoal.torch.run import Run
from shoal.worker.session.standalone import StandaloneSession

DATA = TensorDataset(torch.ones(16, 2))


class Stage:
    """A model with its optimizer, attached to a run of one."""

    def __init__(self, directory: Path) -> None:
        self.run = Run(StandaloneSession(), "alone", str(directory))
        self.model = torch.nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.run.attach(self.model, self.optimizer)

    def train(self, loss: Callable[[torch.Tensor], torch.Tensor], after: Callable[[], object] = lambda: None) -> None:
        for (x,) in self.run.batches(DATA, size=4):
            self.run.backward(loss(self.model(x)))
            after()
            self.optimizer.step()
            self.optimizer.zero_grad()


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


class CentreLoss(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.centres = torch.nn.Parameter(torch.zeros(3, 1))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return (features - self.centres[0]).square().mean()


# --- parameters in the loss


def test_trainable_module_in_the_loss_is_named_at_the_first_step(stage: Stage) -> None:
    centre = CentreLoss()
    with pytest.raises(NotAttached, match=r"1 parameter .* CentreLoss\.centres \(3, 1\)") as raised:
        stage.train(centre)
    assert stage.run.step == 0
    assert "run.attach(torch.nn.ModuleList([model, other]), optimizer)" in raised.value.do
    assert raised.value.where.startswith("test_unattached.py:")


def test_loose_parameter_in_the_loss_is_named_by_its_shape(stage: Stage) -> None:
    temperature = torch.nn.Parameter(torch.ones(()))
    with pytest.raises(NotAttached, match=r"a Parameter \(\)"):
        stage.train(lambda y: y.mean() / temperature)


def test_parameter_that_enters_the_loss_later_is_found(stage: Stage) -> None:
    centre = CentreLoss()
    with pytest.raises(NotAttached, match="CentreLoss"):
        stage.train(lambda y: y.mean() + (centre(y) if stage.run.step > 1 else 0.0))
    assert stage.run.step == 2


def test_frozen_module_and_input_with_gradient_are_accepted(stage: Stage) -> None:
    frozen = CentreLoss().requires_grad_(False)
    x = torch.ones(1, requires_grad=True)
    stage.train(lambda y: frozen(y) + (y * x).mean())
    assert stage.run.step == 4


def test_graph_is_walked_in_few_steps() -> None:
    assert [number for number in range(20) if is_checked_step(number)] == [0, 1, 2, 4, 8, 16]


# --- optimizers


def test_second_optimizer_of_the_model_is_refused_at_its_first_step(stage: Stage) -> None:
    other = torch.optim.Adam(stage.model.parameters())
    with pytest.raises(NotAttached, match="Adam steps parameters of the attached model") as raised:
        stage.train(torch.mean, other.step)
    assert raised.value.do == "pass every optimizer: run.attach(model, optimizer, other_optimizer)"
    assert stage.run.step == 0


def test_optimizer_of_another_module_is_refused_in_its_second_step(stage: Stage) -> None:
    critic = torch.nn.Linear(2, 1)
    other = torch.optim.Adam(critic.parameters())
    with pytest.raises(NotAttached, match="Adam trains 2 parameters in the loop but is not attached"):
        stage.train(torch.mean, other.step)
    assert stage.run.step == 1


def test_optimizer_of_an_inner_loop_is_accepted(stage: Stage) -> None:
    def inner() -> None:
        noise = torch.zeros(2, requires_grad=True)
        optimizer = torch.optim.SGD([noise], lr=1.0)
        for _ in range(3):
            noise.grad = torch.ones(2)
            optimizer.step()

    stage.train(torch.mean, inner)
    assert stage.run.step == 4


def test_optimizer_inside_an_attached_one_is_accepted(tmp_path: Path) -> None:
    class Lookahead(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            super().__init__(inner.param_groups, {})
            self.inner = inner

        def step(self, closure: Any = None) -> Any:
            del closure
            self.inner.step()

    run = Run(StandaloneSession(), "alone", str(tmp_path))
    model = torch.nn.Linear(2, 1)
    optimizer = Lookahead(torch.optim.SGD(model.parameters(), lr=0.1))
    run.attach(model, optimizer)
    for (x,) in run.batches(DATA, size=4):
        run.backward(model(x).mean())
        optimizer.step()
    assert run.step == 4


def test_optimizer_may_step_outside_the_loop(stage: Stage) -> None:
    stage.train(torch.mean)
    head = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    for _ in range(2):
        head(torch.ones(1, 2)).sum().backward()
        optimizer.step()


# --- schedulers and averages


def test_plateau_scheduler_that_is_not_attached_is_refused(stage: Stage) -> None:
    scheduler = lr_scheduler.ReduceLROnPlateau(stage.optimizer)
    with pytest.raises(NotAttached, match="ReduceLROnPlateau changes the learning rate"):
        stage.run.batches(DATA, size=4)
    del scheduler


def test_scheduler_made_in_the_loop_is_refused_when_the_rate_changes(stage: Stage) -> None:
    schedulers: list[Any] = []

    def step() -> None:
        if not schedulers:
            schedulers.append(lr_scheduler.ExponentialLR(stage.optimizer, 0.5))
        stage.optimizer.param_groups[0]["lr"] *= 0.5

    with pytest.raises(NotAttached, match="ExponentialLR"):
        stage.train(torch.mean, step)


def test_rate_set_by_hand_is_accepted(stage: Stage) -> None:
    def set_rate() -> None:
        stage.optimizer.param_groups[0]["lr"] = 0.1 / (1 + stage.run.step)

    stage.train(torch.mean, set_rate)
    assert stage.run.step == 4


def test_scheduler_that_the_script_has_dropped_is_no_suspect(stage: Stage) -> None:
    dropped: Any = lr_scheduler.StepLR(stage.optimizer, 1)
    dropped.itself = dropped
    gc.disable()
    try:
        del dropped
        stage.train(torch.sum)
    finally:
        gc.enable()
    assert stage.run.step == 4


def test_optimizer_of_another_thread_is_not_part_of_the_loop(stage: Stage) -> None:
    other = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)

    def step_elsewhere() -> None:
        thread = threading.Thread(target=other.step)
        thread.start()
        thread.join()

    stage.train(torch.sum, after=step_elsewhere)
    assert stage.run.step == 4


@pytest.mark.parametrize(
    ("model", "trained", "named"),
    [
        (lambda: torch.nn.BatchNorm1d(2, affine=False), torch.nn.Linear(2, 1), "BatchNorm1d has no parameters"),
        (lambda: torch.nn.LazyLinear(1), torch.nn.Linear(2, 1), "lazy layers"),
        (lambda: torch.nn.Linear(2, 1), torch.nn.Linear(2, 1), "SGD trains 2 parameters"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_the_loop(
    model: Callable[[], torch.nn.Module], trained: torch.nn.Module, named: str
) -> None:
    with pytest.raises(NotAttached, match=named):
        check_attached(model(), [torch.optim.SGD(trained.parameters(), lr=0.1)])


def test_average_that_is_not_attached_is_refused(stage: Stage) -> None:
    averaged = AveragedModel(stage.model)
    with pytest.raises(NotAttached, match="AveragedModel averages the attached model") as raised:
        stage.run.batches(DATA, size=4)
    assert raised.value.do == "run.attach(model, optimizer, averaged)"
    stage.run.attach(averaged)
    stage.run.batches(DATA, size=4)


# --- gradients of the script's own


@pytest.mark.parametrize("micro", [None, 2])
def test_plain_backward_after_run_backward_is_refused(stage: Stage, micro: int | None) -> None:
    def train() -> None:
        for (x,) in stage.run.batches(DATA, size=4, micro=micro):
            stage.run.backward(stage.model(x).mean())
            stage.model(x).mean().backward()
            stage.optimizer.step()

    with pytest.raises(UnusableBackward, match=r"loss\.backward\(\) was called after run\.backward") as raised:
        train()
    assert raised.value.do == "add the losses and call run.backward(loss + other_loss) once"


def test_plain_backward_into_old_gradients_is_refused(stage: Stage) -> None:
    def train() -> None:
        for (x,) in stage.run.batches(DATA, size=4):
            if stage.run.step == 1:  # the gradients of step 0 were not zeroed
                stage.model(x).mean().backward()
            stage.run.backward(stage.model(x).mean())
            stage.optimizer.step()

    with pytest.raises(UnusableBackward, match=r"gradients before run\.backward"):
        train()


@pytest.mark.parametrize("micro", [None, 2])
def test_adversarial_samples_can_be_made_with_a_plain_backward(stage: Stage, micro: int | None) -> None:
    seen = []
    for (x,) in stage.run.batches(DATA, size=4, micro=micro):
        x.requires_grad_()
        stage.model(x).mean().backward()
        stage.optimizer.zero_grad()
        assert x.grad is not None
        stage.run.backward(stage.model(x.detach() + x.grad.sign()).mean())
        if stage.model.weight.grad is not None:
            seen.append(stage.model.weight.grad.clone())
        stage.optimizer.step()
        stage.optimizer.zero_grad()
    assert stage.run.step == len(seen) == 4
    # The gradient of the mean is the mean of the samples alone: 1 plus the sign of the weight they were moved by.
    assert all(bool(((gradient == 0.0) | (gradient == 2.0)).all()) for gradient in seen)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_plain_backward_that_is_zeroed_again_is_accepted(stage: Stage, set_to_none: bool) -> None:
    for (x,) in stage.run.batches(DATA, size=4):
        stage.model(x).mean().backward()
        stage.optimizer.zero_grad(set_to_none=set_to_none)
        if not set_to_none:
            stage.optimizer.zero_grad()
        stage.run.backward(stage.model(x).mean())
        stage.optimizer.step()
    assert stage.run.step == 4


def test_search_for_instances_leaves_other_threads_alone() -> None:
    """Listing all objects made other threads fail: Python cannot complete a tuple that is held elsewhere."""
    stop, failures = threading.Event(), []

    def build_tuples() -> None:
        while not stop.is_set():
            try:
                tuple(number for number in range(50))
            except SystemError as error:
                failures.append(error)

    builders = [threading.Thread(target=build_tuples) for _ in range(3)]
    for builder in builders:
        builder.start()
    for _ in range(20):
        instances({AveragedModel})
    stop.set()
    for builder in builders:
        builder.join()
    assert not failures
