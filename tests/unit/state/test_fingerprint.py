"""Members that cannot train together have different fingerprints, and the error can say what differs."""

from __future__ import annotations

import pytest
import torch

from shoal.torch.state.fingerprint import describe, describe_difference, fingerprint, fingerprint_of, what_differs

DATA = {"samples": 1000, "size": 32, "epochs": 2, "seed": 0}


def net(width: int = 4) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.BatchNorm1d(width))


def described(model: torch.nn.Module | None = None, optimizer=torch.optim.Adam, **extra: int) -> str:
    model = model or net()
    return describe(model, optimizer(model.parameters()), DATA | extra)


def frozen() -> torch.nn.Module:
    model = net()
    model[0].bias.requires_grad_(False)
    return model


def test_the_same_model_has_the_same_fingerprint_whatever_its_values():
    one, other = net(), net()
    assert fingerprint(one, torch.optim.Adam(one.parameters()), DATA) == fingerprint(
        other, torch.optim.Adam(other.parameters(), lr=0.5), dict(reversed(DATA.items()))
    )


def test_a_fingerprint_is_that_of_its_description():
    model = net()
    assert fingerprint(model, None, DATA) == fingerprint_of(describe(model, None, DATA))


@pytest.mark.parametrize(
    ("other", "kind", "sentence"),
    [
        (described(net(5)), "the parameters", "parameter 0.weight is float32 4x3 here, but float32 5x3 there"),
        (described(net().double()), "the parameters", "parameter 0.weight is float32 4x3 here, but float64 4x3 there"),
        (described(frozen()), "the parameters", "parameter 0.bias is float32 4 here, but float32 4 frozen there"),
        (described(optimizer=torch.optim.AdamW), "the optimizer", "optimizer class is Adam here, but AdamW there"),
        (described(size=64), "the data and settings", "setting size is 32 here, but 64 there"),
        (described(net()[0]), "the parameters", "where there is parameter weight float32 4x3 there"),
    ],
)
def test_a_difference_is_named(other, kind, sentence):
    mine = described()
    assert fingerprint_of(mine) != fingerprint_of(other)
    assert kind in what_differs(fingerprint_of(mine), fingerprint_of(other))
    assert sentence in describe_difference(mine, other)


def test_parameters_in_other_groups_are_another_optimizer():
    model = net()
    one = torch.optim.SGD(model.parameters())
    two = torch.optim.SGD([{"params": list(model[0].parameters())}, {"params": list(model[1].parameters())}])
    assert what_differs(fingerprint(model, one, {}), fingerprint(model, two, {})) == "the optimizer"


def test_nothing_differs_between_equals():
    assert describe_difference(described(), described()) == ""
    assert what_differs(fingerprint_of(described()), fingerprint_of(described())) == ""


def test_fingerprints_of_unknown_form_differ_in_something():
    assert what_differs("a", "b") == "the parameters"
    assert what_differs("", "x-y") != ""
