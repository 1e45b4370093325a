"""Training loops as users write them: two members compute what one process computes, or the error says why not."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from shoal.errors import MembersDiverged, NotAttached, UnusableBackward, UnusableData, UnusableShard
from shoal.testing.threaded_world import FixedWorldSession, together
from shoal.torch.run import Run

pytestmark = pytest.mark.process

torch.set_num_threads(1)
F64 = torch.float64
# Members are threads here and share a random generator, so only one at a time may build its model.
BUILDING = threading.RLock()
State = dict[str, torch.Tensor]
Body = Callable[[Run, Any], Any]
mse = nn.functional.mse_loss


def dataset(count: int = 96) -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 8, generator=generator, dtype=F64)
    return torch.utils.data.TensorDataset(x, torch.sin(x.sum(1, keepdim=True)))


def mlp() -> Any:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()


def members(count: int, loop: Body, build: Callable[[], Any] = mlp, sync: str = "step") -> list[tuple[State, Any]]:
    """Return for each member the final state of its model and what the loop returned."""

    def body(session: FixedWorldSession) -> tuple[State, Any]:
        session.settings = msgspec.structs.replace(session.settings, sync=sync)
        run = Run(session, "test", "unused")
        with BUILDING:
            torch.manual_seed(2)
            model = build()
        if count > 1:
            session.exchange.barrier()  # a step seeds the generator that other members may still use
        returned = loop(run, model)
        return {key: value.detach().clone() for key, value in model.state_dict().items()}, returned

    return together(count, body)


def difference(actual: State, expected: State) -> float:
    assert actual.keys() == expected.keys()
    return max(float((actual[key].double() - expected[key].double()).abs().max()) for key in actual)


def check(loop: Body, build: Callable[[], Any] = mlp, within: float = 1e-12) -> None:
    """Fail unless two members end with the same state, that of one member."""
    (alone, _), ((first, _), (second, _)) = members(1, loop, build)[0], members(2, loop, build)
    assert difference(first, second) == 0.0
    assert difference(first, alone) <= within


def sgd(run: Run, model: Any, lr: float = 0.1) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr)
    run.attach(model, optimizer)
    return optimizer


# --- gradients between the micro-batches of a step


def clipped(micro: int | None) -> Body:
    def loop(run: Run, model: Any) -> None:
        optimizer = sgd(run, model)
        for x, y in run.batches(dataset(), size=24, micro=micro, shares="equal"):
            run.backward(mse(model(x), y))
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()

    return loop


def zeroed_by_the_model(micro: int | None) -> Body:
    def loop(run: Run, model: Any) -> None:
        optimizer = sgd(run, model)
        for x, y in run.batches(dataset(), size=24, micro=micro, shares="equal"):
            model.zero_grad()
            run.backward(mse(model(x), y))
            optimizer.step()

    return loop


def plain(micro: int | None) -> Body:
    def loop(run: Run, model: Any) -> None:
        optimizer = sgd(run, model)
        for x, y in run.batches(dataset(), size=24, micro=micro, shares="equal"):
            run.backward(mse(model(x), y))
            optimizer.step()
            optimizer.zero_grad()

    return loop


class Choosing(nn.Module):
    """Uses one branch or the other, depending on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 1).double(), nn.Linear(8, 1).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pick = x[:, :1] > 0
        out = torch.zeros(len(x), 1, dtype=F64)
        if pick.any():
            out = out + self.left(x) * pick
        if (~pick).any():
            out = out + self.right(x) * ~pick
        return out


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    ("loop", "build"),
    [(clipped, mlp), (zeroed_by_the_model, mlp), (plain, Choosing)],
    ids=["clipped", "zeroed by the model", "parameters that only some pieces use"],
)
def test_micro_batches_make_the_same_step_as_the_whole_share(
    loop: Callable[[int | None], Body], build: Callable[[], Any], count: int
) -> None:
    whole = members(1, loop(None), build)[0][0]
    for state, _ in members(count, loop(1), build):
        assert difference(state, whole) <= 1e-12


def test_micro_batches_make_the_same_local_step_as_the_whole_batch() -> None:
    whole = members(2, clipped(None), sync="local:2")[0][0]
    assert difference(members(2, clipped(1), sync="local:2")[1][0], whole) <= 1e-12


def test_gradients_without_an_optimizer_do_not_accumulate() -> None:
    def loop(run: Run, model: Any) -> None:
        optimizer = torch.optim.SGD(model[2].parameters(), 0.1)
        run.attach(model, optimizer)
        for x, y in run.batches(dataset(), size=24, epochs=3, shares="equal"):
            run.backward(mse(model(x), y))
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    check(loop)


