"""A trainer computes the mean gradient of its ticket and pushes it once all optimizers were stepped."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from shoal.core.parameter_server.ticket_ledger import Ticket, TicketGranted
from shoal.errors import UnsupportedWithServers, UnusableBackward
from shoal.settings import RunSettings
from shoal.torch.modes.served import TorchServedTrainer
from shoal.torch.modes.server_shard import PER_STEP
from shoal.worker.data.feed import MicroBatch
from shoal.worker.parameter_server.ticket_loop import TicketStep


class Trainer(TorchServedTrainer):
    """Trainer without servers: a push is only counted."""

    pushed = 0

    def _push(self, current: TicketStep) -> None:
        self.pushed += 1
        current.committed = True


@pytest.fixture
def trainer() -> Trainer:
    session: Any = SimpleNamespace(me="unit", settings=RunSettings(sync="stale:1", servers=1), is_server=False)
    trainer = Trainer(session, cast(Any, None))
    trainer.model = torch.nn.Linear(2, 1, bias=False)
    trainer.optimizers = [torch.optim.SGD(trainer.model.parameters(), lr=0.1) for _ in range(2)]
    granted = TicketGranted(Ticket(0, 0, 4), 0, 0, 0, 0)
    micro_batches = [MicroBatch(torch.ones(3, 2), 3), MicroBatch(torch.full((1, 2), 5.0), 1)]
    trainer.current = TicketStep(granted, 1, 0, micro_batches, last_of_epoch=False)
    return trainer


def compute(trainer: Trainer) -> None:
    assert trainer.model is not None
    assert trainer.current is not None
    for index, micro_batch in enumerate(trainer.current.micro_batches):
        trainer.current.index = index
        trainer.backward(trainer.model(micro_batch.batch).mean(), None)


def test_micro_batches_make_one_mean_gradient(trainer: Trainer) -> None:
    compute(trainer)
    assert trainer.model is not None
    (weight,) = trainer.model.parameters()
    assert weight.grad is not None
    assert weight.grad.tolist() == [[2.0, 2.0]]  # (3 * 1 + 1 * 5) / 4


def test_gradient_is_pushed_with_the_last_optimizer_and_nothing_steps_here(trainer: Trainer) -> None:
    compute(trainer)
    for optimizer, expected in zip(trainer.optimizers, (0, 1), strict=True):
        trainer.apply(optimizer, lambda: pytest.fail("the optimizer stepped on a trainer"))
        assert trainer.pushed == expected
    with pytest.raises(UnusableBackward, match="twice in one step"):
        trainer.apply(trainer.optimizers[0], lambda: None)


def test_step_before_backward_is_refused(trainer: Trainer) -> None:
    assert trainer.current is not None
    trainer.current.index = 1
    with pytest.raises(UnusableBackward, match=r"before run\.backward"):
        trainer.apply(trainer.optimizers[0], lambda: None)


def test_abandoned_ticket_is_ignored_and_leaves_no_gradient(trainer: Trainer) -> None:
    compute(trainer)
    assert trainer.current is not None
    assert trainer.model is not None
    trainer.current.abandoned = True
    trainer.apply(trainer.optimizers[0], lambda: None)
    trainer._end_ticket(trainer.current)
    assert trainer.pushed == 0
    assert all(p.grad is None for p in trainer.model.parameters())


def test_call_of_a_scheduler_is_recorded_and_makes_no_step(trainer: Trainer) -> None:
    assert trainer.current is not None
    trainer.current.committed = True
    assert trainer.scheduler_steps(object()) == 0
    trainer._end_ticket(trainer.current)
    assert trainer._schedule_unit == PER_STEP


def test_what_needs_the_whole_gradient_is_refused(trainer: Trainer) -> None:
    with pytest.raises(UnsupportedWithServers, match="metric"):
        trainer.scheduler_steps(object(), 0.5)
    with pytest.raises(UnsupportedWithServers, match="GradScaler"):
        trainer.refuse_scaler()
