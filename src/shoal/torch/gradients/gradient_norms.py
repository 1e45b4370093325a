"""Squared norms of gradients, of single shares and of the whole batch, from which the gradient noise is estimated.

The mean gradient of b samples has an expected squared norm of |G|² + tr(S)/b: the signal plus noise that shrinks with
the batch. Measured at two batch sizes, a share and the whole batch, both terms follow (`core.batch.gradient_noise`).

Norms are taken in the optimizer's own metric. An adaptive optimizer (Adam, RMSprop, Adagrad) divides each gradient by
a running estimate of its size, so only noise relative to that size slows the training down.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

# Keys under which optimizers keep the mean or the sum of squared gradients.
ADAPTIVE = ("exp_avg_sq", "square_avg", "sum")
# Lower bound of an element's expected gradient, as a fraction of its tensor's mean. The estimate of a rarely used
# element is almost zero, and dividing by it would drown all others.
DAMPING = 0.1


class TorchGradientNorms:
    """Squared norms of one step's gradients: of each local group of samples, and of the whole global batch.

    This member's share is one group. If the member has the whole batch to itself, the first and the second half of its
    micro-batches are a group each.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = list(optimizers)
        self._half: dict[torch.nn.Parameter, torch.Tensor] = {}
        self._half_weight = 0.0
        self._local: list[torch.Tensor] = []
        self._first_half: list[torch.Tensor] = []
        self._total: list[torch.Tensor] = []

    @property
    def ready(self) -> bool:
        """Whether norms can be measured: an adaptive optimizer knows its metric only after a step."""
        return all(optimizer.state for optimizer in self._optimizers if _is_adaptive(optimizer))

    def split_halves(self, parameters: Iterable[torch.nn.Parameter], weight: float) -> None:
        """Make a group of the gradients accumulated so far; `weight` is their total weight."""
        self._half = {p: p.grad.detach().clone() for p in parameters if p.grad is not None and not p.grad.is_sparse}
        self._half_weight = weight

    def add_local(self, parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
        """Add this member's gradient of one parameter, before it is summed over members."""
        if self._half_weight:
            half = self._half.pop(parameter, None)
            if half is not None:
                self._first_half.append(self._squared_norm(parameter, half))
                gradient = gradient - half
        self._local.append(self._squared_norm(parameter, gradient))

    def add_global(self, parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
        """Add the gradient of one parameter over the whole global batch."""
        self._total.append(self._squared_norm(parameter, gradient))

    def weighted(self, weight: float, global_batch_size: float) -> tuple[float, int]:
        """Return the sum over groups of weight times squared mean gradient, and the number of groups.

        The gradients that were added are mean gradients times weight / global_batch_size, as they are exchanged.
        """
        rest = weight - self._half_weight
        if weight <= 0 or (self._half_weight and rest <= 0):
            return 0.0, 0
        norm = _sum(self._local) * global_batch_size**2 / rest
        if not self._half_weight:
            return norm, 1
        return norm + _sum(self._first_half) * global_batch_size**2 / self._half_weight, 2

    @property
    def total(self) -> float:
        """Squared norm of the gradient of the whole global batch."""
        return _sum(self._total)

    def _squared_norm(self, parameter: torch.nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
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
        """Return the optimizer's estimate of each squared gradient, bias corrected; None if it keeps none."""
        for optimizer in self._optimizers:
            state: dict[str, Any] = optimizer.state.get(parameter, {})
            for name in ADAPTIVE:
                if isinstance(state.get(name), torch.Tensor):
                    estimate: torch.Tensor = state[name]
                    decay = float(optimizer.defaults.get("betas", (0.0, 0.0))[-1])
                    steps = float(state.get("step", 0))
                    biased = name == "exp_avg_sq" and decay and steps
                    return estimate / (1.0 - decay**steps) if biased else estimate
        return None


def _is_adaptive(optimizer: torch.optim.Optimizer) -> bool:
    name = type(optimizer).__name__.lower()
    return any(word in name for word in ("ada", "rms", "prop"))


def _sum(norms: list[torch.Tensor]) -> float:
    return float(torch.stack([norm.double() for norm in norms]).sum()) if norms else 0.0
