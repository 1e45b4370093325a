"""Guard of an optimizer: intercepts its `apply`, so that gradients are summed over the members first.

Only the attribute `apply` of the one instance is replaced, so the optimizer's class, name and configuration stay the
same. A call of `apply` ends in one of three ways: inside `capturing` the gradients are recorded and nothing is applied
(`model.fit`); with `on_apply` set they are passed to it (a script's own loop); otherwise the call is an error, because
gradients applied to one member alone would make it differ from all others. Inside `capturing`, any other optimizer that
is applied is an error for the same reason, wherever the script keeps it; so the `apply` of Keras' base class is wrapped
once, and the wrapper does nothing else.

What `train_step` does after `apply` runs before the gradients are applied. So weights that it assigns there, such as an
average of the weights or a target network, would be computed from old weights, once per micro-batch, and again for a
step that is repeated. `Variable.assign` is therefore wrapped too, and such a train step is refused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any, NamedTuple

import keras

from shoal.errors import UnusableModel


class ApplyCall(NamedTuple):
    """Arguments of one call of `optimizer.apply`."""

    gradients: list[Any]
    variables: list[Any] | None


OnApply = Callable[[list[Any], list[Any] | None], None]
_thread = threading.local()


class OptimizerGuard:
    """Intercepts `optimizer.apply` until it is released; `on_apply` handles the calls of a script's own loop."""

    def __init__(self, optimizer: Any) -> None:
        if "apply" in vars(optimizer):
            raise UnusableModel(
                f"the {type(optimizer).__name__} optimizer is already wrapped",
                why="its apply method was replaced, so its gradients would be summed twice, or not at all",
                do="compile the model with a plain Keras optimizer",
            )
        _watch_all_optimizers()
        _watch_assignments()
        self.optimizer = optimizer
        self.assigned: list[Any] = []  # variables that the last train step assigned after its `apply`
        self.on_apply: OnApply | None = None
        self._original_apply: Callable[..., Any] = optimizer.apply
        self._captured: list[ApplyCall] | None = None
        # On the instance, so that the class, its name and its configuration stay the same.
        object.__setattr__(optimizer, "apply", self._intercept)

    def release(self) -> None:
        """Restore the optimizer's own `apply`."""
        if self.optimizer.__dict__.get("apply") == self._intercept:
            object.__delattr__(self.optimizer, "apply")

    @contextmanager
    def capturing(self) -> Iterator[list[ApplyCall]]:
        """Record the calls of `apply` instead of executing them; yield the list, which gets one call at most."""
        captured: list[ApplyCall] = []
        self._captured = captured
        _thread.capturing, self.assigned = captured, []
        _thread.assigned = self.assigned
        try:
            yield captured
        finally:
            self._captured = None
            _thread.capturing = None

    def apply(self, gradients: Sequence[Any], variables: Sequence[Any] | None) -> None:
        """Call the optimizer's own `apply`."""
        self._original_apply(list(gradients), None if variables is None else list(variables))

    def _intercept(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        gradients, variables = list(grads), None if trainable_variables is None else list(trainable_variables)
        if self._captured is None:
            if self.on_apply is None:
                raise UnusableModel(
                    "the optimizer was applied outside the training loop of the run",
                    why="its gradients must be summed over the members in every step",
                    do="train with model.fit and shoal.Elastic, or iterate over shoal.batches",
                )
            self.on_apply(gradients, variables)
            return
        if self._captured:
            raise UnusableModel(
                "train_step applies its optimizer twice",
                why="the gradients of a step are summed over the members once, when the step is complete",
                do="add the losses, and apply their gradients once",
            )
        self._captured.append(ApplyCall(gradients, variables))


def refuse_assigned_weights(assigned: Sequence[Any], model: Any) -> None:
    """Raise UnusableModel if a train step assigned weights of the model after it applied its optimizer."""
    weights = {id(v) for layer in model._flatten_layers() for v in layer._trainable_variables} if assigned else set()
    variable = next((variable for variable in assigned if id(variable) in weights or variable.trainable), None)
    if variable is not None:
        raise UnusableModel(
            f"train_step assigns the weights {variable.path!r} after it applied its optimizer",
            why="the optimizer is applied when all members have computed the step; what train_step does by itself would"
            " see old weights, and count micro-batches and repeated steps",
            do="for an average of the weights, pass use_ema=True to the optimizer; target networks are not supported",
        )


def refuse_losses_per_sample(model: Any) -> None:
    """Raise UnusableModel if a layer adds a loss that is not one number: Keras sums it over the samples."""
    for layer in model._flatten_layers():
        for loss in getattr(layer, "_losses", ()):
            if any(size != 1 for size in loss.shape):
                raise UnusableModel(
                    f"the layer {layer.name!r} adds a loss of shape {tuple(loss.shape)}",
                    why="Keras adds up its values over the samples at hand; these are a share of the batch, so the"
                    " gradient would shrink with the number of members",
                    do="pass one number to add_loss: keras.ops.mean(loss) for a value of each sample",
                )


def single_apply_call(captured: list[ApplyCall]) -> ApplyCall:
    """Return the call of `apply` that a train step made; raise UnusableModel if it made none."""
    if not captured:
        raise UnusableModel(
            "train_step does not apply its optimizer",
            why="without gradients there is nothing to sum",
            do="call self.optimizer.apply_gradients in train_step",
        )
    return captured[0]


@cache
def _watch_all_optimizers() -> None:
    """Refuse every optimizer that a train step applies beside the guarded one, whose own `apply` is not reached."""
    base = next(kind for kind in reversed(keras.optimizers.Optimizer.__mro__) if "apply" in vars(kind))
    original = base.apply

    @wraps(original)
    def apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(_thread, "capturing", None) is not None:
            raise UnusableModel(
                f"train_step applies a second optimizer, {type(self).__name__} {self.name!r}",
                why="only the gradients of self.optimizer are summed over the members, so members would diverge",
                do="apply self.optimizer once, to the variables of both parts; or train each part in a run of its own",
            )
        return original(self, *args, **kwargs)

    base.apply = apply


@cache
def _watch_assignments() -> None:
    """Note every variable that is assigned after the `apply` of a train step that is captured."""
    base = next(kind for kind in reversed(keras.Variable.__mro__) if "assign" in vars(kind))
    original = base.assign

    @wraps(original)
    def assign(self: Any, value: Any) -> Any:
        if getattr(_thread, "capturing", None):
            _thread.assigned.append(self)
        return original(self, value)

    base.assign = assign
