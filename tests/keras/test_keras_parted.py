"""The variables that servers wrote get into a Keras model that fits them, and into no other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

keras = pytest.importorskip("keras")

from shoal.core.data.sample_order import SampleOrder  # noqa: E402
from shoal.errors import ModelMismatch  # noqa: E402
from shoal.keras.backends.base import backend_of  # noqa: E402
from shoal.keras.backends.optimizer_guard import OptimizerGuard  # noqa: E402
from shoal.keras.modes.server_shard import KerasShardStore  # noqa: E402
from shoal.keras.modes.sharded_checkpoint import load  # noqa: E402

pytestmark = [pytest.mark.keras, pytest.mark.timeout(120)]


def built(width: int = 4, seed: int = 0) -> Any:
    keras.utils.set_random_seed(seed)
    layers = [keras.Input((5,)), keras.layers.Dense(width), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.Adam(), "mse")
    model.optimizer.build(model.trainable_variables)
    for variable in model.non_trainable_variables[:2]:
        variable.assign(np.full(variable.shape, 0.25 + seed, variable.dtype))
    return backend_of(model, OptimizerGuard(model.optimizer))


def written(backend: Any, servers: int = 2) -> Any:
    vault = KerasShardStore(backend, SampleOrder(samples=32, size=8), 1 + servers)
    return {part: vault.capture(part) for part in range(1, 1 + servers)}


@pytest.mark.parametrize("servers", [1, 2, 3])
def test_a_model_becomes_that_of_the_servers(servers: int) -> None:
    theirs, mine = built(seed=1), built(seed=2)
    load(mine, written(theirs, servers))
    for here, there in zip(mine.model.get_weights(), theirs.model.get_weights(), strict=True):
        np.testing.assert_array_equal(here, there)


def test_a_model_that_differs_is_refused_and_left_as_it_is() -> None:
    mine = built(width=6)
    before = mine.model.get_weights()
    with pytest.raises(ModelMismatch, match="does not fit"):
        load(mine, written(built(seed=1)))
    assert all(map(np.array_equal, before, mine.model.get_weights()))
