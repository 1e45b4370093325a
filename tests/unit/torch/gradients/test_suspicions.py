"""Scripts whose result depends on the shares are warned of with a code; others are not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils.data import TensorDataset

from shoal.torch.gradients.suspicions import coupled_samples, sum_over_samples
from shoal.torch.run import Run
from shoal.worker.session.standalone import StandaloneSession

MODEL = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
X = torch.randn(8, 3)


def contrastive(z: torch.Tensor) -> torch.Tensor:
    z = functional.normalize(z, dim=1)
    return functional.cross_entropy(z @ z.T / 0.1, torch.arange(len(z)))


@pytest.mark.parametrize(
    "loss",
    [
        contrastive,
        lambda z: contrastive(torch.cat([z, z + 0.1])),
        lambda z: torch.einsum("nd,md->nm", z, z).logsumexp(1).mean(),
        lambda z: torch.cdist(z, z + 1.0).mean(),
    ],
    ids=["infonce", "simclr", "einsum", "distances"],
)
def test_loss_that_compares_samples_is_suspected(loss: Callable[[torch.Tensor], torch.Tensor]) -> None:
    suspicion = coupled_samples(loss(MODEL(X)), len(X))
    assert suspicion is not None
    assert suspicion.code == "S326"


@pytest.mark.parametrize(
    "model",
    [
        MODEL,
        torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Linear(8, 8, bias=False)),  # as many outputs as samples
        torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.TransformerEncoderLayer(8, 1, 8, batch_first=True)),
    ],
    ids=["layers", "square layer", "attention"],
)
def test_plain_losses_are_not_suspected(model: torch.nn.Module) -> None:
    x = X.unsqueeze(1).expand(8, 8, 3) if isinstance(model[-1], torch.nn.TransformerEncoderLayer) else X
    assert coupled_samples(model(x).square().mean(), len(X)) is None


@pytest.mark.parametrize(
    ("loss", "suspected"),
    [
        (lambda y: functional.mse_loss(y, y * 0, reduction="sum"), True),
        (lambda y: functional.cross_entropy(y, torch.zeros(8, dtype=torch.long), reduction="sum"), True),
        (lambda y: functional.mse_loss(y, y * 0) - 0.5 * y.exp().mean() + y.square().sum(), True),
        (lambda y: functional.mse_loss(y, y * 0, reduction="sum") / len(y), False),
        (lambda y: y.square().sum(1).mean(), False),
        (lambda y: functional.cross_entropy(y, torch.zeros(8, dtype=torch.long)) + 1e-4 * y.square().sum(), False),
    ],
    ids=["mse", "cross entropy", "term", "divided", "mean of sums", "regularised"],
)
def test_sum_over_samples_is_suspected(loss: Callable[[torch.Tensor], torch.Tensor], suspected: bool) -> None:
    assert (sum_over_samples(loss(MODEL(X)), len(X)) is not None) is suspected


def train(directory: Path, model: torch.nn.Module, loss: Callable[[torch.Tensor], torch.Tensor]) -> None:
    run = Run(StandaloneSession(), "alone", str(directory))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.attach(model, optimizer)
    for (x,) in run.batches(TensorDataset(torch.randn(32, 5, 3)), size=8):
        run.backward(loss(x))
        optimizer.step()


class Carrying:
    """A loop body that hands the hidden state on to the next batch."""

    def __init__(self, detach: bool = True) -> None:
        self.rnn = torch.nn.LSTM(3, 4, batch_first=True)
        self.state: Any = None
        self.detach = detach

    def carried(self, x: torch.Tensor) -> torch.Tensor:
        y, state = self.rnn(x, self.state)
        self.state = tuple(part.detach() for part in state)
        return y.mean()

    def fresh(self, x: torch.Tensor) -> torch.Tensor:
        first = torch.randn(1, len(x), 4), torch.randn(1, len(x), 4)
        y, state = self.rnn(x, first)
        again, _ = self.rnn(x, state)
        return y.mean() + again.mean()


def test_hidden_state_of_an_earlier_batch_is_warned_of_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = Carrying()
    train(tmp_path, body.rnn, body.carried)
    printed = capsys.readouterr().err
    assert printed.count("warning[S327] LSTM was given the hidden state of an earlier batch") == 1
    assert "where  test_suspicions.py:" in printed


def test_hidden_state_of_the_same_batch_is_not_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = Carrying()
    train(tmp_path, body.rnn, body.fresh)
    assert "warning" not in capsys.readouterr().err


def test_coupled_loss_is_warned_of_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = torch.nn.Linear(3, 4)
    train(tmp_path, model, lambda x: contrastive(model(x[:, 0])))
    assert capsys.readouterr().err.count("warning[S326]") == 1
