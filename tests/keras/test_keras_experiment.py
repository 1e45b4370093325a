"""`shoal.run` with a Keras model."""

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

PROGRAM = """
import json
import shoal


def experiment_fn():
    import keras
    import numpy as np

    rng = np.random.default_rng(0)
    x = rng.normal(size=(192, 8)).astype("float32")
    y = x.sum(1, keepdims=True)
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"])
    told = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: print("epoch", epoch, flush=True))
    return shoal.Experiment(model=model, data=(x, y), size=48, epochs=3, evaluation=(x[:32], y[:32]), callbacks=[told],
                            save="model.keras")


if __name__ == "__main__":
    run = shoal.run(experiment_fn, roles={"trainer": shoal.Role(count=2)})
    view = run.wait(450)
    files = sorted(path.name for path in run.directory.iterdir())
    found = view.evaluation
    about = {"evaluated": found.step, "best": found.best_step} if found else {}
    print("TOLD", json.dumps({"metrics": run.metrics(), "logs": run.logs(), "files": files, **about}))
"""


EVALUATED = PROGRAM.replace('save="model.keras")', 'best="min:loss", export="best.keras", save="model.keras")').replace(
    'roles={"trainer": shoal.Role(count=2)}',
    'roles={"trainer": shoal.Role(), "evaluator": shoal.Role(cpus=1)}, checkpoint_every_steps=4, preload="keras"',
)


def told(tmp_path: Path, program: str) -> dict[str, Any]:
    script = tmp_path / "program.py"
    script.write_text(program)
    environ = {**os.environ, "SHOAL_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    ran = subprocess.run([sys.executable, str(script)], env=environ, capture_output=True, text=True, timeout=500)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout.partition("TOLD ")[2])
    assert found["metrics"]["step"] == 12
    assert {"loss", "mae", "val_loss", "val_mae"} <= set(found["metrics"])
    return found


def test_an_experiment_trains_evaluates_and_saves_a_keras_model(tmp_path: Path) -> None:
    found = told(tmp_path, PROGRAM)
    assert found["logs"].count("| epoch 2") == 2
    assert found["files"] == ["model.keras"]


def test_an_evaluator_scores_a_keras_experiment_and_keeps_its_best_model(tmp_path: Path) -> None:
    import keras

    found = told(tmp_path, EVALUATED)
    assert found["evaluated"] == 12, "the end of the training was not evaluated"
    assert "val_loss" not in found["logs"], "the trainer evaluated, too"
    assert found["files"] == ["best.keras", "model.keras"]
    (best,) = (tmp_path / "home").glob("coordinators/*/work/best.keras")
    model = keras.models.load_model(best)
    # A line is fitted: every step makes it better.
    assert model.optimizer.iterations == found["best"] == 12
    rng = np.random.default_rng(0)
    x = rng.normal(size=(192, 8)).astype("float32")[:32]
    scored = model.evaluate(x, x.sum(1, keepdims=True), verbose=0, return_dict=True)
    assert scored["loss"] == pytest.approx(found["metrics"]["val_loss"], rel=1e-5)


class Fitted:
    """A compiled model that only takes note of how it is fitted."""

    def fit(self, data: Any, **how: Any) -> None:
        self.data, self.how = data, how


@pytest.mark.parametrize("beside", [False, True])
def test_with_an_evaluator_the_trainers_do_not_evaluate(beside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.keras import experiment as training
    from shoal.worker.experiment import Experiment

    wishes: list[Any] = []
    monkeypatch.setattr(training, "join", lambda: None)
    monkeypatch.setattr(training, "Elastic", lambda *others, **wish: wishes.append((others, wish)))
    model, held = Fitted(), (np.ones((4, 2)), np.ones(4))
    made = Experiment(
        model=model,
        data=held,
        size=4,
        epochs=2,
        evaluation=held,
        best="max:accuracy",
        patience=3,
        callbacks=["mine"],
        jit_compile=beside,
    )
    training.train(made, evaluates=not beside)
    assert model.how["validation_data"] is (None if beside else held)
    assert model.how["epochs"] == 2
    wish = {"evaluate": held, "best": "max:accuracy", "patience": 3, "export": None, "jit_compile": beside}
    assert wishes == [(("mine",), wish)]


def test_figures_that_a_function_finds_are_told_at_the_end_of_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.keras import experiment as training

    told: dict[str, float] = {}
    run: Any = type("Run", (), {"log": lambda self, **figures: told.update(figures)})()
    training._Scoring(run, lambda: {"worst": 3}).on_epoch_end(0, {"loss": 1.0})
    assert told == {"worst": 3.0}


@pytest.mark.parametrize("function", [False, True])
def test_figures_of_an_epoch_are_told_once(function: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.keras import Run, elastic
    from shoal.keras import experiment as training
    from shoal.worker.experiment import Experiment
    from shoal.worker.session.standalone import StandaloneSession

    told: list[str] = []
    run = Run(StandaloneSession(), "alone", "unused")
    monkeypatch.setattr(run, "log", lambda **figures: told.extend(figures))
    monkeypatch.setattr(training, "join", lambda: run)
    monkeypatch.setattr(elastic, "join", lambda: run)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    held = (np.ones((4, 2)), np.ones(4))
    evaluation: Any = (lambda _model: {"worst": 3}) if function else held
    made = Experiment(model=model, data=held, size=4, epochs=2, evaluation=evaluation, best="min:loss")
    training.train(made, evaluates=True)
    assert sorted(told) == sorted(["loss", "worst" if function else "val_loss"] * 2)


@pytest.mark.parametrize("wrong", ["auto", None, 1])
def test_whether_to_use_xla_is_said_with_yes_or_no(wrong: Any) -> None:
    from shoal.errors import UnusableModel
    from shoal.keras import Elastic

    with pytest.raises(UnusableModel, match="jit_compile cannot be"):
        Elastic(jit_compile=wrong)
