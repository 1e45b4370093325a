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
    shown = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: print("epoch", epoch, flush=True))
    return shoal.Experiment(model=model, data=(x, y), size=48, epochs=3, evaluation=(x[:32], y[:32]), callbacks=[shown],
                            save="model.keras")


if __name__ == "__main__":
    run = shoal.run(experiment_fn, roles={"trainer": shoal.Role(count=2)})
    view = run.wait(450)
    files = sorted(path.name for path in run.directory.iterdir())
    evaluation = view.evaluation
    about = {"evaluated": evaluation.step, "best": evaluation.best_step} if evaluation else {}
    print("RESULT", json.dumps({"metrics": run.metrics(), "logs": run.logs(), "files": files, **about}))
"""


EVALUATED = PROGRAM.replace('save="model.keras")', 'best="min:loss", export="best.keras", save="model.keras")').replace(
    'roles={"trainer": shoal.Role(count=2)}',
    'roles={"trainer": shoal.Role(), "evaluator": shoal.Role(cpus=1)}, checkpoint_every_steps=4, preload="keras"',
)


def result_of(tmp_path: Path, program: str) -> dict[str, Any]:
    script = tmp_path / "program.py"
    script.write_text(program)
    environ = {**os.environ, "SHOAL_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    ran = subprocess.run([sys.executable, str(script)], env=environ, capture_output=True, text=True, timeout=500)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    result: dict[str, Any] = json.loads(ran.stdout.partition("RESULT ")[2])
    assert result["metrics"]["step"] == 12
    assert {"loss", "mae", "val_loss", "val_mae"} <= set(result["metrics"])
    return result


def test_experiment_trains_evaluates_and_saves_a_keras_model(tmp_path: Path) -> None:
    result = result_of(tmp_path, PROGRAM)
    assert result["logs"].count("| epoch 2") == 2
    assert result["files"] == ["model.keras"]


def test_evaluator_scores_a_keras_experiment_and_keeps_its_best_model(tmp_path: Path) -> None:
    import keras

    result = result_of(tmp_path, EVALUATED)
    assert result["evaluated"] == 12, "the end of the training was not evaluated"
    assert "val_loss" not in result["logs"], "the trainer evaluated, too"
    assert result["files"] == ["best.keras", "model.keras"]
    (best,) = (tmp_path / "home").glob("coordinators/*/work/best.keras")
    model = keras.models.load_model(best)
    # A line is fitted: every step makes it better.
    assert model.optimizer.iterations == result["best"] == 12
    rng = np.random.default_rng(0)
    x = rng.normal(size=(192, 8)).astype("float32")[:32]
    scored = model.evaluate(x, x.sum(1, keepdims=True), verbose=0, return_dict=True)
    assert scored["loss"] == pytest.approx(result["metrics"]["val_loss"], rel=1e-5)


class RecordFit:
    """Model that only records the arguments of `fit`."""

    def fit(self, data: Any, **arguments: Any) -> None:
        self.data, self.arguments = data, arguments


@pytest.mark.parametrize("has_evaluator", [False, True])
def test_trainers_evaluate_only_without_an_evaluator(has_evaluator: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.keras import experiment as training
    from shoal.worker.experiment import Experiment

    requests: list[Any] = []
    monkeypatch.setattr(training, "join", lambda: None)
    monkeypatch.setattr(training, "Elastic", lambda *callbacks, **request: requests.append((callbacks, request)))
    model, held = RecordFit(), (np.ones((4, 2)), np.ones(4))
    experiment = Experiment(
        model=model,
        data=held,
        size=4,
        epochs=2,
        evaluation=held,
        best="max:accuracy",
        patience=3,
        callbacks=["mine"],
        jit_compile=has_evaluator,
    )
    training.train(experiment, evaluates=not has_evaluator)
    assert model.arguments["validation_data"] is (None if has_evaluator else held)
    assert model.arguments["epochs"] == 2
    request = {"evaluate": held, "best": "max:accuracy", "patience": 3, "export": None, "jit_compile": has_evaluator}
    assert requests == [(("mine",), request)]


def test_scores_of_a_function_are_logged_at_the_end_of_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.keras import experiment as training

    logged: dict[str, float] = {}
    run: Any = type("Run", (), {"log": lambda self, **scores: logged.update(scores)})()
    training._ScoreLogger(run, lambda: {"worst": 3}).on_epoch_end(0, {"loss": 1.0})
    assert logged == {"worst": 3.0}


@pytest.mark.parametrize("function", [False, True])
def test_scores_of_an_epoch_are_logged_once(function: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.keras import Run
    from shoal.keras import experiment as training
    from shoal.worker.experiment import Experiment
    from shoal.worker.session.standalone import StandaloneSession

    logged: list[str] = []
    run = Run(StandaloneSession(), "alone", "unused")
    monkeypatch.setattr(run, "log", lambda **scores: logged.extend(scores))
    monkeypatch.setattr(training, "join", lambda: run)
    monkeypatch.setattr(sys.modules["shoal.keras.elastic"], "join", lambda: run)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    held = (np.ones((4, 2)), np.ones(4))
    evaluation: Any = (lambda _model: {"worst": 3}) if function else held
    experiment = Experiment(model=model, data=held, size=4, epochs=2, evaluation=evaluation, best="min:loss")
    training.train(experiment, evaluates=True)
    assert sorted(logged) == sorted(["loss", "worst" if function else "val_loss"] * 2)


@pytest.mark.parametrize("wrong", ["auto", None, 1])
def test_jit_compile_must_be_a_bool(wrong: Any) -> None:
    from shoal.errors import UnusableModel
    from shoal.keras import Elastic

    with pytest.raises(UnusableModel, match="invalid jit_compile"):
        Elastic(jit_compile=wrong)
