"""The gradients of the pieces of a step, out of the script's reach until all of them are there."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class MicroBatchSums:
    """What the pieces so far have added up to; around each backward pass it is lent to the parameters.

    Between pieces they have no gradient: what a script does to gradients after each backward pass, such as clipping
    or zeroing them, it does to those of the whole step.
    """

    def __init__(self) -> None:
        self._sums: dict[torch.nn.Parameter, torch.Tensor] = {}

    def begin(self) -> None:
        """A step begins, or begins anew."""
        self._sums.clear()

    def lend(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Let the next backward pass add to the sums; gradients that are left over from steps before do not count."""
        for parameter in parameters:
            parameter.grad = self._sums.pop(parameter, None)

    def take_back(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter.grad is not None:
                self._sums[parameter] = parameter.grad
                parameter.grad = None
