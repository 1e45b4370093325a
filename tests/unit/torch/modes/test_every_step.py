"""Members with unequal shares train as one process with the whole batch would, and misuse is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from shoal.errors import UnusableBackward
from shoal.testing.threaded_world import FixedWorldSession, together
from shoal.torch.run import Run
from shoal.worker.session.standalone import StandaloneSession

X = torch.randn(24, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
DATA = TensorDataset(X, X.sum(1, keepdim=True))
MODEL = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()


def train(session: Any, directory: Path, **options: Any) -> tuple[list[float], int, list[bool]]:
    model = copy.deepcopy(MODEL)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    run = Run(session, "unit", str(directory))
    run.attach(model, optimizer, scheduler)
    committed = []
    for x, y in run.batches(DATA, size=8, epochs=2, **options):
        run.backward(torch.nn.functional.mse_loss(model(x), y))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        committed.append(run.committed)
    return [v for p in model.parameters() for v in p.detach().flatten().tolist()], scheduler.last_epoch, committed


@pytest.fixture
def alone(tmp_path: Path) -> tuple[list[float], int, list[bool]]:
    return train(StandaloneSession(), tmp_path)


@pytest.mark.parametrize("options", [{"shares": "fixed:3,1"}, {"micro": 3}], ids=str)
def test_two_members_follow_the_trajectory_of_one(
    alone: tuple[list[float], int, list[bool]], tmp_path: Path, options: dict[str, Any]
) -> None:
    def body(session: FixedWorldSession) -> tuple[list[float], int, list[bool]]:
        return train(session, tmp_path, **options)

    first, second = together(2, body)
    assert first[0] == second[0]
    assert first[0] == pytest.approx(alone[0], rel=1e-9)
    assert first[1] == second[1] == alone[1] == 6


def test_running_statistics_of_a_double_model_are_those_of_doubles(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)).double()

    def body(session: FixedWorldSession) -> torch.Tensor:
        own = copy.deepcopy(model)
        optimizer = torch.optim.SGD(own.parameters(), lr=0.0)
        run = Run(session, "unit", str(tmp_path))
        run.attach(own, optimizer)
        for x, y in run.batches(DATA, size=24, shuffle=False, shares="equal"):
            run.backward(torch.nn.functional.mse_loss(own(x), y))
            optimizer.step()
        return own[0].running_mean

    first, second = together(2, body)
    assert torch.equal(first, second)
    expected = 0.1 * (X[:12].mean(0) + X[12:].mean(0)) / 2
    torch.testing.assert_close(first, expected, rtol=1e-14, atol=1e-15)


def test_generators_are_seeded_alike_after_the_exchange(tmp_path: Path) -> None:
    model = copy.deepcopy(MODEL)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = Run(StandaloneSession(), "unit", str(tmp_path))
    run.attach(model, optimizer)
    for x, y in run.batches(DATA, size=8):
        torch.rand(1 + run.step)  # as many numbers as the share has samples
        run.backward(torch.nn.functional.mse_loss(model(x), y))
        assert run._trainer.current is not None
        drawn = torch.rand(())
        torch.manual_seed(run._trainer.current.common_seed)
        assert drawn == torch.rand(())
        optimizer.step()


def test_body_runs_once_per_micro_batch_and_commits_with_the_last(tmp_path: Path) -> None:
    _, steps, committed = train(StandaloneSession(), tmp_path, micro=3)
    assert committed == [False, False, True] * 6
    assert steps == 6


def test_second_backward_or_step_of_a_batch_is_refused(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = Run(StandaloneSession(), "unit", str(tmp_path))
    run.attach(model, optimizer)
    batches = run.batches(DATA, size=8)
    x, _ = next(iter(batches))
    run.backward(model(x).mean())
    with pytest.raises(UnusableBackward, match="twice for one batch"):
        run.backward(model(x).mean())
    optimizer.step()
    with pytest.raises(UnusableBackward, match="twice in one step"):
        optimizer.step()
