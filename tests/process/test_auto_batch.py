"""Automatic batch size: all members choose alike, and learning rates and schedules follow."""

from __future__ import annotations

import msgspec
import pytest
import torch

from shoal.core.batch.setting import resolve_batch
from shoal.errors import BadSize
from shoal.testing.emulated_speeds import emulated, machines
from shoal.testing.threaded_world import together
from shoal.torch.run import Run

SAMPLES = 4000


def train(session, batch="auto:8:256", size=16, optimizer=torch.optim.SGD, scheduled="step", **how):
    session.settings = msgspec.structs.replace(session.settings, batch=batch)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 8, generator=generator)
    y = x.sum(1) + 8.0 * torch.randn(SAMPLES, generator=generator)
    model = torch.nn.Linear(8, 1)
    torch.nn.init.zeros_(model.weight), torch.nn.init.zeros_(model.bias)
    run = Run(session, "auto", "")
    optimizer = optimizer(model.parameters(), lr=0.001)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10**9)
    model, optimizer, scheduler = run.attach(model, optimizer, scheduler)
    rates, adjustments, ids_seen = [], [], []
    session.report_adjustment = lambda step, what, values, reason, send: adjustments.append((step, what, values))
    optimizer.register_step_pre_hook(lambda stepped, *_: rates.append(stepped.param_groups[0]["lr"]))
    data = torch.utils.data.TensorDataset(x, y, torch.arange(SAMPLES))
    for a, b, ids in run.batches(data, size=size, epochs=2, seed=3, **how):
        ids_seen += [(run.epoch, i) for i in ids.tolist()] if run.share else []
        run.backward(((model(a).squeeze(1) - b) ** 2).mean())
        optimizer.step()
        if scheduled == "step" or run.epoch_ended:
            scheduler.step()
        optimizer.zero_grad()
    feed, auto = run._trainer.feed, run._trainer.auto
    sizes = list(feed._order.size_changes)
    return {
        "weights": model.weight.detach().clone(),
        "sizes": sizes,
        "rates": rates,
        "adjustments": adjustments,
        "ids": ids_seen,
        "steps": run.step,
        "calls": scheduler.last_epoch,
        "progress": auto.progress if auto else None,
    }


NOISY = machines(1, 0.5, sample_s=1e-5, fixed_s=0.004)


def test_members_choose_a_larger_batch_where_the_noise_allows_it():
    results = together(2, emulated(train, NOISY))
    assert results[0]["sizes"], "the batch never changed"
    assert results[0]["sizes"] == results[1]["sizes"]
    assert max(size for _, size in results[0]["sizes"]) > 16
    assert torch.equal(results[0]["weights"], results[1]["weights"])
    both = sorted(results[0]["ids"] + results[1]["ids"])
    assert both == [(epoch, i) for epoch in range(2) for i in range(SAMPLES)]
    reported = [(step, values["batch"]) for step, what, values in results[0]["adjustments"] if what == "batch"]
    assert reported == results[0]["sizes"]


def test_learning_rates_and_schedules_follow_the_batch_size():
    results = together(2, emulated(train, NOISY))[0]
    assert max(results["rates"]) > 0.001
    assert results["calls"] == int(results["progress"])
    assert results["calls"] > results["steps"]
    by_epoch = together(2, emulated(lambda session: train(session, scheduled="epoch"), NOISY))[0]
    assert by_epoch["calls"] == 2


def test_learning_rate_of_adam_follows_the_square_root():
    results = together(2, emulated(lambda session: train(session, optimizer=torch.optim.Adam), NOISY))[0]
    first, size = results["sizes"][0]
    assert results["rates"][first] == pytest.approx(0.001 * (size / 16) ** 0.5)


def test_single_member_chooses_a_larger_batch_too():
    (results,) = together(1, emulated(train, NOISY))
    assert results["sizes"]
    assert sorted(results["ids"]) == [(epoch, i) for epoch in range(2) for i in range(SAMPLES)]


def test_worker_processes_that_read_ahead_lose_no_sample():
    (results,) = together(1, emulated(lambda session: train(session, workers=1), NOISY))
    assert results["sizes"]
    assert sorted(results["ids"]) == [(epoch, i) for epoch in range(2) for i in range(SAMPLES)]


@pytest.mark.parametrize("text", ["many", "auto:9", "auto:0:9", "auto:20:10", "-3", "auto:a:b"])
def test_invalid_batch_is_refused(text):
    with pytest.raises(BadSize):
        resolve_batch(text, 16, 1000)


def test_batch_setting_can_be_a_number():
    (results,) = together(1, lambda session: train(session, batch="40"))
    assert results["steps"] == 2 * SAMPLES // 40
