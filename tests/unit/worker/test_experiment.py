"""Checks of the experiment that `experiment_fn` returns."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.errors import BadExperiment
from shoal.worker.experiment import Experiment, framework_of


def object_from(*modules: str) -> Any:
    """Return an object whose class descends from classes of these modules."""
    bases = tuple(type(f"Base{i}", (), {"__module__": module}) for i, module in enumerate(modules))
    return type("Mine", bases, {"__module__": "mine", "compiled": True})()


TORCH, KERAS = object_from("torch.nn.modules.module"), object_from("keras.src.models.model")


def test_framework_follows_from_the_model() -> None:
    assert framework_of(Experiment(model=TORCH, optimizer=1, loss=print, data=1, size=8), "f") == "torch"
    assert framework_of(Experiment(model=KERAS, data=1, size=8), "f") == "keras"


def test_keras_model_on_the_torch_backend_is_a_keras_model() -> None:
    both = object_from("torch.nn.modules.module", "keras.src.models.model")
    assert framework_of(Experiment(model=both, data=1, size=8), "f") == "keras"


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "returned nothing"),
        ({"model": 1}, "returned a dict"),
        (Experiment(model="m", data=1, size=8), "is a str"),
        (Experiment(model=TORCH, loss=print, data=1, size=8), "no optimizer"),
        (Experiment(model=TORCH, optimizer=1, data=1, size=8), "no way to compute a loss"),
        (
            Experiment(model=TORCH, optimizer=1, loss=print, training_step=print, data=1, size=8),
            "more than one way to compute a loss",
        ),
        (Experiment(model=TORCH, optimizer=1, loss=print, data=1, size=8, callbacks=[1]), "torch model with callbacks"),
        (Experiment(model=TORCH, optimizer=1, loss=print, data=1, size=8, jit_compile=True), "model with jit_compile"),
        (Experiment(model=TORCH, optimizer=1, loss=print, data=1, size=8, evaluation=(1, 2)), "is a tuple"),
        (Experiment(model=KERAS, data=1, size=8, optimizer=1), "keras model with optimizer"),
        (Experiment(model=KERAS, data=None, size=8), "no data"),
    ],
)
def test_experiment_that_cannot_be_trained_is_rejected(returned: object, message: str) -> None:
    with pytest.raises(BadExperiment, match=message):
        framework_of(returned, "experiment_fn")


def test_keras_model_that_is_not_compiled_is_rejected() -> None:
    model = object_from("keras.src.models.model")
    model.compiled = False
    with pytest.raises(BadExperiment, match="not compiled"):
        framework_of(Experiment(model=model, data=1, size=8), "f")
