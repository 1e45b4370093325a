"""The parameters and buffers that servers wrote get into a model that fits them, and into no other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from shoal.core.data.sample_order import SampleOrder
from shoal.errors import ModelMismatch
from shoal.torch.modes.server_shard import TorchShardStore
from shoal.torch.modes.sharded_checkpoint import load
from shoal.worker.parameter_server.sharded_checkpoint import Parts

ORDER = SampleOrder(samples=32, size=8, epochs=4)


def body(width: int = 7, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, width), nn.BatchNorm1d(width), nn.Linear(width, 1))


def written(model: nn.Module, servers: int) -> Parts:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    vault = TorchShardStore(model, [optimizer], [], ORDER, 1 + servers)
    return {part: vault.capture(part) for part in range(1, 1 + servers)}


@pytest.mark.parametrize("servers", [1, 2, 5])
def test_a_model_becomes_that_of_the_servers(servers: int) -> None:
    theirs, mine = body(seed=1), body(seed=2)
    theirs(torch.randn(8, 5))  # moves the statistics
    load({"model": mine, "optimizer1": object()}, written(theirs, servers))
    here, there = mine.state_dict(), theirs.state_dict()
    assert all(torch.equal(here[name], there[name]) for name in there)


@pytest.mark.parametrize(
    ("mine", "why"),
    [
        (lambda: body(9), "only here: 0.weight float32[9, 5]"),
        (lambda: nn.Sequential(*body(), nn.Linear(1, 1)), "only here: 3.weight float32[1, 1]"),
        (lambda: body()[:2], "only there: float32[1, 7]"),
        (lambda: body().double(), "0.weight float64[7, 5]"),
        (lambda: nn.Sequential(*reversed(body())), "in another order"),
    ],
)
def test_a_model_that_differs_is_refused_and_left_as_it_is(mine: Callable[[], nn.Module], why: str) -> None:
    model = mine()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ModelMismatch) as raised:
        load({"model": model}, written(body(seed=1), 2))
    assert why in raised.value.why
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_what_could_be_stretched_to_fit_does_not_fit() -> None:
    with pytest.raises(ModelMismatch):
        load({"model": nn.Linear(1, 4, bias=False)}, written(nn.Linear(1, 1, bias=False), 1))
