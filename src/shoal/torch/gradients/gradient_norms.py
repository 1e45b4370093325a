"""Squared norms of gradients, own and summed, from which the gradient noise is learned.

They are taken in the optimizer's own metric: an adaptive optimizer divides each gradient by what it expects of it, and
only the noise that is left afterwards matters to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

# Where optimizers keep the mean or the sum of squared gradients.
ADAPTIVE = ("exp_avg_sq", "square_avg", "sum")
# A parameter is expected to have at least this part of its tensor's usual gradient: of one that was hardly ever used
# the optimizer expects next to nothing, and a quotient would drown all others.
DAMPING = 0.1


class TorchGradientNorms:
    """Adds up the squared norms of one step: of each group of samples here, and of the whole global batch.

    The groups are the share of this member, or, if it has the whole batch to itself, the two halves of its pieces.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = list(optimizers)
        self._half: dict[torch.nn.Parameter, torch.Tensor] = {}
        self._half_weight = 0.0
        self._own: list[torch.Tensor] = []
        self._first: list[torch.Tensor] = []
        self._total: list[torch.Tensor] = []

    @property
    def ready(self) -> bool:
        """Whether there is anything to measure with: an adaptive optimizer needs a step to know its metric."""
        return all(optimizer.state for optimizer in self._optimizers if _adapts(optimizer))

    def halve(self, parameters: Iterable[torch.nn.Parameter], weight: float) -> None:
        """What has been accumulated so far, of this weight, is a group of its own."""
        self._half = {p: p.grad.detach().clone() for p in parameters if p.grad is not None and not p.grad.is_sparse}
        self._half_weight = weight

    def own(self, parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
        """A gradient of ours that is about to be summed."""
        if self._half_weight:
            half = self._half.pop(parameter, None)
            if half is not None:
                self._first.append(self._square(parameter, half))
                gradient = gradient - half
        self._own.append(self._square(parameter, gradient))

    def everybody(self, parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
        """The same gradient, of the whole global batch."""
        self._total.append(self._square(parameter, gradient))

    def weighted(self, weight: float, nominal: float) -> tuple[float, int]:
        """The sum over groups of weight times squared mean gradient, and the number of groups.

        Gradients come multiplied by weight / nominal, as they are summed.
        """
        rest = weight - self._half_weight
        if weight <= 0 or (self._half_weight and rest <= 0):
            return 0.0, 0
        found = _sum(self._own) * nominal**2 / rest
        if not self._half_weight:
            return found, 1
        return found + _sum(self._first) * nominal**2 / self._half_weight, 2

    @property
    def total(self) -> float:
        return _sum(self._total)

    def _square(self, parameter: torch.nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
        expected = self._expected(parameter)
        if gradient.is_complex():
            gradient = torch.view_as_real(gradient)
            expected = None if expected is None else torch.view_as_real(expected)
        if expected is None:
            flat = gradient.reshape(-1)
            return torch.dot(flat, flat)
        usual = expected.sqrt()
        usual = usual + (DAMPING * usual.mean()).clamp_min(torch.finfo(usual.dtype).tiny)
        return (gradient / usual).square_().sum()

    def _expected(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        """What the optimizer expects of the square of each gradient, without the bias of its start."""
        for optimizer in self._optimizers:
            state: dict[str, Any] = optimizer.state.get(parameter, {})
            for name in ADAPTIVE:
                if isinstance(state.get(name), torch.Tensor):
                    found: torch.Tensor = state[name]
                    decay = float(optimizer.defaults.get("betas", (0.0, 0.0))[-1])
                    steps = float(state.get("step", 0))
                    return found / (1.0 - decay**steps) if name == "exp_avg_sq" and decay and steps else found
        return None


def _adapts(optimizer: torch.optim.Optimizer) -> bool:
    name = type(optimizer).__name__.lower()
    return any(word in name for word in ("ada", "rms", "prop"))


def _sum(squares: list[torch.Tensor]) -> float:
    return float(torch.stack([square.double() for square in squares]).sum()) if squares else 0.0
