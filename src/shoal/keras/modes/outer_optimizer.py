"""The outer step of local training with Keras, in NumPy: see `shoal.torch.modes.outer_optimizer`, which says what it
does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.worker.collectives.flat_buffers import ArraySpec

Read = Callable[[Any], NDArray[Any]]


class Velocity:
    """What the outer momentum holds of one variable; it is handed over as variables are."""

    def __init__(self, path: str, like: ArraySpec) -> None:
        self.path, self.shape, self.dtype = path, like.shape, like.dtype
        self.value = np.zeros(like.shape, like.dtype)

    def assign(self, value: NDArray[Any]) -> None:
        np.copyto(self.value, value)


class KerasOuterOptimizer:
    """The outer optimizer of these variables; all members hold the same momentum."""

    def __init__(self, lr: float, momentum: float, variables: Sequence[Any]) -> None:
        self._lr, self._momentum = lr, momentum
        self.velocities = [Velocity(v.path, ArraySpec(v.shape, str(v.dtype))) for v in variables] if momentum else []

    def step(self, changes: Sequence[NDArray[Any]], start: Sequence[NDArray[Any]]) -> Iterator[NDArray[Any]]:
        """The new value of each variable: where it started, plus the step; `changes` are used up."""
        for number, (change, value) in enumerate(zip(changes, start, strict=True)):
            kind = change.dtype.type
            if self._momentum:
                velocity = self.velocities[number].value
                velocity *= kind(self._momentum)
                velocity += change
                change += kind(self._momentum) * velocity
            if self._lr != 1.0:
                change *= kind(self._lr)
            change += value
            yield change.astype(value.dtype, copy=False)


class KerasRoundStart:
    """What variables held when a round began: copies, so that a round that does not commit leaves no trace."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._variables: list[Any] = []
        self.values: list[NDArray[Any]] = []

    def keep(self, variables: Sequence[Any]) -> None:
        """Remember them as they are now; memory of the round before is used again."""
        before = self.values if len(self.values) == len(variables) else [None] * len(variables)
        self._variables = list(variables)
        self.values = [_copied(self._read(v), into) for v, into in zip(variables, before, strict=True)]

    def put_back(self) -> None:
        """Make everything what it was."""
        for variable, value in zip(self._variables, self.values, strict=True):
            variable.assign(value)


def _copied(value: NDArray[Any], into: NDArray[Any] | None) -> NDArray[Any]:
    if into is None or into.shape != value.shape or into.dtype != value.dtype:
        return np.array(value)
    np.copyto(into, value)
    return into
