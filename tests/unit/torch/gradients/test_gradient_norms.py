"""Squared norms are weighted by group and taken in the optimizer's metric."""

from __future__ import annotations

import pytest
import torch

from shoal.torch.gradients.gradient_norms import TorchGradientNorms


def test_share_is_one_group_and_its_gradient_is_scaled_back_to_the_mean() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    norms = TorchGradientNorms([torch.optim.SGD([parameter])])
    # A mean gradient of (3, 4) over 2 of 8 samples is exchanged as (3, 4) * 2 / 8.
    norms.add_local(parameter, torch.tensor([0.75, 1.0]))
    norms.add_global(parameter, torch.tensor([0.0, 2.0]))
    assert norms.weighted(2.0, 8.0) == (pytest.approx(2 * 25), 1)
    assert norms.total == 4.0


def test_halves_of_a_whole_batch_are_two_groups() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    norms = TorchGradientNorms([torch.optim.SGD([parameter])])
    parameter.grad = torch.tensor([0.5])  # mean gradient 1 over 2 of 4 samples
    norms.split_halves([parameter], 2.0)
    norms.add_local(parameter, torch.tensor([2.0]))  # so the second half has a mean gradient of 3
    assert norms.weighted(4.0, 4.0) == (pytest.approx(2 * 1 + 2 * 9), 2)


def test_share_of_weight_zero_has_no_group() -> None:
    assert TorchGradientNorms([]).weighted(0.0, 8.0) == (0.0, 0)


def test_adaptive_optimizer_is_not_ready_before_its_first_step() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([parameter])
    assert not TorchGradientNorms([optimizer]).ready
    parameter.sum().backward()
    optimizer.step()
    norms = TorchGradientNorms([optimizer])
    assert norms.ready
    norms.add_global(parameter, torch.ones(3))
    # Every gradient was 1 so far: relative to that, plus damping of a tenth, each element counts 1 / 1.1².
    assert norms.total == pytest.approx(3 / 1.1**2, rel=1e-4)
