"""A captured state stays that of its step while the next step computes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from shoal.testing.conformance import KERAS_TORCH

pytestmark = [pytest.mark.keras, pytest.mark.process]

SCRIPT = """
import keras
import numpy as np
import shoal.keras as shoal
from shoal.keras.modes.state import capture

model = keras.Sequential([keras.Input((3,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)])
model.compile("sgd", "mse")
x = np.random.default_rng(0).normal(size=(48, 3))


class Capture(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        parts = shoal.join()._training_state.parts
        _, buffers = capture({name: parts[name] for name in ("model", "metrics")})
        before = [buffer.copy() for buffer in buffers]
        model(keras.ops.convert_to_tensor(x), training=True)
        model.metrics[0].update_state(7.0)
        assert all(np.array_equal(*pair) for pair in zip(before, buffers)), "the forward pass changed it"


model.fit(shoal.batches(x, x[:, :1], size=16), verbose=0, callbacks=[shoal.Elastic(), Capture()])
print("unchanged")
"""


def test_forward_pass_does_not_change_a_captured_state() -> None:
    if KERAS_TORCH.missing:
        pytest.skip(f"{KERAS_TORCH.name} needs {', '.join(KERAS_TORCH.missing)}")
    # On PyTorch, where variables change in place; on TensorFlow they do not.
    environ = {**os.environ, **KERAS_TORCH.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environ, capture_output=True, text=True, timeout=90, check=False
    )
    assert ran.stdout.strip().endswith("unchanged"), ran.stderr
