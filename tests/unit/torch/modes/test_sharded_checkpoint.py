"""A checkpoint of parameter servers is loaded into a model that fits it, and into no other."""

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


def checkpoint(model: nn.Module, servers: int) -> Parts:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    store = TorchShardStore(model, [optimizer], [], ORDER, 1 + servers)
    return {part: store.capture(part) for part in range(1, 1 + servers)}


@pytest.mark.parametrize("servers", [1, 2, 5])
def test_model_gets_the_parameters_and_buffers_of_the_servers(servers: int) -> None:
    source, target = body(seed=1), body(seed=2)
    source(torch.randn(8, 5))  # moves the statistics
    load({"model": target, "optimizer1": object()}, checkpoint(source, servers))
    expected, loaded = source.state_dict(), target.state_dict()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("build", "why"),
    [
        (lambda: body(9), "only in this model: 0.weight float32[9, 5]"),
        (lambda: nn.Sequential(*body(), nn.Linear(1, 1)), "only in this model: 3.weight float32[1, 1]"),
        (lambda: body()[:2], "only in the checkpoint: float32[1, 7]"),
        (lambda: body().double(), "0.weight float64[7, 5]"),
        (lambda: nn.Sequential(*reversed(body())), "in another order"),
    ],
)
def test_model_that_differs_is_refused_and_unchanged(build: Callable[[], nn.Module], why: str) -> None:
    model = build()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ModelMismatch) as raised:
        load({"model": model}, checkpoint(body(seed=1), 2))
    assert why in raised.value.why
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_tensor_that_would_broadcast_is_refused() -> None:
    with pytest.raises(ModelMismatch):
        load({"model": nn.Linear(1, 4, bias=False)}, checkpoint(nn.Linear(1, 1, bias=False), 1))
