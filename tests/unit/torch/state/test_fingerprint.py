"""Members that cannot train together have different fingerprints, and the difference can be named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from shoal.core.membership.fingerprint import describe, differences
from shoal.torch.state.fingerprint import LISTED_CHARACTERS, fingerprint


def difference(in_run: str, on_member: str, name: str) -> str:
    return describe(differences(in_run, on_member), name)


DATA = {"samples": 1000, "size": 32, "epochs": 2, "seed": 0}


def net(width: int = 4) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.BatchNorm1d(width))


def print_of(model: torch.nn.Module | None = None, optimizer: Any = torch.optim.Adam, **settings: int) -> str:
    model = model or net()
    return fingerprint(model, [optimizer(model.parameters())], DATA | settings)


def frozen() -> torch.nn.Module:
    model = net()
    model[0].bias.requires_grad_(False)
    return model


def test_fingerprint_ignores_values_and_learning_rates() -> None:
    model, other = net(), net()
    optimizers = torch.optim.Adam(model.parameters()), torch.optim.Adam(other.parameters(), lr=0.5)
    assert fingerprint(model, optimizers[:1], DATA) == fingerprint(other, optimizers[1:], DATA)


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (lambda: print_of(net(5)), "parameters: 0.weight float32 4x3 in the run, 0.weight float32 5x3 on local/1"),
        (lambda: print_of(net().double()), "0.weight float32 4x3 in the run, 0.weight float64 4x3 on local/1"),
        (lambda: print_of(frozen()), "parameters: 0.bias float32 4 in the run, 0.bias float32 4 frozen on local/1"),
        (lambda: print_of(optimizer=torch.optim.AdamW), "optimizer: Adam in the run, AdamW on local/1"),
        (lambda: print_of(size=64), "size: 32 in the run, 64 on local/1"),
        (lambda: print_of(net()[0]), "0.weight float32 4x3 in the run, weight float32 4x3 on local/1"),
        (lambda: print_of(net()[:1]), "parameters: 1.weight float32 4 in the run, nothing on local/1"),
    ],
)
def test_first_difference_of_each_section_is_named(other: Callable[[], str], why: str) -> None:
    assert why in difference(print_of(), other(), "local/1")


def test_parameters_in_other_groups_are_another_optimizer() -> None:
    model = net()
    whole = torch.optim.SGD(model.parameters())
    split = torch.optim.SGD([{"params": list(model[0].parameters())}, {"params": list(model[1].parameters())}])
    why = difference(fingerprint(model, [whole], {}), fingerprint(model, [split], {}), "local/1")
    assert why.startswith("optimizer: group-0 parameters 0,1,2,3 with ")


def test_every_attached_optimizer_is_part_of_the_fingerprint() -> None:
    model = net()
    first = torch.optim.SGD(model[0].parameters())
    ours = fingerprint(model, [first, torch.optim.Adam(model[1].parameters())], {})
    other_kind = fingerprint(model, [first, torch.optim.AdamW(model[1].parameters())], {})
    other_parameters = fingerprint(model, [first, torch.optim.Adam(model[0].parameters())], {})
    assert difference(ours, other_kind, "local/1") == "optimizer: Adam in the run, AdamW on local/1"
    assert "group-0 parameters 2,3 with " in difference(ours, other_parameters, "local/1")
    assert difference(ours, fingerprint(model, [first], {}), "m") == "optimizer: Adam in the run, nothing on m"


def test_fingerprint_of_a_large_model_is_short_and_differs_by_its_hash() -> None:
    def deep(width: int) -> torch.nn.Module:
        return torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(200)), torch.nn.Linear(3, width))

    model, other = print_of(deep(2)), print_of(deep(3))
    assert len(model) < 2 * LISTED_CHARACTERS
    assert "parameters: 402 tensors of 2408 elements SHA-256 " in difference(model, other, "local/1")


def test_separator_in_a_parameter_name_does_not_break_the_fingerprint() -> None:
    model = torch.nn.Module()
    model.register_parameter("a;b=c", torch.nn.Parameter(torch.zeros(2)))
    why = difference(print_of(), print_of(model), "local/1")
    assert "0.weight float32 4x3 in the run, a,b=c float32 2 on local/1" in why
