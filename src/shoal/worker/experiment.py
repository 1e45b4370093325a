"""Experiment: a description of what to train and how to evaluate it, as `shoal.run` takes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from shoal.errors import BadExperiment

ONLY_KERAS = ("callbacks", "jit_compile")
ONLY_TORCH = ("optimizer", "scheduler", "loss", "training_step")


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Description of a training job; the function given to `shoal.run` returns one in every member.

    Keras: a compiled `model`. `data` is what `shoal.keras.batches` takes, for arrays `(x, y)`. `evaluation` is what
    `validation_data` would be, `callbacks` those of `model.fit`. `jit_compile` is that of `shoal.keras.Elastic`: a
    compiled model does not remember whether you asked for it::

        Experiment(model=model, data=(x, y), size=512, epochs=10, evaluation=(x_test, y_test))

    PyTorch: a `model` with its `optimizer` and optionally a `scheduler`. `data` is a dataset. With `loss`, its batches
    are (x, y) and `loss(model(x), y)` is trained; with `training_step(model, batch)`, they can be anything, and the
    function returns the loss or the loss and its weight. `evaluation(model)` returns scores by name (in Keras too)::

        Experiment(model=model, optimizer=optimizer, loss=cross_entropy, data=dataset, size=512, epochs=10,
                   evaluation=accuracy)

    Trainers evaluate at the end of every epoch. If the run has an evaluator, that does it instead: it keeps the `best`
    model, such as "max:accuracy", in the file `export`, and stops the run after `patience` evaluations without an
    improvement.

    `size` is the global batch size. `batching` holds further arguments of `shoal.keras.batches` or `run.batches`.
    `save` is a file below the run's directory to which one member writes the trained model.
    """

    model: Any
    data: Any
    size: int
    epochs: int = 1
    seed: int = 0
    evaluation: Any = None
    best: str | None = None
    patience: int | None = None
    export: str | None = None
    save: str = ""
    batching: Mapping[str, Any] = field(default_factory=dict)
    callbacks: Sequence[Any] = ()
    jit_compile: bool = False
    optimizer: Any = None
    scheduler: Any = None
    scheduler_each: Literal["step", "epoch"] = "step"
    loss: Callable[..., Any] | None = None
    training_step: Callable[..., Any] | None = None


def framework_of(experiment: object, where: str) -> str:
    """Return "keras" or "torch", whichever trains this experiment; raise BadExperiment if neither can."""
    if not isinstance(experiment, Experiment):
        raise BadExperiment(
            f"{where} returned {_kind(experiment)}",
            do="return a shoal.Experiment(model=…, data=…, size=…)",
        )
    names = {base.__module__.partition(".")[0] for base in type(experiment.model).__mro__}
    # A Keras model on the PyTorch backend is a torch module too.
    framework = "keras" if "keras" in names else "torch" if "torch" in names else ""
    if not framework:
        raise BadExperiment(
            f"the model that {where} returned is {_kind(experiment.model)}",
            do="pass a keras.Model or a torch.nn.Module",
        )
    _check(experiment, framework, where)
    return framework


def _check(experiment: Experiment, framework: str, where: str) -> None:
    foreign = ONLY_TORCH if framework == "keras" else ONLY_KERAS
    given = [name for name in foreign if getattr(experiment, name)]
    if given:
        raise BadExperiment(
            f"{where} returned a {framework} model with {', '.join(given)}",
            why="PyTorch only: compile a Keras model with it" if framework == "keras" else "Keras only",
        )
    if experiment.data is None:
        raise BadExperiment(f"{where} returned no data")
    if framework == "keras" and not getattr(experiment.model, "compiled", False):
        raise BadExperiment(
            f"the model that {where} returned is not compiled", do="call model.compile(optimizer, loss) in it"
        )
    if framework == "torch":
        _check_torch(experiment, where)


def _check_torch(experiment: Experiment, where: str) -> None:
    if experiment.optimizer is None:
        raise BadExperiment(f"{where} returned no optimizer", do="pass optimizer=torch.optim.…(model.parameters())")
    if (experiment.loss is None) == (experiment.training_step is None):
        raise BadExperiment(
            f"{where} returned {'no' if experiment.loss is None else 'more than one'} way to compute a loss",
            do="pass either loss=… or training_step=…",
        )
    if experiment.evaluation is not None and not callable(experiment.evaluation):
        raise BadExperiment(
            f"the evaluation that {where} returned is {_kind(experiment.evaluation)}",
            do="pass a function of the model that returns scores by name",
        )


def _kind(value: object) -> str:
    name = type(value).__name__
    return "nothing" if value is None else f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
