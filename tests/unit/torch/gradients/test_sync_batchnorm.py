"""Synchronised BatchNorm gives two members with unequal shares what one process with the whole batch gets."""

from __future__ import annotations

import copy
from contextlib import suppress

import torch

from shoal.testing.threaded_world import FixedWorldSession, together
from shoal.torch.gradients.sync_batchnorm import GlobalBatchNorm, synchronise
from shoal.worker.collectives.exchange import Exchange
from shoal.worker.transport.exchange_broken import ExchangeBroken

BATCH = torch.randn(6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 5 + 100
SHARES = (slice(0, 4), slice(4, 6))


class Reducer:
    def __init__(self, exchange: Exchange | None) -> None:
        self.exchange = exchange
        self.broken: ExchangeBroken | None = None

    def current_exchange(self) -> tuple[Exchange | None, float]:
        return self.exchange, 1.0

    def on_exchange_broken(self, broken: ExchangeBroken) -> None:
        self.broken = broken


def layer(exchange: Exchange | None) -> torch.nn.Module:
    return synchronise(torch.nn.BatchNorm1d(3).double(), Reducer(exchange))


def test_outputs_gradients_and_statistics_are_those_of_the_whole_batch() -> None:
    plain = torch.nn.BatchNorm1d(3).double()
    whole = BATCH.clone().requires_grad_()
    (plain(whole) ** 3).sum().backward()

    def body(session: FixedWorldSession) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        norm = layer(session.exchange)
        x = BATCH[SHARES[session.rank]].clone().requires_grad_()
        y = norm(x)
        (y**3).sum().backward()
        assert isinstance(norm.running_var, torch.Tensor)
        assert x.grad is not None
        return y.detach(), x.grad, norm.running_var

    results = together(2, body)
    assert whole.grad is not None
    for rank, (y, gradient, variance) in enumerate(results):
        torch.testing.assert_close(y, torch.nn.functional.batch_norm(BATCH, None, None, training=True)[SHARES[rank]])
        torch.testing.assert_close(gradient, whole.grad[SHARES[rank]])
        torch.testing.assert_close(variance, plain.running_var)


def test_layers_are_replaced_once_each_and_keep_their_parameters() -> None:
    shared = torch.nn.BatchNorm1d(3)
    model = torch.nn.ModuleDict({"a": shared, "b": shared, "c": torch.nn.Linear(3, 3)})
    assert synchronise(model, Reducer(None)) is model
    assert model["a"] is model["b"]
    assert isinstance(model["a"], GlobalBatchNorm)
    assert model["a"].weight is shared.weight


def test_copy_belongs_to_the_same_run() -> None:
    norm = layer(None)
    twin = copy.deepcopy(norm)
    assert twin._members is norm._members
    assert twin.weight is not norm.weight


def test_broken_exchange_is_reported_and_leaves_finite_numbers() -> None:
    def body(session: FixedWorldSession) -> bool:
        assert session.exchange is not None
        reducer = Reducer(session.exchange)
        session.exchange.abort("a member was lost")
        norm = synchronise(torch.nn.BatchNorm1d(3).double(), reducer)
        finite = bool(norm(BATCH).isfinite().all())
        return finite and reducer.broken is not None

    results = []

    def keep(session: FixedWorldSession) -> None:
        results.append(body(session))

    with suppress(ExchangeBroken):  # by the final barrier of a world that was broken on purpose
        together(2, keep)
    assert results == [True, True]
