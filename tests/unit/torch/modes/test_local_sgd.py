"""With local SGD members train alone for a round and are equal after it."""

from __future__ import annotations

import copy
from pathlib import Path

import msgspec
import pytest
import torch
from torch.utils.data import TensorDataset

from shoal.errors import UnsupportedWithLocalSgd
from shoal.testing.threaded_world import FixedWorldSession, together
from shoal.torch.modes.local_sgd import TorchLocalTrainer
from shoal.torch.run import Run

X = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(X, X.sum(1, keepdim=True))
MODEL = torch.nn.Linear(4, 1)


def local_run(session: FixedWorldSession, directory: Path) -> Run:
    session.settings = msgspec.structs.replace(session.settings, sync="local:2", outer_lr=1.0, outer_momentum=0.0)
    return Run(session, "unit", str(directory))


def test_members_are_equal_after_the_last_round_and_schedules_count_global_batches(tmp_path: Path) -> None:
    def body(session: FixedWorldSession) -> tuple[list[float], int, int]:
        run = local_run(session, tmp_path)
        model = copy.deepcopy(MODEL)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        run.attach(model, optimizer, scheduler)
        for x, y in run.batches(DATA, size=8, epochs=2):
            run.backward(torch.nn.functional.mse_loss(model(x), y))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        return model.weight.flatten().tolist(), scheduler.last_epoch, run.step

    first, second = together(2, body)
    assert first == second
    assert first[1:] == (8, 4)  # eight global batches in four rounds
    assert first[0] != MODEL.weight.flatten().tolist()


def test_feature_that_needs_an_exchange_in_every_step_is_refused(tmp_path: Path) -> None:
    def body(session: FixedWorldSession) -> str:
        run = local_run(session, tmp_path)
        assert isinstance(run._trainer, TorchLocalTrainer)
        with pytest.raises(UnsupportedWithLocalSgd) as raised:
            run.sync_batchnorm(torch.nn.BatchNorm1d(1))
        return raised.value.code

    assert together(1, body) == ["S317"]
