"""A step computes the gradient of the whole global batch for any split, with every feature that we claim."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import MembersDiverged, UnusableBackward
from shoal.testing.threaded_world import FixedWorldSession, together
from shoal.torch.run import Run

pytestmark = pytest.mark.process

torch.set_num_threads(1)
F64 = torch.float64


def dataset(count: int = 96) -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 8, generator=generator, dtype=F64)
    return torch.utils.data.TensorDataset(x, torch.sin(x.sum(1, keepdim=True)))


# Members are threads here and share a random generator, so only one of them may build its model at a time.
BUILDING = threading.RLock()


def one_at_a_time(build: Callable[[], torch.nn.Module]) -> Callable[[], torch.nn.Module]:
    def locked() -> torch.nn.Module:
        with BUILDING:
            return build()

    return locked


@one_at_a_time
def mlp() -> torch.nn.Module:
    torch.manual_seed(2)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).double()


def train(
    build: Callable[[], torch.nn.Module],
    make: Callable[[Any], torch.optim.Optimizer] = lambda p: torch.optim.SGD(p, 0.02, momentum=0.9),
    *,
    size: int = 24,
    epochs: int = 2,
    shares: str = "equal",
    micro: int | None = None,
    loss: Callable[[Any, Any, Any], torch.Tensor] = lambda m, x, y: torch.nn.functional.mse_loss(m(x), y),
    tokens: bool = False,
    prepare: Callable[[Run, torch.nn.Module], torch.nn.Module] = lambda _run, model: model,
) -> Callable[[FixedWorldSession], dict[str, torch.Tensor]]:
    def body(session: FixedWorldSession) -> dict[str, torch.Tensor]:
        run = Run(session, "test", "unused")
        with BUILDING:
            model = prepare(run, build())
        session.exchange.barrier()  # a step seeds the generator that other members may still use
        optimizer = make(model.parameters())
        run.attach(model, optimizer)
        for x, y in run.batches(dataset(), size=size, epochs=epochs, shares=shares, micro=micro):
            value = loss(model, x, y)
            run.backward(value, weight=float(len(x)) * 3 if tokens else None)
            optimizer.step()
            optimizer.zero_grad()
        return {k: v.detach().clone() for k, v in model.state_dict().items()}

    return body


def same(actual: dict[str, torch.Tensor], other: dict[str, torch.Tensor], within: float = 1e-12) -> None:
    assert actual.keys() == other.keys()
    for key in actual:
        assert torch.allclose(actual[key].double(), other[key].double(), rtol=0, atol=within), key


def check(count: int, within: float = 1e-12, **how: Any) -> list[dict[str, torch.Tensor]]:
    build = how.pop("build", mlp)
    alone = together(1, train(build, **{**how, "shares": "equal"}))[0]
    results = together(count, train(build, **how))
    for other in results[1:]:
        same(results[0], other, within=0.0)
    same(results[0], alone, within)
    return results


@pytest.mark.parametrize("count", [2, 3, 5])
def test_equal_shares_train_like_one_member(count: int) -> None:
    check(count)


@settings(max_examples=12)
@given(weights=st.lists(st.integers(1, 40), min_size=2, max_size=4))
def test_any_fixed_split_trains_like_one_member(weights: list[int]) -> None:
    check(len(weights), shares="fixed:" + ",".join(map(str, weights)), epochs=1)


def test_some_shares_are_empty_if_there_are_more_members_than_samples() -> None:
    check(4, size=3, epochs=1)


def test_short_last_batch_counts_by_its_true_size() -> None:
    check(3, size=36)


def test_custom_weights_are_honoured() -> None:
    check(3, shares="fixed:1,2,5", tokens=True)


@pytest.mark.parametrize("micro", [1, 3, 7])
def test_accumulated_micro_batches_make_one_step(micro: int) -> None:
    check(3, micro=micro, shares="fixed:1,2,5", epochs=1)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.Adam(p, 1e-2),
        lambda p: torch.optim.AdamW(p, 1e-2, amsgrad=True),
        lambda p: torch.optim.RMSprop(p, 1e-3),
        lambda p: torch.optim.Adagrad(p, 1e-2),
        lambda p: torch.optim.NAdam(p, 1e-2),
    ],
)
def test_every_optimizer_sees_the_gradient_of_the_whole_batch(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    check(2, make=make, within=1e-9)


def test_parameter_groups_keep_their_own_settings() -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        first, *rest = parameters
        return torch.optim.SGD([{"params": [first], "lr": 0.01}, {"params": rest, "weight_decay": 0.1}], lr=0.1)

    check(3, make=make)


def test_frozen_parameters_do_not_change() -> None:
    def build() -> torch.nn.Module:
        model = mlp()
        model[0].weight.requires_grad_(False)
        return model

    results = check(2, build=build)
    assert torch.equal(results[0]["0.weight"], mlp().state_dict()["0.weight"])


class Choosing(torch.nn.Module):
    """Uses actual branch or the other, depending on the data; a third is never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.left, self.right, self.never = (torch.nn.Linear(8, 1).double() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pick = x[:, :1] > 0
        out = torch.zeros(len(x), 1, dtype=F64)
        if pick.any():
            out = out + self.left(x) * pick
        if (~pick).any():
            out = out + self.right(x) * ~pick
        return out


def test_parameters_used_by_some_members_get_the_gradient_of_all() -> None:
    check(4, build=Choosing, size=6)


def test_unused_parameters_have_no_gradient_and_do_not_decay() -> None:
    results = check(2, build=Choosing, make=lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.5))
    assert torch.equal(results[0]["never.weight"], Choosing().state_dict()["never.weight"])


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.second = torch.nn.Linear(8, 8).double(), torch.nn.Linear(8, 8).double()
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.second(torch.tanh(self.first(x)))).sum(1, keepdim=True)


