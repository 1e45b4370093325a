"""Squared norms of gradients, own and summed, from which the gradient noise is learned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

# A parameter is expected to have at least this part of its tensor's usual gradient (see
# shoal.torch.gradients.gradient_norms).
DAMPING = 0.1


class KerasGradientNorms:
    """The squared norms of one step in the optimizer's own metric: `usual` are the gradients that it expects."""

    def __init__(self, usual: Sequence[NDArray[Any] | None]) -> None:
        self._usual = [None if one is None else one + max(DAMPING * float(one.mean()), 1e-30) for one in usual]
        self._half: list[NDArray[Any]] = []
        self._half_weight = 0.0
        self._first = self._own = 0.0
        self.total = 0.0

    def halve(self, gradients: Sequence[NDArray[Any]], weight: float) -> None:
        """What has been accumulated so far, of this weight, is a group of its own."""
        self._half, self._half_weight = [one.copy() for one in gradients], weight
        self._first = self._squared(gradients)

    def own(self, gradients: Sequence[NDArray[Any]]) -> None:
        """Our gradients, as they are about to be summed."""
        rest = [a - b for a, b in zip(gradients, self._half, strict=True)] if self._half else gradients
        self._own = self._squared(rest)
        self._half = []

    def everybody(self, gradients: Sequence[NDArray[Any]]) -> None:
        """Those of the whole global batch."""
        self.total = self._squared(gradients)

    def weighted(self, weight: float, nominal: float) -> tuple[float, int]:
        """See `shoal.worker.training.step.GradientNorms`; gradients come multiplied by weight / nominal, as they are
        summed.
        """
        rest = weight - self._half_weight
        if weight <= 0 or (self._half_weight and rest <= 0):
            return 0.0, 0
        found = self._own * nominal**2 / rest
        if not self._half_weight:
            return found, 1
        return found + self._first * nominal**2 / self._half_weight, 2

    def _squared(self, gradients: Sequence[NDArray[Any]]) -> float:
        found = 0.0
        for one, usual in zip(gradients, self._usual, strict=True):
            flat = (one if usual is None else one / usual).reshape(-1)
            found += float(np.dot(flat, flat))
        return found


def expected(optimizer: Any, read: Any, places: Sequence[int]) -> list[NDArray[Any] | None] | None:
    """The usual size of each gradient by what an adaptive optimizer has seen of it; None before its first step."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    steps = int(read(inner._iterations))
    held = getattr(inner, "_velocities", None) or getattr(inner, "_accumulators", None)
    if held is None:
        return [None] * len(places)
    if not steps:
        return None
    decay = float(getattr(inner, "beta_2", 0.0))
    unbias = 1.0 - decay**steps if decay else 1.0
    return [None if held[place] is None else np.sqrt(read(held[place]) / unbias) for place in places]
