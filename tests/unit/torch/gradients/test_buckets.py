"""Buckets exchange gradients in a fixed order and hand them out as views."""

from __future__ import annotations

import pytest
import torch

from shoal.errors import UnusableBackward
from shoal.torch.gradients.buckets import Buckets, operand
from shoal.worker.session.standalone import StandaloneSession


def armed(model: torch.nn.Module) -> Buckets:
    buckets = Buckets(list(model.parameters()), statistics=0)
    buckets.arm(StandaloneSession().exchange)
    return buckets


def test_gradients_become_views_of_the_buckets_divided_by_the_weight() -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    buckets = armed(model)
    model(torch.tensor([[2.0, 4.0]])).sum().backward()
    buckets.finish(2.0, empty=False)
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[1.0, 2.0]]
    assert not buckets.has_foreign_gradients


def test_parameter_that_no_member_used_has_no_gradient() -> None:
    model = torch.nn.ModuleDict({"used": torch.nn.Linear(1, 1), "unused": torch.nn.Linear(1, 1)})
    buckets = armed(model)
    model["used"](torch.ones(1, 1)).sum().backward()
    buckets.finish(1.0, empty=False)
    assert model["used"].weight.grad is not None
    assert model["unused"].weight.grad is None


def test_gradients_of_an_empty_share_count_as_zero() -> None:
    model = torch.nn.Linear(2, 1)
    buckets = armed(model)
    model(torch.ones(1, 2)).sum().backward()
    buckets.finish(1.0, empty=True)
    assert model.weight.grad is None


def test_gradient_that_completes_twice_is_refused() -> None:
    model = torch.nn.Linear(2, 1)
    armed(model)
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(UnusableBackward, match="completed twice"):
        model(torch.ones(1, 2)).sum().backward()


def test_gradients_of_the_script_are_refused() -> None:
    model = torch.nn.Linear(2, 1)
    buckets = Buckets(list(model.parameters()), statistics=0)
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(UnusableBackward, match=r"gradients before run\.backward"):
        buckets.refuse_foreign_gradients()


def test_buckets_fit_the_trained_parameters_only() -> None:
    model = torch.nn.Linear(2, 1)
    buckets = Buckets(list(model.parameters()), statistics=0)
    assert buckets.fits(list(model.parameters()))
    model.bias.requires_grad_(False)
    assert not buckets.fits(list(model.parameters()))


def test_bfloat16_is_added_in_its_own_type() -> None:
    flat, more = torch.tensor([1.5], dtype=torch.bfloat16), torch.tensor([0.25], dtype=torch.bfloat16)
    array, add = operand(flat)
    assert add is not None
    add(array, operand(more)[0])
    assert flat.item() == 1.75