def test_shared_weights_are_counted_once() -> None:
    check(3, build=Tied)


def test_clipping_sees_the_gradient_of_the_whole_batch() -> None:
    def body(session: FixedWorldSession) -> dict[str, torch.Tensor]:
        run = Run(session, "test", "unused")
        model = mlp()
        session.exchange.barrier()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        run.attach(model, optimizer)
        for x, y in run.batches(dataset(), size=24):
            run.backward(torch.nn.functional.mse_loss(model(x), y))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        return model.state_dict()

    same(together(3, body)[0], together(1, body)[0])


def test_scheduler_steps_once_per_commit() -> None:
    def body(session: FixedWorldSession) -> list[float]:
        run = Run(session, "test", "unused")
        model = mlp()
        session.exchange.barrier()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        run.attach(model, optimizer, scheduler)
        for x, y in run.batches(dataset(), size=24, micro=5):
            run.backward(torch.nn.functional.mse_loss(model(x), y))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        return scheduler.get_last_lr()

    assert together(2, body) == [[0.1 * 0.5**2]] * 2


def test_scaler_skips_an_overflow_on_all_members_and_the_step_counts() -> None:
    def body(session: FixedWorldSession) -> tuple[float, int, dict[str, torch.Tensor]]:
        run = Run(session, "test", "unused")
        model = mlp().float()
        session.exchange.barrier()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
        run.attach(model, optimizer, scaler)
        for x, y in run.batches(dataset(), size=24):
            loss = torch.nn.functional.mse_loss(model(x.float()), y.float())
            poison = float("inf") if run.step == 1 and run.rank == 1 else 1.0
            run.backward(scaler.scale(loss) * poison)
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return scaler.get_scale(), run.step, {k: v.clone() for k, v in model.state_dict().items()}

    first, second = together(2, body)
    assert first[:2] == second[:2]
    assert first[1] == 4
    assert first[0] == 2.0**8, "halved once by the overflow, doubled once by growth"
    same(first[2], second[2], within=0.0)
    assert all(torch.isfinite(v).all() for v in first[2].values())


