"""Learning rates are scaled for one step only."""

from __future__ import annotations

import torch

from shoal.torch.modes.lr_scaling import ScaledLearningRate


def test_learning_rates_are_scaled_inside_and_restored_after() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    with ScaledLearningRate(optimizer, 2.0):
        assert optimizer.param_groups[0]["lr"] == 1.0
    assert optimizer.param_groups[0]["lr"] == 0.5
