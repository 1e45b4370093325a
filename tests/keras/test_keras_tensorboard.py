"""A Keras run writes event files with the metrics of Keras."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.unit.report.tensorboard.event_reader import read_folder, series

pytest.importorskip("keras")
pytestmark = [pytest.mark.keras, pytest.mark.process, pytest.mark.timeout(600)]

SCRIPT = """
import keras
import numpy as np
import shoal.keras as shoal

rng = np.random.default_rng(0)
x = rng.normal(size=(96, 8)).astype("float32")
y = (x.sum(1) > 0).astype("float32")
model = keras.Sequential([keras.layers.Dense(1, activation="sigmoid")])
model.compile("sgd", "binary_crossentropy", metrics=["accuracy"])
history = model.fit(
    shoal.batches(x, y, size=32), epochs=3, verbose=0, validation_data=(x, y), callbacks=[shoal.Elastic()]
)
print("history", {name: values[-1] for name, values in history.history.items()})
"""


def test_keras_metrics_are_written_as_scalars(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    ours = {"SHOAL_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2", "TERM": "dumb"}
    ran = subprocess.run(
        [sys.executable, "-m", "shoal.cli.main", "run", "-n", "2", "train.py"],
        cwd=tmp_path,
        env={**os.environ, **ours},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (folder,) = tmp_path.glob("home/coordinators/*/runs/*/tensorboard")
    events = read_folder(folder)
    printed = next(line.partition("history ")[2] for line in ran.stdout.splitlines() if "| history " in line)
    for name, value in ast.literal_eval(printed).items():
        assert series(events, f"metrics/{name}")[9] == pytest.approx(value, rel=1e-5)
    assert series(events, "training/loss")[9] > 0
    assert set(series(events, "batch/samples").values()) == {32.0}
