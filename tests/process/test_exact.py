"""Exact mode: no bit of the parameters depends on the number of members or on their shares."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.errors import UnsupportedInExactMode
from shoal.settings import RunSettings
from shoal.testing.threaded_world import FixedWorldSession, together
from shoal.torch.gradients.tree_buckets import exact_weight
from shoal.torch.run import Run

pytestmark = pytest.mark.process

torch.set_num_threads(1)
SAMPLES, SIZE, SHARDS, EPOCHS = 80, 24, 8, 2


def dataset() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 8, generator=generator)
    return torch.utils.data.TensorDataset(x, torch.sin(x.sum(1, keepdim=True)))


# Members are threads here and share a random generator, so only one at a time may build its model.
BUILDING = threading.Lock()


class _Seeded(threading.local):
    generator: torch.Generator


SEEDED = _Seeded()


class Dropout(torch.nn.Module):
    """Draws from the generator of its thread."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (torch.rand(x.shape, generator=SEEDED.generator) > 0.3) / 0.7


@pytest.fixture(autouse=True)
def seeds_of_each_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give every member its own generator, as every process has; the seeds are those of the trainer."""

    def seed_thread(seed: int) -> None:
        SEEDED.generator = torch.Generator().manual_seed(seed)

    monkeypatch.setattr("shoal.torch.modes.every_step.seed_everything", seed_thread)


def mlp() -> torch.nn.Module:
    layers = [torch.nn.Linear(8, 16), torch.nn.ReLU(), Dropout(), torch.nn.Linear(16, 16), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(16, 1))


def normed() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Linear(16, 1)
    )


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.05, momentum=0.9)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, 0.01)


def train(
    build: Callable[[], torch.nn.Module] = mlp,
    make: Callable[[Any], torch.optim.Optimizer] = sgd,
    *,
    shares: str = "equal",
    exact: int | None = SHARDS,
    size: int = SIZE,
    weigh: Callable[[torch.Tensor], float | None] = lambda _: None,
    each: Callable[[Run], object] = lambda _: None,
    epochs: int = EPOCHS,
    workers: int = 0,
) -> Callable[[FixedWorldSession], dict[str, torch.Tensor]]:
    def body(session: FixedWorldSession) -> dict[str, torch.Tensor]:
        run = Run(session, "test", "unused")
        with BUILDING:
            torch.manual_seed(2)
            model = build()
        optimizer = make(model.parameters())
        run.attach(model, optimizer)
        for x, y in run.batches(dataset(), size=size, epochs=epochs, shares=shares, exact=exact, workers=workers):
            each(run)
            run.backward(torch.nn.functional.mse_loss(model(x), y), weight=weigh(x))
            optimizer.step()
            optimizer.zero_grad()
        return {k: v.detach().clone() for k, v in model.state_dict().items()}

    return body


def same_bits(actual: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    for key in actual:
        assert actual[key].numpy().tobytes() == other[key].numpy().tobytes(), key


def check(count: int, shares: str = "equal", catching_up: tuple[int, ...] = (), **how: Any) -> None:
    alone = together(1, train(**how))[0]
    for state in together(count, train(shares=shares, **how), catching_up):
        same_bits(state, alone)


@pytest.mark.parametrize("make", [sgd, adam])
@pytest.mark.parametrize("count", [2, 3, 5, 8])
def test_result_is_bitwise_equal_for_any_number_of_members(count: int, make: Any) -> None:
    check(count, make=make)


@settings(max_examples=10, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(weights=st.lists(st.integers(0, 9), min_size=2, max_size=4).filter(any), shards=st.integers(1, SIZE))
def test_result_is_bitwise_equal_for_any_split(weights: list[int], shards: int) -> None:
    check(len(weights), shares="fixed:" + ",".join(map(str, weights)), exact=shards, make=adam, epochs=1)


def test_result_differs_without_exact_mode() -> None:
    single = together(1, train(exact=None, build=normed))[0]
    two = together(3, train(exact=None, build=normed))[0]
    assert any(single[key].numpy().tobytes() != two[key].numpy().tobytes() for key in single)


def test_some_members_have_no_shard_if_there_are_more_members_than_shards() -> None:
    check(5, exact=2)


def test_batchnorm_normalises_each_shard_and_its_statistics_are_exact_too() -> None:
    check(3, build=normed, shares="fixed:1,2,3")
    state = together(2, train(build=normed))[0]
    assert int(state["1.num_batches_tracked"]) == 8, "a step was counted once per shard"
    assert state["1.running_var"].min() > 0


def test_fractional_weights_are_summed_exactly() -> None:
    check(3, shares="fixed:2,5,1", weigh=lambda x: float(x.abs().sum()) / 3)


def test_shard_of_weight_zero_does_not_count_anywhere() -> None:
    check(3, weigh=lambda x: 0.0 if x[0, 0] > 0 else 2.0)
    check(8, weigh=lambda x: 0.0 if x[0, 0] > 0 else 2.0)


class Choosing(torch.nn.Module):
    """Uses one branch or the other, depending on the data; a third is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.never = (torch.nn.Linear(8, 1) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.left(x) if x[0, 0] > 0 else self.right(x)


def test_parameters_used_by_some_shards_only_have_exact_gradients() -> None:
    check(3, build=Choosing, make=lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.5))


