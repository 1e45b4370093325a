"""Gradients of micro-batches are summed out of the script's reach."""

from __future__ import annotations

import torch

from shoal.torch.gradients.micro_batch_sums import MicroBatchSums


def test_backward_passes_add_up_though_the_script_sees_no_gradient_in_between() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    sums = MicroBatchSums()
    for _ in range(3):
        sums.put_into([parameter])
        parameter.sum().backward()
        sums.take_from([parameter])
        assert parameter.grad is None
    sums.put_into([parameter])
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [3.0, 3.0]


def test_put_into_drops_gradients_of_earlier_steps() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.sum().backward()
    MicroBatchSums().put_into([parameter])
    assert parameter.grad is None


def test_clear_drops_the_sums() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    sums = MicroBatchSums()
    parameter.sum().backward()
    sums.take_from([parameter])
    sums.clear()
    sums.put_into([parameter])
    assert parameter.grad is None
