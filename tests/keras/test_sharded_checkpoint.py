"""Loading a checkpoint of servers into a Keras model: only a model that fits is changed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

keras = pytest.importorskip("keras")

from shoal.core.data.sample_order import SampleOrder  # noqa: E402
from shoal.errors import ModelMismatch  # noqa: E402
from shoal.keras.backends.base import make_backend  # noqa: E402
from shoal.keras.backends.optimizer_guard import OptimizerGuard  # noqa: E402
from shoal.keras.modes.server_shard import KerasShardStore  # noqa: E402
from shoal.keras.modes.sharded_checkpoint import load  # noqa: E402

pytestmark = [pytest.mark.keras, pytest.mark.timeout(600)]


def build(width: int = 4, seed: int = 0) -> Any:
    keras.utils.set_random_seed(seed)
    layers = [keras.Input((5,)), keras.layers.Dense(width), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.Adam(), "mse")
    model.optimizer.build(model.trainable_variables)
    for variable in model.non_trainable_variables[:2]:
        variable.assign(np.full(variable.shape, 0.25 + seed, variable.dtype))
    return make_backend(model, OptimizerGuard(model.optimizer))


def checkpoint_of(backend: Any, servers: int = 2) -> Any:
    store = KerasShardStore(backend, SampleOrder(samples=32, size=8), 1 + servers)
    return {part: store.capture(part) for part in range(1, 1 + servers)}


@pytest.mark.parametrize("servers", [1, 2, 3])
def test_load_gives_a_model_the_variables_of_the_servers(servers: int) -> None:
    saved, loaded = build(seed=1), build(seed=2)
    load(loaded, checkpoint_of(saved, servers))
    for actual, expected in zip(loaded.model.get_weights(), saved.model.get_weights(), strict=True):
        np.testing.assert_array_equal(actual, expected)


def test_load_refuses_another_model_and_leaves_it_unchanged() -> None:
    other = build(width=6)
    before = other.model.get_weights()
    with pytest.raises(ModelMismatch, match="does not fit"):
        load(other, checkpoint_of(build(seed=1)))
    assert all(map(np.array_equal, before, other.model.get_weights()))