class Bag(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(20, 4, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table((x[:, 0].abs() * 5).long().clamp_max(19)).sum(1, keepdim=True)


def test_sparse_gradients_are_exact() -> None:
    check(3, build=Bag)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_16_bits_are_exact(dtype: torch.dtype) -> None:
    class Low(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp().to(dtype)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x.to(dtype)).float()

        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return {k: v.float() for k, v in super().state_dict(*args, **kwargs).items()}

    check(3, build=Low, shares="fixed:2,5,1")


def test_learned_shares_keep_the_result_bitwise_equal() -> None:
    shares: dict[int, set[int]] = {0: set(), 1: set(), 2: set()}

    def work(run: Run) -> None:
        shares[run.rank].add(run.share)
        time.sleep(0.002 * run.rank)

    check(3, shares="model", epochs=10, each=work)
    assert any(len(seen) > 1 for seen in shares.values()), "the shares never changed"


def test_catching_up_member_keeps_the_result_bitwise_equal() -> None:
    shares: dict[int, list[int]] = {0: [], 1: [], 2: []}

    def work(run: Run) -> None:
        shares[run.rank].append(run.share)
        time.sleep(0.2 if run.rank == 2 and run.step == 0 else 0.001)

    check(3, make=adam, catching_up=(2,), epochs=10, each=work)
    assert shares[2][0] == 0
    assert shares[2][-1] > 0, "the newcomer never got a share"


@pytest.mark.parametrize("how", [{"exact": -1}, {"exact": SIZE + 1}])
def test_invalid_number_of_shards_is_refused(how: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedInExactMode):
        together(1, train(**how))


def test_setting_enables_exact_mode_and_the_script_can_disable_it() -> None:
    def set_to(value: int, how: dict[str, Any]) -> Callable[[FixedWorldSession], dict[str, torch.Tensor]]:
        def body(session: FixedWorldSession) -> dict[str, torch.Tensor]:
            session.settings = RunSettings(exact=value)
            return train(**how)(session)

        return body

    expected = together(1, train())[0]
    same_bits(together(2, set_to(SHARDS, {"exact": None}))[0], expected)
    same_bits(together(1, set_to(SHARDS, {"exact": 0}))[0], together(1, train(exact=None))[0])


def test_unsupported_features_of_exact_mode_are_refused() -> None:
    def batches(prepare: Callable[[Run, torch.nn.Module], object], **how: Any) -> Callable[[FixedWorldSession], None]:
        def body(session: FixedWorldSession) -> None:
            run, model = Run(session, "test", "unused"), normed()
            prepare(run, model)
            run.attach(model, sgd(model.parameters()))
            run.batches(dataset(), size=SIZE, exact=4, **how)

        return body

    with pytest.raises(UnsupportedInExactMode, match="sync_batchnorm"):
        together(1, batches(lambda run, model: run.sync_batchnorm(model)))
    with pytest.raises(UnsupportedInExactMode, match="micro"):
        together(1, batches(lambda *_: None, micro=2))
    together(1, batches(lambda *_: None))


@given(weights=st.lists(st.floats(0, 1e6), max_size=30), seed=st.integers(0, 9))
def test_sum_of_weights_is_independent_of_their_order(weights: list[float], seed: int) -> None:
    exact = [exact_weight(weight) for weight in weights]
    shuffled = random.Random(seed).sample(exact, len(exact))
    assert sum(shuffled) == sum(exact)
    assert all(abs(rounded - weight) < 1e-6 for rounded, weight in zip(exact, weights, strict=True))
    assert exact_weight(12_345.0) == 12_345.0


def test_reading_ahead_in_another_process_keeps_the_result_bitwise_equal() -> None:
    same_bits(together(1, train(workers=1))[0], together(2, train())[0])


def test_repeated_step_is_bitwise_equal() -> None:
    failed: list[int] = []

    def fail_once(run: Run) -> None:
        # As if the world broke between two shards: the step starts over with the buffers it began with.
        if run.step == 2 and run._trainer.current.index == 3 and not failed:
            failed.append(run.step)
            run._trainer.current.discarded = True

    again = together(1, train(build=normed, each=fail_once))[0]
    same_bits(again, together(3, train(build=normed))[0])
    assert failed == [2]
