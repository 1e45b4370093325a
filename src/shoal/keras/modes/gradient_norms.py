"""Squared norms of gradients, local and summed, from which the gradient noise is estimated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

# A parameter's expected gradient is at least this part of the mean over its tensor (see
# shoal.torch.gradients.gradient_norms).
DAMPING = 0.1


class KerasGradientNorms:
    """Squared norms of one step in the optimizer's own metric: each gradient is divided by its expected size."""

    def __init__(self, expected: Sequence[NDArray[Any] | None]) -> None:
        self._expected = [
            None if sizes is None else sizes + max(DAMPING * float(sizes.mean()), 1e-30) for sizes in expected
        ]
        self._half: list[NDArray[Any]] = []
        self._half_weight = 0.0
        self._half_norm = self._rest_norm = 0.0
        self.total = 0.0

    def record_first_half(self, gradients: Sequence[NDArray[Any]], weight: float) -> None:
        """Make the gradients accumulated so far a group of their own, of this weight."""
        self._half, self._half_weight = [gradient.copy() for gradient in gradients], weight
        self._half_norm = self._squared_norm(gradients)

    def record_local(self, gradients: Sequence[NDArray[Any]]) -> None:
        """Record this member's gradients, just before they are summed."""
        rest = [whole - half for whole, half in zip(gradients, self._half, strict=True)] if self._half else gradients
        self._rest_norm = self._squared_norm(rest)
        self._half = []

    def record_total(self, gradients: Sequence[NDArray[Any]]) -> None:
        """Record the gradients of the whole global batch."""
        self.total = self._squared_norm(gradients)

    def weighted(self, weight: float, global_batch_size: float) -> tuple[float, int]:
        """Return as `GradientNorms.weighted` does; gradients were recorded times weight / global_batch_size."""
        rest = weight - self._half_weight
        if weight <= 0 or (self._half_weight and rest <= 0):
            return 0.0, 0
        weighted = self._rest_norm * global_batch_size**2 / rest
        if not self._half_weight:
            return weighted, 1
        return weighted + self._half_norm * global_batch_size**2 / self._half_weight, 2

    def _squared_norm(self, gradients: Sequence[NDArray[Any]]) -> float:
        total = 0.0
        for gradient, sizes in zip(gradients, self._expected, strict=True):
            flat = (gradient if sizes is None else gradient / sizes).reshape(-1)
            total += float(np.dot(flat, flat))
        return total


def expected_sizes(optimizer: Any, read: Any, indices: Sequence[int]) -> list[NDArray[Any] | None] | None:
    """Return the size of each gradient that an adaptive optimizer expects; None before its first step.

    The elements are None for optimizers that do not adapt.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    steps = int(read(inner._iterations))
    squares = getattr(inner, "_velocities", None) or getattr(inner, "_accumulators", None)
    if squares is None:
        return [None] * len(indices)
    if not steps:
        return None
    decay = float(getattr(inner, "beta_2", 0.0))
    unbias = 1.0 - decay**steps if decay else 1.0
    return [None if squares[index] is None else np.sqrt(read(squares[index]) / unbias) for index in indices]
