"""Emulated machines in threads of one process, for tests that look at single steps."""

from __future__ import annotations

import pytest
import torch

from shoal.testing.emulated_speeds import emulated, machines
from shoal.testing.threaded_world import FixedWorldSession, together
from shoal.torch.run import Run

pytestmark = pytest.mark.process

Result = tuple[list[tuple[int, float]], dict[str, torch.Tensor]]


def body(session: FixedWorldSession) -> Result:
    """Train twelve steps of a small model; return samples and seconds of each, and the parameters."""
    run = Run(session, "test", "unused")
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(96, 8, generator=generator, dtype=torch.float64)
    model = torch.nn.Linear(8, 1).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    optimizer = torch.optim.SGD(model.parameters(), 0.02)
    run.attach(model, optimizer)
    took: list[tuple[int, float]] = []
    for (batch,) in run.batches(torch.utils.data.TensorDataset(x), size=16, epochs=2, shares="fixed:5,3", micro=4):
        run.backward((model(batch) - 1).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        step = run._trainer.current
        assert step is not None
        if step.on_last_micro_batch:
            took.append((step.samples, step.data_s + step.compute_s))
    return took, {name: value.detach().clone() for name, value in model.state_dict().items()}


def test_each_thread_emulates_its_own_machine_and_learns_the_same() -> None:
    torch.set_num_threads(1)
    plain = together(2, body)
    slowed = together(2, emulated(body, machines(1, "1:0.25@6", sample_s=0.002)))
    for rank, (took, parameters) in enumerate(slowed):
        assert [samples for samples, _ in took] == [(10, 6)[rank]] * 12
        for step, (samples, took_s) in enumerate(took):
            assert took_s > 0.9 * 0.002 * samples * (4 if rank == 1 and step >= 6 else 1)
        assert all(torch.equal(parameters[name], plain[rank][1][name]) for name in parameters)
    (fast, _), (slow, _) = slowed
    assert min(s for _, s in fast[6:]) < min(s for _, s in slow[6:]) / 1.5
