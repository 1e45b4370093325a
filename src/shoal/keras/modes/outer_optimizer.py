"""Outer optimizer of local SGD with Keras, in NumPy; `shoal.torch.modes.outer_optimizer` explains the method."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.worker.collectives.flat_buffers import ArraySpec

Read = Callable[[Any], NDArray[Any]]


class Velocity:
    """Outer momentum of one variable; it has the interface of a variable, and is transferred as one."""

    def __init__(self, path: str, like: ArraySpec) -> None:
        self.path, self.shape, self.dtype = path, like.shape, like.dtype
        self.value = np.zeros(like.shape, like.dtype)

    def assign(self, value: NDArray[Any]) -> None:
        np.copyto(self.value, value)


class KerasOuterOptimizer:
    """SGD with Nesterov momentum on the averaged changes of a round; the momentum is the same on all members."""

    def __init__(self, lr: float, momentum: float, variables: Sequence[Any]) -> None:
        self._lr, self._momentum = lr, momentum
        self.velocities = [Velocity(v.path, ArraySpec(v.shape, str(v.dtype))) for v in variables] if momentum else []

    def step(self, changes: Sequence[NDArray[Any]], start: Sequence[NDArray[Any]]) -> Iterator[NDArray[Any]]:
        """Yield the new value of each variable, computed from its `start`; `changes` are overwritten."""
        for number, (change, value) in enumerate(zip(changes, start, strict=True)):
            scalar = change.dtype.type
            if self._momentum:
                velocity = self.velocities[number].value
                velocity *= scalar(self._momentum)
                velocity += change
                change += scalar(self._momentum) * velocity
            if self._lr != 1.0:
                change *= scalar(self._lr)
            change += value
            yield change.astype(value.dtype, copy=False)


class KerasRoundStart:
    """Copies of variables as they were at the start of a round, so that an uncommitted round can be undone."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._variables: list[Any] = []
        self.values: list[NDArray[Any]] = []

    def record(self, variables: Sequence[Any]) -> None:
        """Copy the variables' current values, into the memory of the previous round if it fits."""
        previous = self.values if len(self.values) == len(variables) else [None] * len(variables)
        self._variables = list(variables)
        self.values = [_copied(self._read(v), into) for v, into in zip(variables, previous, strict=True)]

    def restore(self) -> None:
        """Assign the recorded values."""
        for variable, value in zip(self._variables, self.values, strict=True):
            variable.assign(value)


def _copied(value: NDArray[Any], into: NDArray[Any] | None) -> NDArray[Any]:
    if into is None or into.shape != value.shape or into.dtype != value.dtype:
        return np.array(value)
    np.copyto(into, value)
    return into
