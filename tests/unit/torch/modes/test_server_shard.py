"""A server that sums pushed gradients makes the same steps as one optimizer with the whole batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from shoal.core.data.sample_order import SampleOrder
from shoal.errors import UnsupportedWithServers
from shoal.torch.modes.server_shard import (
    PER_EPOCH,
    PER_STEP,
    TorchShardLayout,
    TorchShardStore,
    encode_push,
    load_part,
)

ORDER = SampleOrder(samples=32, size=8, epochs=4)


def build(kind: str = "adam") -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    body = [torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.Tanh(), torch.nn.Linear(7, 1)]
    model = torch.nn.Sequential(*body).double()
    kinds = {"adam": torch.optim.AdamW, "sgd": torch.optim.SGD}
    optimizer = kinds[kind](model.parameters(), 0.05)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)


def batch(step: int, start: int = 0, stop: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(8, 5, generator=generator, dtype=torch.float64)
    return x[start:stop], x.sum(1, keepdim=True)[start:stop]


def compute(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    model.zero_grad()
    torch.nn.functional.mse_loss(model.eval()(x), y).backward()


def as_push(layout: TorchShardLayout, part: int, weight: float, schedule_unit: int) -> tuple[bytes, memoryview]:
    header, tensors = encode_push(layout, part, weight, schedule_unit)
    return header, memoryview(b"".join(tensor.tobytes() for tensor in tensors))


class Pair:
    """Model of a trainer, and the store of a server with the same parameters."""

    def __init__(self, parts: int = 3, kind: str = "adam") -> None:
        self.model, _, _ = build(kind)
        self.layout = TorchShardLayout(self.model, parts)
        model, optimizer, scheduler = build(kind)
        self.store = TorchShardStore(model, [optimizer], [scheduler], ORDER, parts)

    def push(self, weight: int, schedule_unit: int = 0, parts: tuple[int, ...] | None = None) -> None:
        for part in parts or tuple(self.layout.parts):
            header, body = as_push(self.layout, part, weight, schedule_unit)
            self.store.apply(part, header, weight, weight / ORDER.size, body)

    def pull(self) -> None:
        for part in self.layout.parts:
            body = b"".join(data.tobytes() for data in self.store.parameters(part))
            load_part(self.layout, part, memoryview(body))


def alone(steps: int, kind: str = "adam", per_epoch: bool = False) -> dict[str, torch.Tensor]:
    model, optimizer, scheduler = build(kind)
    for step in range(steps):
        compute(model, *batch(step))
        optimizer.step()
        if not per_epoch or (step + 1) % ORDER.steps_per_epoch == 0:
            scheduler.step()
    return model.state_dict()


def same(state: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.allclose(state[k].double(), other[k].double(), atol=1e-12) for k in state if "num_" not in k)


@pytest.mark.parametrize("parts", [2, 3, 6])
@pytest.mark.parametrize("tickets", [(8,), (3, 5), (2, 2, 4)])
def test_tickets_of_a_batch_make_one_step(parts: int, tickets: tuple[int, ...]) -> None:
    pair = Pair(parts)
    for step in range(6):
        start = 0
        pair.pull()
        for size in tickets:
            compute(pair.model, *batch(step, start, start + size))
            pair.push(size, PER_STEP)
            start += size
    pair.pull()
    assert same(pair.model.state_dict(), alone(6))


def test_scheduler_of_epochs_advances_once_per_epoch() -> None:
    pair = Pair()
    for step in range(9):
        pair.pull()
        compute(pair.model, *batch(step))
        pair.push(8, PER_EPOCH)
    pair.pull()
    assert same(pair.model.state_dict(), alone(9, per_epoch=True))


def test_scheduler_catches_up_once_its_unit_is_known() -> None:
    late, early = Pair(), Pair()
    for step in range(4):
        for pair in (late, early):
            pair.pull()
            compute(pair.model, *batch(step))
        late.push(8, PER_STEP if step else 0)
        early.push(8, PER_STEP)
    late.pull()
    early.pull()
    assert same(late.model.state_dict(), early.model.state_dict())


def test_shards_step_independently() -> None:
    pair = Pair(3)
    compute(pair.model, *batch(0))
    pair.push(8, PER_STEP, parts=(1,))
    compute(pair.model, *batch(1))
    pair.push(8, PER_STEP, parts=(1,))
    assert (pair.store.version(1), pair.store.version(2)) == (2, 0)
    compute(pair.model, *batch(0))
    pair.push(8, PER_STEP, parts=(2,))
    compute(pair.model, *batch(1))
    pair.push(8, PER_STEP, parts=(2,))
    model, optimizer, scheduler = build()
    for step in range(2):
        fixed = copy.deepcopy(build()[0])
        compute(fixed, *batch(step))
        for parameter, source in zip(model.parameters(), fixed.parameters(), strict=True):
            parameter.grad = source.grad
        optimizer.step()
        scheduler.step()
    pair.pull()
    assert same(pair.model.state_dict(), model.state_dict())


def test_copy_of_a_shard_continues_like_the_original_in_mid_batch() -> None:
    pair, other = Pair(), Pair()
    for step in range(2):
        pair.pull()
        compute(pair.model, *batch(step))
        pair.push(8, PER_STEP)
    compute(pair.model, *batch(2, 0, 3))
    pair.push(3, PER_STEP)
    for part in pair.layout.parts:
        other.store.install(part, *pair.store.capture(part))
    compute(pair.model, *batch(2, 3, 8))
    for part in pair.layout.parts:
        header, body = as_push(pair.layout, part, 5, PER_STEP)
        for store in (pair.store, other.store):
            store.apply(part, header, 5, 5 / 8, body)
    pair.pull()
    other.pull()
    assert same(pair.model.state_dict(), other.model.state_dict())


def test_reset_part_has_its_initial_values() -> None:
    pair = Pair()
    compute(pair.model, *batch(0))
    pair.push(8)
    for part in pair.layout.parts:
        pair.store.reset(part)
    pair.pull()
    assert same(pair.model.state_dict(), build()[0].state_dict())
    assert pair.store.version(1) == 0


def test_parameter_without_a_gradient_is_unchanged() -> None:
    pair = Pair(kind="sgd")
    compute(pair.model, *batch(0))
    frozen = next(iter(pair.model.parameters()))
    before = frozen.detach().clone()
    frozen.grad = None
    pair.push(8)
    pair.pull()
    assert torch.equal(frozen, before)


def test_optimizer_that_needs_the_whole_model_is_named() -> None:
    class Whole(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data -= parameter.grad

    model, _, _ = build()
    store = TorchShardStore(model, [Whole(model.parameters(), 0.1)], [], ORDER, 3)
    pair = Pair()
    compute(pair.model, *batch(0))
    header, body = as_push(pair.layout, 1, 8, 0)
    with pytest.raises(UnsupportedWithServers, match="Whole cannot step with a part of the model"):
        store.apply(1, header, 8, 1.0, body)


def test_running_statistics_move_by_the_fraction_of_the_batch() -> None:
    pair = Pair()
    compute(pair.model, *batch(0))
    pair.model[1].running_mean.fill_(1.0)
    pair.push(4)
    pair.pull()
    assert torch.allclose(pair.model[1].running_mean, torch.full((7,), 0.5, dtype=torch.float64))