def test_loss_backward_instead_of_run_backward_is_refused() -> None:
    def loop(run: Run, model: Any) -> None:
        optimizer = sgd(run, model)
        for x, y in run.batches(dataset(), size=24, shares="equal"):
            sum(p.square().sum() for p in model.parameters()).backward()
            run.backward(mse(model(x), y))
            optimizer.step()
            optimizer.zero_grad()

    with pytest.raises(UnusableBackward, match=r"gradients before run\.backward"):
        members(2, loop)


def test_share_of_weight_zero_adds_nothing_even_if_its_loss_is_nan() -> None:
    def loop(run: Run, model: Any) -> None:
        optimizer = sgd(run, model)
        for x, y in run.batches(dataset(), size=24, shares="equal"):
            counts = y > 0.997
            loss = ((model(x) - y).square() * counts).sum() / counts.sum()
            run.backward(loss, weight=float(counts.sum()))
            optimizer.step()
            optimizer.zero_grad()

    check(loop)


# --- optimizers


def test_scaler_steps_several_optimizers() -> None:
    def loop(run: Run, model: Any) -> int:
        first, second = torch.optim.SGD(model[0].parameters(), 0.1), torch.optim.Adam(model[2].parameters(), 0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
        run.attach(model, first, second, scaler)
        for x, y in run.batches(dataset(), size=24, shares="equal"):
            run.backward(scaler.scale(mse(model(x), y)))
            scaler.unscale_(first)
            scaler.step(first)
            scaler.step(second)
            scaler.update()
            first.zero_grad()
            second.zero_grad()
        return run.step

    check(loop, within=1e-9)
    assert members(2, loop)[0][1] == 4


def test_optimizer_of_parameters_outside_the_model_is_refused() -> None:
    def loop(run: Run, model: Any) -> None:
        temperature = nn.Parameter(torch.ones(1, dtype=F64))
        optimizer = torch.optim.SGD([*model.parameters(), temperature], 0.1)
        run.attach(model, optimizer)
        run.batches(dataset(), size=24)

    with pytest.raises(NotAttached, match="1 parameter outside the attached model"):
        members(1, loop)


class Counter:
    """Object with a state that is neither an optimizer nor a scheduler."""

    def __init__(self) -> None:
        self.seen = 0

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


def test_object_with_state_can_be_attached_and_repeating_it_changes_nothing() -> None:
    def loop(run: Run, model: Any) -> int:
        optimizer, counter = torch.optim.SGD(model.parameters(), 0.1), Counter()
        assert run.attach(model, optimizer, counter) == (model, optimizer, counter)
        run.attach(model, optimizer, counter)
        for x, y in run.batches(dataset(), size=24, shares="equal"):
            run.backward(mse(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            counter.seen += run.committed
        header, buffers = run._training_state.capture()
        counter.seen = 0
        run._training_state.load(header, buffers)
        return counter.seen

    check(loop)
    assert members(1, loop)[0][1] == 4


def test_object_without_state_cannot_be_attached() -> None:
    def loop(run: Run, model: Any) -> None:
        run.attach((model, torch.optim.SGD(model.parameters(), 0.1)))

    with pytest.raises(NotAttached, match="a tuple cannot be attached"):
        members(1, loop)


# --- before the loop


def test_metric_logged_before_the_step_is_shown_after_the_commit() -> None:
    def loop(run: Run, model: Any) -> Any:
        optimizer = sgd(run, model)
        for x, y in run.batches(dataset(), size=24, shares="equal"):
            run.log(early=run.step)
            run.backward(mse(model(x), y))
            shown = run._session.status()["metrics"]
            assert shown == ({"early": run.step - 1.0, "late": float(run.step)} if run.step else {})
            optimizer.step()
            optimizer.zero_grad()
            run.log(late=run.step)
        return run._session.status()["metrics"]

    assert members(1, loop)[0][1] == {"early": 3.0, "late": 4.0}


def test_step_outside_the_loop_is_refused_but_a_schedule_can_be_set_there() -> None:
    def loop(run: Run, model: Any) -> list[float]:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        run.attach(model, optimizer, scheduler)
        optimizer.step()
        scheduler.step()
        x, y = dataset()[:]
        mse(model(x), y).backward()
        with pytest.raises(UnusableBackward, match="outside the training loop"):
            optimizer.step()
        return list(scheduler.get_last_lr())

    assert members(1, loop)[0][1] == [0.05]


def test_step_with_only_some_optimizers_is_reported() -> None:
    def loop(run: Run, model: Any) -> None:
        first, second = (torch.optim.SGD(model[index].parameters(), 0.1) for index in (0, 2))
        run.attach(model, first, second)
        for x, y in run.batches(dataset(), size=24):
            run.backward(mse(model(x), y))
            first.step()

    with pytest.raises(UnusableBackward, match=r"without optimizer\.step of all 2 optimizers"):
        members(1, loop)


# --- synchronised BatchNorm


def synchronised(shift: float, dtype: torch.dtype) -> Body:
    def loop(run: Run, model: Any) -> None:
        optimizer = sgd(run, run.sync_batchnorm(model))
        for x, y in run.batches(dataset(), size=24, shares="equal"):
            run.backward(mse(model((x + shift).to(dtype)), y.to(dtype)))
            optimizer.step()
            optimizer.zero_grad()

    return loop


def normed() -> Any:
    return nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 1)).double()


def normed_twice() -> Any:
    norm = nn.BatchNorm1d(8)
    return nn.Sequential(norm, nn.Linear(8, 8), norm, nn.Linear(8, 1)).double()


def test_synchronised_batchnorm_handles_values_far_from_zero() -> None:
    check(synchronised(3000.0, torch.float32), lambda: normed().float(), within=1e-3)


def test_synchronised_batchnorm_is_as_precise_as_the_model() -> None:
    def loop(run: Run, model: Any) -> None:
        model[0].track_running_stats = False
        synchronised(0.0, F64)(run, model)

    check(loop, normed)


def test_batchnorm_layer_used_twice_is_synchronised_twice() -> None:
    check(synchronised(0.0, F64), normed_twice, within=1e-7)


# --- schedules


def on_a_plateau(of_the_share: bool) -> Body:
    def loop(run: Run, model: Any) -> float:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        run.attach(model, optimizer, scheduler)
        everything = dataset()[:]
        for x, y in run.batches(dataset(), size=24, epochs=3, shares="equal"):
            loss = mse(model(x), y)
            run.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                scheduler.step(float(loss) if of_the_share else -float(mse(model(everything[0]), everything[1])))
        return float(optimizer.param_groups[0]["lr"])

    return loop


def test_diverging_schedules_are_detected_before_members_diverge() -> None:
    with pytest.raises(MembersDiverged, match="different learning rates"):
        members(2, on_a_plateau(of_the_share=True))


def test_schedule_can_follow_a_score_that_all_members_share() -> None:
    check(on_a_plateau(of_the_share=False))
    assert members(2, on_a_plateau(of_the_share=False))[1][1] < 0.1


# --- data


class Endless(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(10))


@pytest.mark.parametrize(
    ("data", "remedy"),
    [(torch.utils.data.DataLoader(dataset(), batch_size=4), "the loader's data set"), (Endless(), r"run\.stream")],
    ids=["DataLoader", "IterableDataset"],
)
def test_data_without_numbered_samples_is_refused_with_the_remedy(data: Any, remedy: str) -> None:
    def loop(run: Run, model: Any) -> None:
        sgd(run, model)
        run.batches(data, size=2)

    with pytest.raises(UnusableData, match=remedy):
        members(1, loop)


@pytest.mark.parametrize("shards", ["data/*.jsonl", Endless()], ids=["a pattern", "a shard itself"])
def test_stream_without_a_list_of_sources_is_refused(shards: Any) -> None:
    def loop(run: Run, model: Any) -> None:
        sgd(run, model)
        run.stream(shards, size=2, open=list)

    with pytest.raises(UnusableShard, match="instead of a list of shards"):
        members(1, loop)


class Waves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 1, dtype=torch.complex128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(torch.complex128) @ self.weight).abs()


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD])
def test_complex_parameters_are_trained(kind: Any) -> None:
    def loop(run: Run, model: Any) -> None:
        optimizer = kind(model.parameters(), lr=0.01)
        run.attach(model, optimizer)
        for x, y in run.batches(dataset(), size=8, epochs=3, shares="equal"):
            run.backward(mse(model(x), y))
            optimizer.step()
            optimizer.zero_grad()

    (first, _), (second, _) = members(2, loop, Waves)
    assert torch.equal(first["weight"], second["weight"])
    assert torch.allclose(first["weight"], members(1, loop, Waves)[0][0]["weight"], rtol=0, atol=1e-9)


def test_uninitialised_lazy_layers_are_refused() -> None:
    def loop(run: Run, model: Any) -> None:
        sgd(run, model)
        run.batches(dataset(), size=24)

    with pytest.raises(NotAttached, match="lazy layers"):
        members(1, loop, lambda: nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 1)))


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_invalid_weight_is_refused(weight: float) -> None:
    def loop(run: Run, model: Any) -> None:
        sgd(run, model)
        for x, y in run.batches(dataset(), size=24):
            run.backward(mse(model(x), y), weight=weight)

    with pytest.raises(UnusableBackward, match="invalid weight="):
        members(1, loop)
