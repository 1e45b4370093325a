"""Learning rates under an automatic global batch: scaled for single steps, so that schedulers never see the factor."""

from __future__ import annotations

from typing import Any

import torch


class ScaledLearningRate:
    """Context in which an optimizer's learning rates are multiplied by `gain`."""

    def __init__(self, optimizer: torch.optim.Optimizer, gain: float) -> None:
        self._groups, self._gain = optimizer.param_groups, gain
        self._before: list[Any] = []

    def __enter__(self) -> None:
        self._before = [group["lr"] for group in self._groups]
        if self._gain != 1.0:
            for group in self._groups:
                group["lr"] = group["lr"] * self._gain

    def __exit__(self, *_: object) -> None:
        for group, before in zip(self._groups, self._before, strict=True):
            group["lr"] = before
