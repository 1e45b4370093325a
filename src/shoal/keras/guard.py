"""An optimizer whose `apply` asks the run first; in everything else it stays what it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from shoal.errors import UnusableModel


class Asked(NamedTuple):
    """What an optimizer was asked to apply."""

    gradients: list[Any]
    variables: list[Any] | None


class Guard:
    """Keeps the gradients that a train step hands to its optimizer, instead of letting them be applied at once."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self._real: Callable[..., Any] = optimizer.apply
        self._asked: list[Asked] | None = None
        # On the instance, so that the class, its name and its configuration stay as they are.
        object.__setattr__(optimizer, "apply", self._apply)

    def release(self) -> None:
        """Let the optimizer be as it was."""
        if self.optimizer.__dict__.get("apply") == self._apply:
            object.__delattr__(self.optimizer, "apply")

    @contextmanager
    def keeping(self) -> Any:
        """Inside, what the optimizer is asked for is kept; gives the one thing that it was asked for."""
        kept: list[Asked] = []
        self._asked = kept
        try:
            yield kept
        finally:
            self._asked = None

    def apply(self, gradients: Sequence[Any], variables: Sequence[Any] | None) -> None:
        """Really apply them."""
        self._real(list(gradients), None if variables is None else list(variables))

    def _apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        if self._asked is None:
            raise UnusableModel(
                "the optimizer was used outside model.fit",
                why="it belongs to a run that shoal.keras.Elastic trains",
                do="train with model.fit, or call optimizer.apply before the run begins",
            )
        if self._asked:
            raise UnusableModel(
                "train_step applies its optimizer twice",
                why="all that one step computes is summed over the members at once, when it is complete",
                do="add the losses, and apply their gradients once",
            )
        self._asked.append(Asked(list(grads), None if trainable_variables is None else list(trainable_variables)))
