from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from shoal.torch.gradients.running_stats import RunningStats  # noqa: E402


def test_a_forward_pass_that_did_not_commit_leaves_no_trace_in_running_statistics() -> None:
    layer = torch.nn.BatchNorm1d(4)
    before = {key: value.clone() for key, value in layer.state_dict().items()}
    statistics = RunningStats(layer)
    layer(torch.randn(8, 4))
    statistics.put_back()
    assert all(torch.equal(before[key], value) for key, value in layer.state_dict().items())


def test_what_was_committed_is_what_a_later_step_goes_back_to() -> None:
    layer = torch.nn.BatchNorm1d(4)
    statistics = RunningStats(layer)
    layer(torch.randn(8, 4))
    statistics.keep()
    committed = layer.running_mean.clone()
    layer(torch.randn(8, 4))
    statistics.put_back()
    assert torch.equal(layer.running_mean, committed)
