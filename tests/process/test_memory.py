"""A member that runs out of memory repeats the step in smaller micro-batches; nothing is lost."""

from __future__ import annotations

import copy
import io

import pytest
import torch

from shoal.testing.threaded_world import together
from shoal.torch.gradients.oom_retry import is_out_of_memory
from shoal.torch.run import Run

SAMPLES, BATCH = 96, 24


class Hungry(torch.nn.Module):
    """A model whose forward or backward pass fits only so many samples."""

    def __init__(self, fits: int, where: str) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)
        # Members are threads here, which share the global generator.
        torch.nn.init.eye_(self.layer.weight), torch.nn.init.zeros_(self.layer.bias)
        self.fits, self.where, self.seen = fits, where, []

    def forward(self, x):
        if self.where == "forward":
            self._check(len(x))
        output = self.layer(x)
        if self.where == "backward" and output.requires_grad:
            output.register_hook(lambda gradient: self._check(len(gradient)))
        self.seen.append(len(x))
        return output

    def _check(self, samples: int) -> None:
        if samples > self.fits:
            raise torch.OutOfMemoryError(f"tried to fit {samples} samples")


def train(session, fits=10**9, where="forward", shares="equal"):
    generator = torch.Generator().manual_seed(5)
    x, y = torch.randn(SAMPLES, 4, generator=generator), torch.randint(3, (SAMPLES,), generator=generator)
    run = Run(session, "memory", "")
    model = Hungry(fits if session.rank == 0 else 10**9, where)
    model, optimizer = run.attach(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    steps = []
    data = torch.utils.data.TensorDataset(x, y, torch.arange(SAMPLES))
    for a, b, ids in run.batches(data, size=BATCH, epochs=2, shares=shares):
        steps.append((run.step, ids.tolist()))
        run.backward(torch.nn.functional.cross_entropy(model(a), b))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 100.0)
        optimizer.step()
        optimizer.zero_grad()
    return model.layer.weight.detach().clone(), run._trainer.feed.micro_batch_size, steps


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("fits", [11, 5, 1])
def test_single_member_halves_its_micro_batches_until_they_fit(where, fits):
    ((expected, _, _),) = together(1, train)
    ((weights, micro, _),) = together(1, lambda session: train(session, fits, where))
    assert micro is not None
    assert micro <= fits
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)


def test_other_members_only_wait_for_the_one_out_of_memory():
    expected = together(3, train)
    results = together(3, lambda session: train(session, fits=3))
    assert [micro for _, micro, _ in results] == [2, None, None]
    torch.testing.assert_close(results[0][0], expected[0][0], rtol=1e-5, atol=1e-6)
    assert all(torch.equal(weights, results[0][0]) for weights, _, _ in results)
    # Members with enough memory see every step once.
    assert [step for step, _ in results[1][2]] == list(range(2 * SAMPLES // BATCH))


def test_error_is_raised_if_a_single_sample_does_not_fit():
    with pytest.raises(torch.OutOfMemoryError):
        together(1, lambda session: train(session, fits=0))


def test_guarded_model_can_be_copied_and_pickled():
    def body(session):
        run = Run(session, "copy", "")
        model = torch.nn.Linear(2, 2)
        run.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
        twin = copy.deepcopy(model)
        with torch.no_grad():
            twin.weight.zero_(), twin.bias.zero_()
        assert twin(torch.ones(1, 2)).abs().sum() == 0
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        again = torch.load(buffer, weights_only=False)
        torch.testing.assert_close(again(torch.ones(1, 2)), model(torch.ones(1, 2)))

    together(1, body)


def test_other_errors_are_not_taken_for_out_of_memory():
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 60)
    assert is_out_of_memory(raised.value)
