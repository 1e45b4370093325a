"""Evaluators of Keras runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

keras = pytest.importorskip("keras")

pytestmark = [pytest.mark.keras, pytest.mark.timeout(600)]

SCRIPT = Path(__file__).with_name("train_evaluated.py")


def run(path: Path, *settings: str, **plan: Any) -> tuple[str, list[dict[str, Any]]]:
    """Return the output of a run, and its evaluations."""
    environ = {
        **os.environ,
        "SHOAL_HOME": str(path / "home"),
        "RECORDS": str(path),
        "FAULTS": json.dumps(plan),
        "OMP_NUM_THREADS": "1",
        "TERM": "dumb",
    }
    set_ = [
        word for setting in ("checkpoint.every_steps=10", "preload=keras", *settings) for word in ("--set", setting)
    ]
    options = ("--evaluator", *set_)
    command = [sys.executable, "-m", "shoal.cli.main", "run", *options, str(SCRIPT)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    journal = next((path / "home").glob("coordinators/*/journal.jsonl")).read_text().splitlines()
    entries = [json.loads(line) for line in journal]
    return done.stdout, [entry["fields"] for entry in entries if entry["kind"] == "EvaluationReported"]


def test_evaluator_exports_the_best_model(tmp_path: Path) -> None:
    output, evaluations = run(tmp_path, epochs=20, best="min:loss")
    assert evaluations[-1]["step"] == 80
    assert evaluations[-1]["metrics"].keys() == {"loss", "mae"}
    best = min(evaluations, key=lambda evaluation: evaluation["metrics"]["loss"])
    model = keras.models.load_model(tmp_path / "best.keras")
    assert model.optimizer.iterations == best["step"]
    assert "evaluated step 80" in output


def test_run_without_improvement_stops_early(tmp_path: Path) -> None:
    output, evaluations = run(tmp_path, epochs=100_000, best="max:loss", patience=2)
    assert len(evaluations) >= 3
    assert "stopped early: 2 evaluations did not improve on loss" in output


def test_evaluator_scores_the_checkpoints_of_servers(tmp_path: Path) -> None:
    output, evaluations = run(tmp_path, "sync=stale:2", "servers=2", epochs=20, best="min:loss")
    assert evaluations[-1]["step"] == 80, "the end of the training was not evaluated"
    best = min(evaluations, key=lambda evaluation: evaluation["metrics"]["loss"])
    x = np.random.default_rng(0).normal(size=(256, 8)).astype("float32")[:64]
    model = keras.models.load_model(tmp_path / "best.keras")
    scored = model.evaluate(x, x.sum(1, keepdims=True), verbose=0, return_dict=True)
    assert scored["loss"] == pytest.approx(best["metrics"]["loss"], rel=1e-5)
    assert scored["loss"] < 1.0, "nothing was learned"
    assert "evaluated step 80" in output