def test_bfloat16_parameters_and_autocast_stay_equal_on_all_members() -> None:
    def loss(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.nn.functional.mse_loss(model(x.float()), y.float())

    results = together(3, train(lambda: mlp().float(), loss=loss))
    same(results[0], results[1], within=0.0)
    low = together(
        3,
        train(lambda: mlp().to(torch.bfloat16), loss=lambda m, x, y: (m(x.bfloat16()) - y.bfloat16()).square().mean()),
    )
    same(low[0], low[2], within=0.0)


def normed() -> torch.nn.Module:
    torch.manual_seed(2)
    layers = [torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Tanh(), torch.nn.Linear(16, 1)]
    return torch.nn.Sequential(*layers).double()


def test_plain_batchnorm_normalises_each_share_and_keeps_one_average_of_statistics() -> None:
    results = together(3, train(normed, shares="fixed:1,2,3"))
    for other in results[1:]:
        same(results[0], other, within=0.0)
    assert int(results[0]["1.num_batches_tracked"]) == 8


def test_synchronised_batchnorm_trains_like_one_member() -> None:
    prepare = lambda run, model: run.sync_batchnorm(model)  # noqa: E731
    check(3, build=normed, shares="fixed:1,2,5", prepare=prepare, within=1e-6)


@pytest.mark.parametrize("late_s", [0.0, 0.3])
def test_newcomer_catches_up_while_the_others_continue(late_s: float) -> None:
    shares: dict[int, list[int]] = {0: [], 1: [], 2: []}

    def body(session: FixedWorldSession) -> dict[str, torch.Tensor]:
        run = Run(session, "test", "unused")
        model = mlp()
        if session.exchange.size > 1:
            session.exchange.barrier()
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        run.attach(model, optimizer)
        for x, y in run.batches(dataset(), size=24, epochs=10, shares="equal"):
            time.sleep(late_s if run.rank == 2 and run.step == 0 else 0.001 * run.share)
            shares[run.rank].append(run.share)
            run.backward(torch.nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        return {k: v.clone() for k, v in model.state_dict().items()}

    alone = together(1, body)[0]
    shares[0].clear()
    results = together(3, body, catching_up=(2,))
    for each in results:
        same(each, alone, within=1e-10)
    assert shares[2][0] == 0, "the newcomer had a share before it had the state"
    assert shares[2][-1] == 8, "the newcomer never got a share"
    assert [sum(step) for step in zip(*shares.values(), strict=True)] == [24] * 40


def test_sparse_embedding_gradients_are_summed() -> None:
    class Bag(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(2)
            self.table = torch.nn.Embedding(20, 4, sparse=True, dtype=F64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.table((x[:, 0].abs() * 5).long().clamp_max(19)).sum(1, keepdim=True)

    check(3, build=Bag, make=lambda p: torch.optim.SGD(p, 0.1))


@pytest.mark.parametrize("wrong", ["no backward", "two backwards", "no step", "two steps", "closure"])
def test_loop_without_one_step_per_batch_is_refused(wrong: str) -> None:
    def body(session: FixedWorldSession) -> None:
        run = Run(session, "test", "unused")
        model = mlp()
        session.exchange.barrier()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        run.attach(model, optimizer)
        for x, y in run.batches(dataset(), size=24):
            loss = torch.nn.functional.mse_loss(model(x), y)
            for _ in range({"no backward": 0, "two backwards": 2}.get(wrong, 1)):
                run.backward(loss)
            for _ in range({"no step": 0, "two steps": 2}.get(wrong, 1)):
                optimizer.step((lambda value=loss: value) if wrong == "closure" else None)

    with pytest.raises(UnusableBackward):
        together(1, body)


def test_unfreezing_during_training_trains_like_one_member() -> None:
    def body(session: FixedWorldSession) -> dict[str, torch.Tensor]:
        run = Run(session, "test", "unused")
        model = mlp()
        session.exchange.barrier()
        model[0].requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        run.attach(model, optimizer)
        for x, y in run.batches(dataset(), size=24, epochs=2):
            if run.epoch == 1:
                model[0].requires_grad_(True)
            run.backward(torch.nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        return copy.deepcopy(model.state_dict())

    same(together(2, body)[0], together(1, body)[0])


def test_disagreement_on_shares_is_reported_before_anything_is_applied() -> None:
    def body(session: FixedWorldSession) -> None:
        run = Run(session, "test", "unused")
        model = mlp()
        session.exchange.barrier()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        run.attach(model, optimizer)
        shares = "fixed:1,1" if session.rank == 0 else "fixed:1,2"
        for x, y in run.batches(dataset(), size=24, shares=shares):
            run.backward(torch.nn.functional.mse_loss(model(x), y))
            optimizer.step()

    with pytest.raises(MembersDiverged, match="disagree on their shares"):
        together(2, body)


def test_step_of_weight_zero_leaves_the_running_statistics_alone() -> None:
    def body(session: FixedWorldSession) -> torch.Tensor:
        run = Run(session, "test", "unused")
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
        for parameter in model[0].parameters():
            torch.nn.init.constant_(parameter, 0.1)  # members are threads that share a random generator
        if session.exchange.size > 1:
            session.exchange.barrier()
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        run.attach(model, optimizer)
        data = torch.utils.data.TensorDataset(torch.ones(24, 4))
        for (x,) in run.batches(data, size=24, shares="equal"):
            run.backward(model(x).sum(), weight=0.0)
            optimizer.step()
        return model[1].running_var.clone()

    for results in together(2, body):
        assert (results == 1).all()


def test_no_share_is_a_single_sample_with_batchnorm() -> None:
    shares: dict[int, list[int]] = {0: [], 1: []}

    def body(session: FixedWorldSession) -> None:
        run = Run(session, "test", "unused")
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
        for parameter in model[0].parameters():
            torch.nn.init.constant_(parameter, 0.1)
        session.exchange.barrier()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        run.attach(model, optimizer)
        data = torch.utils.data.TensorDataset(torch.arange(220.0).reshape(55, 4))
        for (x,) in run.batches(data, size=26, shares="fixed:25,1"):
            shares[run.rank].append(run.share)
            run.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()

    together(2, body)
    assert [*zip(*shares.values(), strict=True)] == [(26, 0), (26, 0), (3, 0)]
