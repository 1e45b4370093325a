"""The noise scale of a run is that of its gradients for any split of the batch."""

from __future__ import annotations

import pytest
import torch

from shoal.testing.threaded_world import together
from shoal.torch.run import Run

STEPS, BATCH, WIDTH = 240, 24, 40


def train(session, shares="equal", micro=None, optimizer=torch.optim.SGD):
    """Linear regression with a known truth, at a learning rate of 0: the gradient noise never changes."""
    session.settings = session.settings.__class__(**{**_fields(session.settings), "noise_every_steps": 1})
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(STEPS * BATCH, WIDTH, generator=generator)
    y = x @ torch.full((WIDTH,), 0.5) + 2.0 * torch.randn(len(x), generator=generator)
    model = torch.nn.Linear(WIDTH, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    run = Run(session, "noise", "")
    model, optimizer = run.attach(model, optimizer(model.parameters(), lr=0.0))
    data = torch.utils.data.TensorDataset(x, y)
    for a, b in run.batches(data, size=BATCH, epochs=1, shares=shares, micro=micro):
        run.backward(((model(a).squeeze(1) - b) ** 2).mean())
        optimizer.step()
        optimizer.zero_grad()
    noise = run._trainer.noise_sampler.noise
    return noise.variance, noise.signal


def _fields(settings):
    return {name: getattr(settings, name) for name in settings.__struct_fields__}


def truth():
    """Return variance and squared norm of the per-sample gradients of the same data, exactly."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(STEPS * BATCH, WIDTH, generator=generator).double()
    y = x @ torch.full((WIDTH,), 0.5).double() + 2.0 * torch.randn(len(x), generator=generator).double()
    each = -2.0 * y[:, None] * x
    mean = each.mean(0)
    return float(((each - mean) ** 2).sum(1).mean()), float((mean**2).sum())


@pytest.mark.parametrize("shares", ["equal", "fixed:17,4,3"])
def test_members_estimate_the_same_unbiased_noise(shares):
    estimates = together(3, lambda session: train(session, shares))
    assert len(set(estimates)) == 1
    variance, signal = truth()
    assert estimates[0][0] == pytest.approx(variance, rel=0.1)
    assert estimates[0][1] == pytest.approx(signal, rel=0.2)


def test_single_member_compares_the_halves_of_its_batch():
    (estimates,) = together(1, lambda session: train(session, micro=8))
    variance, signal = truth()
    assert estimates[0] == pytest.approx(variance, rel=0.2)
    assert estimates[1] == pytest.approx(signal, rel=0.3)


def test_an_adaptive_optimizer_is_measured_in_its_own_metric():
    estimates = together(2, lambda session: train(session, optimizer=torch.optim.Adam))
    assert len(set(estimates)) == 1
    variance, signal = estimates[0]
    # Each of the WIDTH preconditioned coordinates has about unit second moment in a whole batch.
    assert 0.3 * WIDTH < signal + variance / BATCH < 3.0 * WIDTH
