"""What a server makes of gradients that arrive piece by piece is what one optimizer would have made of them."""

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
    gradients_of,
    take_over,
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


def as_push(layout: TorchShardLayout, part: int, weight: float, pace: int) -> tuple[bytes, memoryview]:
    how, pieces = gradients_of(layout, part, weight, pace)
    return how, memoryview(b"".join(piece.tobytes() for piece in pieces))


class Pair:
    """A trainer's model, and a vault with the parameters."""

    def __init__(self, parts: int = 3, kind: str = "adam") -> None:
        self.model, _, _ = build(kind)
        self.layout = TorchShardLayout(self.model, parts)
        there, optimizer, scheduler = build(kind)
        self.vault = TorchShardStore(there, [optimizer], [scheduler], ORDER, parts)

    def push(self, weight: int, pace: int = 0, parts: tuple[int, ...] | None = None) -> None:
        for part in parts or tuple(self.layout.parts):
            how, body = as_push(self.layout, part, weight, pace)
            self.vault.apply(part, how, weight, body)

    def pull(self) -> None:
        for part in self.layout.parts:
            body = b"".join(piece.tobytes() for piece in self.vault.parameters(part))
            take_over(self.layout, part, memoryview(body))


def alone(steps: int, kind: str = "adam", per_epoch: bool = False) -> dict[str, torch.Tensor]:
    model, optimizer, scheduler = build(kind)
    for step in range(steps):
        compute(model, *batch(step))
        optimizer.step()
        if not per_epoch or (step + 1) % ORDER.steps_per_epoch == 0:
            scheduler.step()
    return model.state_dict()


def same(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return all(torch.allclose(mine[k].double(), theirs[k].double(), atol=1e-12) for k in mine if "num_" not in k)


@pytest.mark.parametrize("parts", [2, 3, 6])
@pytest.mark.parametrize("pieces", [(8,), (3, 5), (2, 2, 4)])
def test_pieces_of_a_batch_make_one_step(parts: int, pieces: tuple[int, ...]) -> None:
    pair = Pair(parts)
    for step in range(6):
        start = 0
        pair.pull()
        for size in pieces:
            compute(pair.model, *batch(step, start, start + size))
            pair.push(size, PER_STEP)
            start += size
    pair.pull()
    assert same(pair.model.state_dict(), alone(6))


def test_a_schedule_by_epochs_advances_by_epochs() -> None:
    pair = Pair()
    for step in range(9):
        pair.pull()
        compute(pair.model, *batch(step))
        pair.push(8, PER_EPOCH)
    pair.pull()
    assert same(pair.model.state_dict(), alone(9, per_epoch=True))


def test_a_pace_that_is_learned_late_is_made_up_for() -> None:
    late, known = Pair(), Pair()
    for step in range(4):
        for pair in (late, known):
            pair.pull()
            compute(pair.model, *batch(step))
        late.push(8, PER_STEP if step else 0)
        known.push(8, PER_STEP)
    late.pull()
    known.pull()
    assert same(late.model.state_dict(), known.model.state_dict())


def test_shards_may_be_at_different_steps() -> None:
    pair = Pair(3)
    compute(pair.model, *batch(0))
    pair.push(8, PER_STEP, parts=(1,))
    compute(pair.model, *batch(1))
    pair.push(8, PER_STEP, parts=(1,))
    assert (pair.vault.version(1), pair.vault.version(2)) == (2, 0)
    compute(pair.model, *batch(0))
    pair.push(8, PER_STEP, parts=(2,))
    compute(pair.model, *batch(1))
    pair.push(8, PER_STEP, parts=(2,))
    model, optimizer, scheduler = build()
    for step in range(2):
        fixed = copy.deepcopy(build()[0])
        compute(fixed, *batch(step))
        for mine, theirs in zip(model.parameters(), fixed.parameters(), strict=True):
            mine.grad = theirs.grad
        optimizer.step()
        scheduler.step()
    pair.pull()
    assert same(pair.model.state_dict(), model.state_dict())


def test_a_copy_goes_on_as_the_original_would_even_in_the_middle_of_a_batch() -> None:
    pair, other = Pair(), Pair()
    for step in range(2):
        pair.pull()
        compute(pair.model, *batch(step))
        pair.push(8, PER_STEP)
    compute(pair.model, *batch(2, 0, 3))
    pair.push(3, PER_STEP)
    for part in pair.layout.parts:
        other.vault.install(part, *pair.vault.capture(part))
    compute(pair.model, *batch(2, 3, 8))
    for part in pair.layout.parts:
        how, body = as_push(pair.layout, part, 5, PER_STEP)
        for vault in (pair.vault, other.vault):
            vault.apply(part, how, 5, body)
    pair.pull()
    other.pull()
    assert same(pair.model.state_dict(), other.model.state_dict())


def test_a_renewed_part_is_as_it_was_built() -> None:
    pair = Pair()
    compute(pair.model, *batch(0))
    pair.push(8)
    for part in pair.layout.parts:
        pair.vault.reset(part)
    pair.pull()
    assert same(pair.model.state_dict(), build()[0].state_dict())
    assert pair.vault.version(1) == 0


def test_parameters_without_a_gradient_stay_as_they_are() -> None:
    pair = Pair(kind="sgd")
    compute(pair.model, *batch(0))
    frozen = next(iter(pair.model.parameters()))
    before = frozen.detach().clone()
    frozen.grad = None
    pair.push(8)
    pair.pull()
    assert torch.equal(frozen, before)


def test_an_optimizer_that_needs_the_whole_model_says_so() -> None:
    class Whole(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data -= parameter.grad

    model, _, _ = build()
    vault = TorchShardStore(model, [Whole(model.parameters(), 0.1)], [], ORDER, 3)
    pair = Pair()
    compute(pair.model, *batch(0))
    how, body = as_push(pair.layout, 1, 8, 0)
    with pytest.raises(UnsupportedWithServers, match="Whole cannot step with a part of the model"):
        vault.apply(1, how, 8, body)


def test_running_statistics_follow_the_trainers() -> None:
    pair = Pair()
    compute(pair.model, *batch(0))
    pair.model[1].running_mean.fill_(1.0)
    pair.push(4)
    pair.pull()
    assert torch.allclose(pair.model[1].running_mean, torch.full((7,), 0.5, dtype=torch.float64))
