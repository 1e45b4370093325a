"""A forward pass that runs out of memory returns a stand-in of the right shape."""

from __future__ import annotations

import pytest
import torch

from shoal.torch.gradients.oom_retry import guard_model, is_out_of_memory


class Handler:
    """Handler that records the errors of a micro-batch of eight samples."""

    micro_batch_samples = 8

    def __init__(self) -> None:
        self.errors: list[BaseException] = []

    def on_out_of_memory(self, error: BaseException) -> None:
        self.errors.append(error)


class Small(torch.nn.Linear):
    """Layer that has memory for two samples at once."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if len(input) > 2:
            raise torch.OutOfMemoryError("no memory")
        return super().forward(input)


def test_stand_in_has_the_shape_of_the_whole_micro_batch_and_a_gradient() -> None:
    model, handler = Small(3, 2), Handler()
    guard_model(handler, model)
    output = model(torch.ones(8, 3))
    assert output.shape == (8, 2)
    assert output.requires_grad
    assert len(handler.errors) == 1


def test_evaluation_raises_as_without_shoal() -> None:
    model, handler = Small(3, 2), Handler()
    guard_model(handler, model)
    with torch.no_grad(), pytest.raises(torch.OutOfMemoryError):
        model(torch.ones(8, 3))
    assert not handler.errors


def test_other_errors_are_not_out_of_memory() -> None:
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("shapes do not match"))
