from __future__ import annotations

from typing import Any

import torch

from shoal.core.state_check import PROBES
from shoal.torch.state.digests import tensor_digests


def parts_of(model: torch.nn.Module) -> tuple[dict[str, Any], torch.optim.Optimizer]:
    optimizer = torch.optim.Adam(model[0].parameters(), lr=0.1)  # type: ignore[index]
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer1": optimizer, "noise": object()}, optimizer


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))


def test_parameters_buffers_and_optimizer_state_are_digested_in_order() -> None:
    parts, optimizer = parts_of(net())
    digests = list(tensor_digests(parts, [optimizer]))
    names = [(d.kind, d.name) for d in digests]
    assert names[0] == ("parameter", "0.weight")
    assert ("buffer", "1.running_mean") in names
    assert ("optimizer", "optimizer1 exp_avg of 0.weight") in names
    assert not any("num_batches_tracked" in name for _, name in names)
    assert list(tensor_digests(parts, ())) == [d for d in digests if d.kind != "optimizer"]


def test_only_the_changed_tensor_has_another_hash() -> None:
    parts, optimizer = parts_of(net())
    before = list(tensor_digests(parts, [optimizer]))
    optimizer.state[parts["model"][0].bias]["exp_avg_sq"][2] += 1e-6
    after = list(tensor_digests(parts, [optimizer]))
    changed = [new.name for old, new in zip(before, after, strict=True) if old.hash != new.hash]
    assert changed == ["optimizer1 exp_avg_sq of 0.bias"]


def test_parameter_of_no_attached_optimizer_has_a_hint() -> None:
    parts, optimizer = parts_of(net())
    hints = {d.name: d.hint for d in tensor_digests(parts, [optimizer])}
    assert "not attached" in hints["2.weight"]
    assert not hints["0.weight"]


def test_tensors_of_any_type_and_layout_are_digested() -> None:
    model = torch.nn.Module()
    model.short = torch.nn.Parameter(torch.ones(3, 2, dtype=torch.bfloat16).t())
    model.wave = torch.nn.Parameter(torch.full((40,), 1 + 1j))
    model.register_buffer("empty", torch.zeros(0))
    model.register_buffer("count", torch.tensor(7))
    digests = {d.name: d for d in tensor_digests({"model": model}, ())}
    assert digests["short"].probes == (1.0,) * 6
    assert len(digests["wave"].probes) == PROBES
    assert digests["empty"].probes == ()
    assert digests["count"].probes == (7.0,)
