"""An optimizer whose `apply` asks the run first; in everything else it stays what it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from shoal.errors import UnusableModel


class ApplyCall(NamedTuple):
    """What an optimizer was asked to apply."""

    gradients: list[Any]
    variables: list[Any] | None


Take = Callable[[list[Any], list[Any] | None], None]


class OptimizerGuard:
    """Takes the gradients that an optimizer is asked to apply: they have to be summed over the members first.

    `take` is given them as they come, in a loop of the script's own; otherwise those of one train step are kept.
    """

    def __init__(self, optimizer: Any) -> None:
        if "apply" in vars(optimizer):
            raise UnusableModel(
                f"the {type(optimizer).__name__} optimizer is wrapped by something else",
                why="its apply was replaced, so that its gradients would be summed twice, or not at all",
                do="compile the model with a plain Keras optimizer",
            )
        self.optimizer = optimizer
        self.take: Take | None = None
        self._real: Callable[..., Any] = optimizer.apply
        self._asked: list[ApplyCall] | None = None
        # On the instance, so that the class, its name and its configuration stay as they are.
        object.__setattr__(optimizer, "apply", self._apply)

    def release(self) -> None:
        """Let the optimizer be as it was."""
        if self.optimizer.__dict__.get("apply") == self._apply:
            object.__delattr__(self.optimizer, "apply")

    @contextmanager
    def keeping(self) -> Iterator[list[ApplyCall]]:
        """Inside, what the optimizer is asked for is kept; gives the one thing that it was asked for."""
        kept: list[ApplyCall] = []
        self._asked = kept
        try:
            yield kept
        finally:
            self._asked = None

    def apply(self, gradients: Sequence[Any], variables: Sequence[Any] | None) -> None:
        """Really apply them."""
        self._real(list(gradients), None if variables is None else list(variables))

    def _apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        gradients, variables = list(grads), None if trainable_variables is None else list(trainable_variables)
        if self._asked is None:
            if self.take is None:
                raise UnusableModel(
                    "the optimizer was used outside the loop of the run",
                    why="its gradients are to be summed over the members, step by step",
                    do="train with model.fit and shoal.Elastic, or iterate over shoal.batches",
                )
            self.take(gradients, variables)
            return
        if self._asked:
            raise UnusableModel(
                "train_step applies its optimizer twice",
                why="all that one step computes is summed over the members at once, when it is complete",
                do="add the losses, and apply their gradients once",
            )
        self._asked.append(ApplyCall(gradients, variables))


def only(kept: list[ApplyCall]) -> ApplyCall:
    """The one thing that a train step asked of its optimizer."""
    if not kept:
        raise UnusableModel(
            "train_step does not apply its optimizer",
            why="without gradients there is nothing to sum",
            do="call self.optimizer.apply_gradients in train_step",
        )
    return kept[0]
