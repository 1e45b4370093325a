"""A copy that restores captured state continues like the original, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as lr

from shoal.torch.state import capture as state

OPTIMIZERS: dict[str, dict[str, Any]] = {
    name: {}
    for name, kind in sorted(vars(torch.optim).items())
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
}
OPTIMIZERS["SGD"] = {"lr": 0.1, "momentum": 0.9, "nesterov": True}
OPTIMIZERS["RMSprop"] = {"momentum": 0.9, "centered": True}
OPTIMIZERS["Adam"] = {"amsgrad": True}

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda o: lr.LambdaLR(o, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda o: lr.MultiplicativeLR(o, lambda epoch: 0.9),
    "StepLR": lambda o: lr.StepLR(o, 3),
    "MultiStepLR": lambda o: lr.MultiStepLR(o, [2, 7, 7]),
    "ConstantLR": lambda o: lr.ConstantLR(o, total_iters=6),
    "LinearLR": lambda o: lr.LinearLR(o, total_iters=8),
    "ExponentialLR": lambda o: lr.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr.PolynomialLR(o, total_iters=9),
    "CosineAnnealingLR": lambda o: lr.CosineAnnealingLR(o, 7),
    "CosineAnnealingWarmRestarts": lambda o: lr.CosineAnnealingWarmRestarts(o, 3, 2),
    "OneCycleLR": lambda o: lr.OneCycleLR(o, 0.2, total_steps=50),
    "CyclicLR": lambda o: lr.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "CyclicLR triangular2": lambda o: lr.CyclicLR(o, 0.01, 0.1, step_size_up=3, mode="triangular2"),
    "ReduceLROnPlateau": lambda o: lr.ReduceLROnPlateau(o, patience=1),
    "SequentialLR": lambda o: lr.SequentialLR(o, [lr.LinearLR(o, total_iters=4), lr.MultiStepLR(o, [3, 5])], [4]),
    "ChainedScheduler": lambda o: lr.ChainedScheduler([lr.ConstantLR(o, total_iters=4), lr.ExponentialLR(o, 0.9)]),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.01, anneal_epochs=6),
}


class Training:
    """Model, optimizer and optional scheduler that train on fixed data."""

    def __init__(self, optimizer: str = "SGD", options: dict[str, Any] | None = None, scheduler: str = "") -> None:
        torch.manual_seed(1)
        sparse = optimizer == "SparseAdam"
        bias = optimizer != "Muon"  # it takes matrices only
        self.model: torch.nn.Module
        if sparse:
            self.model = torch.nn.Embedding(20, 4, sparse=True)
        else:
            layers = [torch.nn.Linear(6, 8, bias=bias), torch.nn.Tanh(), torch.nn.Linear(8, 3, bias=bias)]
            self.model = torch.nn.Sequential(*layers)
        kind = getattr(torch.optim, optimizer)
        self.optimizer = kind(self.model.parameters(), **(OPTIMIZERS[optimizer] if options is None else options))
        self.scheduler = SCHEDULERS[scheduler](self.optimizer) if scheduler else None
        self.sparse = sparse

    @property
    def parts(self) -> dict[str, Any]:
        parts = {"model": self.model, "optimizer": self.optimizer}
        return parts | ({"scheduler": self.scheduler} if self.scheduler else {})

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            generator = torch.Generator().manual_seed(step)

            def closure(generator=generator) -> torch.Tensor:
                self.optimizer.zero_grad()
                if self.sparse:
                    data = torch.randint(20, (8,), generator=generator)
                else:
                    data = torch.randn(8, 6, generator=generator)
                loss = (self.model(data) ** 2).mean()
                loss.backward()
                return loss

            loss = self.optimizer.step(closure)
            if isinstance(self.scheduler, lr.ReduceLROnPlateau):
                self.scheduler.step(float(loss.detach()) if step % 2 else 1.0)
            elif self.scheduler:
                self.scheduler.step()

    def send_to(self, other: Training) -> None:
        header, tensors = state.capture(self.parts)
        state.restore(other.parts, header, [buffer.copy() for buffer in state.as_bytes(tensors)])


def check_continuation(make: Callable[[], Training]) -> None:
    original, copy = make(), make()
    original.train(0, 5)
    torch.nn.init.zeros_(next(copy.model.parameters()))
    original.send_to(copy)
    assert state.checksum(original.parts) == state.checksum(copy.parts)
    original.train(5, 12)
    copy.train(5, 12)
    assert state.checksum(original.parts) == state.checksum(copy.parts)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_copy_continues_like_the_original_with_every_optimizer(name):
    check_continuation(lambda: Training(name))


@pytest.mark.parametrize("name", SCHEDULERS)
def test_copy_continues_like_the_original_with_every_scheduler(name):
    check_continuation(lambda: Training("SGD", scheduler=name))


def test_copy_with_other_training_continues_like_the_original():
    original, copy = Training("AdamW"), Training("AdamW")
    original.train(0, 5)
    copy.train(20, 40)
    original.send_to(copy)
    original.train(5, 8)
    copy.train(5, 8)
    assert state.checksum(original.parts) == state.checksum(copy.parts)


def test_state_before_the_first_step_can_be_restored_after_many():
    original, copy = Training("AdamW"), Training("AdamW")
    copy.train(0, 5)
    original.send_to(copy)
    assert state.checksum(original.parts) == state.checksum(copy.parts)


def test_learning_rate_in_a_tensor_is_restored():
    check_continuation(lambda: Training("Adam", {"lr": torch.tensor(0.01)}, "ExponentialLR"))


def test_state_of_a_grad_scaler_is_restored():
    scaler, copy = (torch.amp.GradScaler("cpu", init_scale=scale) for scale in (1024.0, 2.0))
    header, buffers = state.capture({"scaler": scaler})
    state.restore({"scaler": copy}, header, state.as_bytes(buffers))
    assert copy.state_dict() == scaler.state_dict()


class Float32Momentum(torch.optim.Optimizer):
    """Optimizer that keeps its momentum in float32 for any parameters, and counts in int64."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            values = self.state[parameter]
            values.setdefault("momentum", torch.zeros(parameter.shape, dtype=torch.float32))
            values.setdefault("count", torch.zeros(1, dtype=torch.int64))
            values["momentum"].mul_(0.9).add_(parameter.grad.float())
            values["count"] += 1
            parameter.data.sub_(values["momentum"].mul(0.01).to(parameter.dtype))


def test_optimizer_state_keeps_its_own_dtype():
    def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        net = torch.nn.Linear(5, 3).bfloat16()
        return net, Float32Momentum(net.parameters())

    (net, optimizer), (other, copy) = make(), make()
    for seed in range(3):
        net(torch.randn(2, 5, generator=torch.Generator().manual_seed(seed)).bfloat16()).sum().backward()
        optimizer.step()
    header, buffers = state.capture({"model": net, "optimizer": optimizer})
    state.restore({"model": other, "optimizer": copy}, header, [each.copy() for each in state.as_bytes(buffers)])
    assert state.checksum({"o": optimizer}) == state.checksum({"o": copy})


def test_copied_buffers_hold_the_state_at_capture():
    training = Training("Adam")
    training.train(0, 2)
    before = state.checksum(training.parts)
    header, tensors = state.capture(training.parts)
    frozen = [buffer.copy() for buffer in state.as_bytes(tensors)]
    training.train(2, 5)
    copy = Training("Adam")
    state.restore(copy.parts, header, frozen)
    assert state.checksum(copy.parts) == before
