"""Attached averages of the weights change once per committed step, and a script that would miscount is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

from shoal.errors import NotAttached, UnusableBackward
from shoal.torch.run import Run
from shoal.torch.state.capture import capture_bytes, restore
from shoal.torch.state.copies import is_copy
from shoal.worker.session.standalone import StandaloneSession

DATA = TensorDataset(torch.arange(16.0).reshape(8, 2))


class Shadow:
    """An average of the user's own: new tensors at every update, no base class."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.updates = 0

    def update(self, model: torch.nn.Module) -> None:
        self.updates += 1
        for name, p in model.named_parameters():
            self.shadow[name] = 0.9 * self.shadow[name] + 0.1 * p.detach()

    absorb = update

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow, "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow, self.updates = state["shadow"], state["updates"]


class Holder(torch.nn.Module):
    """An average that holds its model, has a counter called `step`, and takes no argument."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.online, self.average = model, copy.deepcopy(model).requires_grad_(False)
        self.register_buffer("step", torch.tensor(0))

    @torch.no_grad()
    def update(self) -> None:
        self.step += 1
        for average, p in zip(self.average.parameters(), self.online.parameters(), strict=True):
            average.lerp_(p, 0.1)

    absorb = update


class Stage:
    def __init__(self, directory: Path) -> None:
        self.run = Run(StandaloneSession(), "alone", str(directory))
        self.model = torch.nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.001)

    def train(self, update: Any, micro: int | None = None) -> None:
        for (x,) in self.run.batches(DATA, size=4, epochs=2, micro=micro):
            self.run.backward(self.model(x).mean())
            self.optimizer.step()
            update()
            self.optimizer.zero_grad()


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


@pytest.mark.parametrize("micro", [None, 1])
def test_averaged_model_counts_committed_steps(stage: Stage, micro: int | None) -> None:
    averaged = AveragedModel(stage.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    assert stage.run.attach(averaged, stage.model, stage.optimizer) == (averaged, stage.model, stage.optimizer)
    stage.train(lambda: averaged.update_parameters(stage.model), micro)
    assert averaged.n_averaged == stage.run.step == 4


@pytest.mark.parametrize("micro", [None, 1])
def test_update_method_of_a_copy_counts_committed_steps(stage: Stage, micro: int | None) -> None:
    shadow = Shadow(stage.model)
    stage.run.attach(stage.model, stage.optimizer, shadow)
    stage.train(lambda: shadow.update(stage.model), micro)
    assert shadow.updates == 4


@pytest.mark.parametrize("micro", [None, 1])
@pytest.mark.parametrize("at_once", [True, False])
def test_average_that_holds_its_model_is_no_second_model(stage: Stage, micro: int | None, at_once: bool) -> None:
    stage.model = torch.nn.Sequential(torch.nn.BatchNorm1d(2), stage.model)  # its statistics change in every forward
    stage.optimizer = torch.optim.SGD(stage.model.parameters(), lr=0.001)
    holder = Holder(stage.model)
    for parts in [(holder, stage.model, stage.optimizer)] if at_once else [(stage.model, stage.optimizer), (holder,)]:
        stage.run.attach(*parts)
    for (x,) in stage.run.batches(DATA, size=4, epochs=2, micro=2 if micro else None):
        stage.run.backward(stage.model(x).mean())
        stage.optimizer.step()
        holder.update()
        stage.optimizer.zero_grad()
    assert holder.step == stage.run.step == 4


def test_average_that_holds_its_model_must_still_ask_for_the_commit(stage: Stage) -> None:
    holder = Holder(stage.model)
    stage.run.attach(stage.model, stage.optimizer, holder)
    with pytest.raises(UnusableBackward, match=r"Holder, an attached copy"):
        stage.train(holder.absorb, micro=1)


def test_module_that_trains_more_than_the_model_in_it_is_a_second_model(stage: Stage) -> None:
    outer = torch.nn.ModuleList([stage.model, torch.nn.Linear(2, 1)])
    with pytest.raises(NotAttached, match="two models"):
        stage.run.attach(stage.model, outer, stage.optimizer)


@pytest.mark.parametrize("micro", [None, 1])
def test_update_that_ignores_the_commit_is_refused_in_the_first_step(stage: Stage, micro: int | None) -> None:
    shadow = Shadow(stage.model)
    stage.run.attach(stage.model, stage.optimizer, shadow)
    with pytest.raises(UnusableBackward, match=r"changed without a look at run\.committed") as raised:
        stage.train(lambda: shadow.absorb(stage.model), micro)
    assert raised.value.do.startswith("write `if run.committed:` before the update")
    assert shadow.updates == 1


def test_update_under_run_committed_is_accepted(stage: Stage) -> None:
    twin = copy.deepcopy(stage.model)
    stage.run.attach(stage.model, stage.optimizer, twin)
    updates = []

    @torch.no_grad()
    def update() -> None:
        if stage.run.committed:
            updates.append(stage.run.step)
            for mine, theirs in zip(twin.parameters(), stage.model.parameters(), strict=True):
                mine.lerp_(theirs, 0.1)

    stage.train(update, micro=1)
    assert updates == [1, 2, 3, 4]


def test_average_is_part_of_the_state(stage: Stage) -> None:
    averaged = AveragedModel(stage.model)
    stage.run.attach(stage.model, stage.optimizer, averaged)
    stage.train(lambda: averaged.update_parameters(stage.model))
    header, buffers = capture_bytes(stage.run._training_state.parts)
    expected = {name: value.clone() for name, value in averaged.state_dict().items()}
    buffers = [buffer.copy() for buffer in buffers]
    with torch.no_grad():
        for tensor in averaged.state_dict().values():
            tensor.zero_()
    restore(stage.run._training_state.parts, header, buffers)
    assert all(torch.equal(value, expected[name]) for name, value in averaged.state_dict().items())


def test_two_trained_models_are_still_refused(stage: Stage) -> None:
    critic = torch.nn.Linear(2, 1)
    with pytest.raises(NotAttached, match="two models"):
        stage.run.attach(stage.model, stage.optimizer, critic, torch.optim.SGD(critic.parameters(), lr=0.1))


def test_optimizers_and_counters_are_no_copies(stage: Stage) -> None:
    assert is_copy(Shadow(stage.model), stage.model)
    assert is_copy(AveragedModel(stage.model), stage.model)
    assert not is_copy(stage.optimizer, stage.model)
    assert not is_copy(torch.nn.BatchNorm1d(3), stage.model)
