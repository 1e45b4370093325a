"""Running statistics are rolled back to the last commit."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from shoal.torch.gradients.running_stats import RunningStats  # noqa: E402


def test_roll_back_undoes_an_uncommitted_forward_pass() -> None:
    layer = torch.nn.BatchNorm1d(4)
    before = {key: value.clone() for key, value in layer.state_dict().items()}
    statistics = RunningStats(layer)
    layer(torch.randn(8, 4))
    statistics.roll_back()
    assert all(torch.equal(before[key], value) for key, value in layer.state_dict().items())


def test_roll_back_restores_the_last_saved_statistics() -> None:
    layer = torch.nn.BatchNorm1d(4)
    statistics = RunningStats(layer)
    layer(torch.randn(8, 4))
    statistics.save()
    committed = layer.running_mean.clone()
    layer(torch.randn(8, 4))
    statistics.roll_back()
    assert torch.equal(layer.running_mean, committed)
