"""Gradients of a step's micro-batches, kept out of the script's reach until all of them are summed."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class MicroBatchSums:
    """Sums of the gradients of a step's micro-batches so far.

    Around each backward pass the sums are the parameters' `.grad`, so that autograd adds to them. In between, `.grad`
    is None: what a script does to gradients after each backward pass, such as clipping or zeroing them, must happen
    to the gradients of the whole step only.
    """

    def __init__(self) -> None:
        self._sums: dict[torch.nn.Parameter, torch.Tensor] = {}

    def clear(self) -> None:
        """Drop all sums, at the start of a step or before it is repeated."""
        self._sums.clear()

    def put_into(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Set `.grad` to the sums, so that the next backward pass adds to them; older gradients are dropped."""
        for parameter in parameters:
            parameter.grad = self._sums.pop(parameter, None)

    def take_from(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Take the sums out of `.grad` again."""
        for parameter in parameters:
            if parameter.grad is not None:
                self._sums[parameter] = parameter.grad
                parameter.grad = None
