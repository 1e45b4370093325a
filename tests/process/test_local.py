"""Local training: members take steps of their own during a round and hold one state after it."""

from __future__ import annotations

import statistics
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from shoal.errors import UnsupportedWithLocalSgd, UnusableBackward
from shoal.testing.emulated_speeds import emulated, machines
from shoal.testing.threaded_world import FixedWorldSession, together
from shoal.torch.run import Run
from shoal.torch.state.capture import checksum
from shoal.worker.transport.exchange_broken import ExchangeBroken

pytestmark = pytest.mark.process

torch.set_num_threads(1)
F64 = torch.float64
SAMPLES, SIZE = 96, 24
# Members are threads here and share a random generator, so only one of them may build its model at a time.
BUILDING = threading.RLock()


class Numbered(torch.utils.data.Dataset[Any]):
    """Samples that know their number."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(SAMPLES, 8, generator=generator, dtype=F64)
        self.y = torch.sin(self.x.sum(1, keepdim=True))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> Any:
        return i, self.x[i], self.y[i]


def mlp(batchnorm: bool = False) -> torch.nn.Module:
    with BUILDING:
        torch.manual_seed(2)
        between = [torch.nn.BatchNorm1d(16)] if batchnorm else []
        return torch.nn.Sequential(torch.nn.Linear(8, 16), *between, torch.nn.Tanh(), torch.nn.Linear(16, 1)).double()


def plain(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.05)


class Seen:
    """Records of one member."""

    def __init__(self) -> None:
        self.rounds: list[dict[str, torch.Tensor]] = []
        self.ids: list[list[int]] = []
        self.sizes: list[list[int]] = []
        self.rates: list[float] = []
        self.end: dict[str, torch.Tensor] = {}


def train(
    sync: str,
    make: Callable[[Any], torch.optim.Optimizer] = plain,
    *,
    outer: tuple[float, float] = (1.0, 0.0),
    epochs: int = 2,
    batchnorm: bool = False,
    schedule: Callable[[Any], Any] | None = None,
    when: Callable[[Run], bool] = lambda _run: True,
    weigh: Callable[[torch.Tensor], float] | None = None,
    scaler: bool = False,
    prepare: Callable[[torch.nn.Module], None] = lambda _model: None,
    **how: Any,
) -> Callable[[FixedWorldSession], Seen]:
    def body(session: FixedWorldSession) -> Seen:
        settings = {"sync": sync, "outer_lr": outer[0], "outer_momentum": outer[1]}
        session.settings = msgspec.structs.replace(session.settings, **settings)
        run, seen, model = Run(session, "test", "unused"), Seen(), mlp(batchnorm)
        prepare(model)
        session.exchange.barrier()  # a step seeds the generator that other members may still use
        optimizer = make(model.parameters())
        scheduler = schedule(optimizer) if schedule else None
        scaled = torch.amp.GradScaler("cpu", init_scale=8.0) if scaler else None
        run.attach(model, optimizer, scheduler, scaled)
        ids: list[int] = []
        sizes: list[int] = []
        for number, x, y in run.batches(Numbered(), SIZE, epochs, **how):
            ids += number.tolist() if run.share else []
            sizes.append(len(x) if run.share else 0)
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            run.backward(scaled.scale(loss) if scaled else loss, weight=weigh(number) if weigh else None)
            if scaled:
                scaled.unscale_(optimizer)
                scaled.step(optimizer)
                scaled.update()
            else:
                optimizer.step()
            if scheduler is not None and when(run):
                scheduler.step()
            if run.committed:
                seen.rounds.append({k: v.detach().clone() for k, v in model.state_dict().items()})
                seen.rates.append(optimizer.param_groups[0]["lr"])
                seen.ids.append(ids)
                seen.sizes.append(sizes)
                ids, sizes = [], []
        seen.end = seen.rounds[-1]
        return seen

    return body


def same(actual: dict[str, torch.Tensor], other: dict[str, torch.Tensor], within: float) -> None:
    for key in actual:
        assert torch.allclose(actual[key].double(), other[key].double(), rtol=0, atol=within), key


def differ(actual: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return any(not torch.allclose(actual[k], other[k], rtol=0, atol=1e-6) for k in actual)


def each_sample_once_an_epoch(members: list[Seen], epochs: int = 2) -> None:
    counted = Counter(i for seen in members for ids in seen.ids for i in ids)
    assert counted == dict.fromkeys(range(SAMPLES), epochs)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_rounds_of_one_batch_with_plain_averaging_equal_steps(count: int) -> None:
    stepped = together(count, train("step", shares="equal"))[0]
    local = together(count, train("local:1", shares="equal"))
    assert len(stepped.rounds) == len(local[0].rounds)
    for actual, other in zip(stepped.rounds, local[0].rounds, strict=True):
        same(actual, other, within=1e-13)


def by_number(ids: torch.Tensor) -> float:
    return 1.0 + (ids % 7).sum().item()


@pytest.mark.parametrize("weigh", [None, by_number])
def test_members_are_averaged_by_samples_or_weights(weigh: Callable[[torch.Tensor], float] | None) -> None:
    # Shares of 16 and 8 are actual batch each.
    stepped, local = (together(2, train(sync, shares="fixed:2,1", weigh=weigh))[0] for sync in ("step", "local:1"))
    same(stepped.end, local.end, within=1e-13)


def test_single_member_does_all_its_steps_in_sequence() -> None:
    adam = lambda p: torch.optim.Adam(p, 0.01)  # noqa: E731
    same(together(1, train("step", adam))[0].end, together(1, train("local:4", adam))[0].end, within=1e-12)


@pytest.mark.parametrize("outer", [(1.0, 0.0), (0.7, 0.9)])
def test_all_members_are_bitwise_equal_after_every_round(outer: tuple[float, float]) -> None:
    adam = lambda p: torch.optim.Adam(p, 0.01)  # noqa: E731
    members = together(3, train("local:2", adam, outer=outer, batchnorm=True, shares="fixed:1,2,5"))
    assert len(members[0].rounds) == 4
    for number, first in enumerate(members[0].rounds):
        for other in members[1:]:
            for key in (k for k in first if "tracked" not in k):
                assert torch.equal(first[key], other.rounds[number][key]), key
    assert differ(members[0].rounds[0], members[0].rounds[1])
    each_sample_once_an_epoch(members)


def test_momentum_carries_over_from_round_to_round() -> None:
    still, moving = (together(2, train("local:2", outer=(0.7, m)))[0] for m in (0.0, 0.9))
    assert differ(still.rounds[0], moving.rounds[0])
    start = dict(mlp().named_parameters())
    # Nesterov's first step is (1 + momentum) times as long as the plain actual.
    for key, value in start.items():
        plain_step, nesterov = still.rounds[0][key] - value, moving.rounds[0][key] - value
        assert torch.allclose(nesterov, 1.9 * plain_step, rtol=1e-9, atol=1e-12)


def test_faster_member_does_more_steps_of_about_the_same_size() -> None:
    members = together(2, train("local:4", shares="fixed:4,1"))
    assert members[0].sizes[0] == [13, 13, 13, 13, 13, 12]
    assert members[1].sizes[0] == [10, 9]
    each_sample_once_an_epoch(members)


def test_number_of_local_steps_is_learned_from_member_speeds() -> None:
    text = machines(1, "1:0.25@2", sample_s=0.0015)
    members = together(2, emulated(train("local:2", epochs=12), text))
    assert [len(sizes) for sizes in (members[0].sizes[0], members[1].sizes[0])] == [2, 2]
    # Most of the rounds: on a busy machine any of them may be slow.
    fast, slow = (statistics.median(len(sizes) for sizes in member.sizes[8:]) for member in members)
    assert (fast >= 3, slow) == (True, 1)
    each_sample_once_an_epoch(members, 12)


def test_round_ends_with_its_epoch() -> None:
    members = together(2, train("local:3", shares="equal"))
    assert [sum(len(m.ids[r]) for m in members) for r in range(4)] == [72, 24, 72, 24]
    each_sample_once_an_epoch(members)


def test_round_longer_than_an_epoch_is_cut_to_it() -> None:
    members = together(2, train("local:1000", epochs=2))
    assert len(members[0].rounds) == 2
    each_sample_once_an_epoch(members)


def test_micro_batches_make_the_same_local_steps() -> None:
    whole = together(2, train("local:2", shares="fixed:2,1"))
    cut = together(2, train("local:2", shares="fixed:2,1", micro=3))
    same(whole[0].end, cut[0].end, within=1e-12)


def test_custom_weights_count_within_a_batch_and_between_members() -> None:
    by_samples = together(2, train("local:2", shares="fixed:2,1"))
    in_tokens = together(2, train("local:2", shares="fixed:2,1", micro=5, weigh=lambda ids: 3.0 * len(ids)))
    unequal = together(2, train("local:2", shares="fixed:2,1", micro=5, weigh=by_number))
    same(by_samples[0].end, in_tokens[0].end, within=1e-12)
    assert differ(by_samples[0].end, unequal[0].end)


def test_worker_processes_read_the_same_batches() -> None:
    alone = together(1, train("local:2", epochs=1))
    read = together(1, train("local:2", epochs=1, workers=1))
    assert alone[0].ids == read[0].ids
    same(alone[0].end, read[0].end, within=0.0)


def test_catching_up_member_receives_the_result_of_the_others() -> None:
    alone = together(2, train("local:2", shares="equal", outer=(0.7, 0.9)))
    assert len(alone[0].rounds) == 4
    members = together(3, train("local:2", outer=(0.7, 0.9)), catching_up=(2,))
    for number in range(len(members[2].rounds)):
        same(members[0].rounds[number], members[2].rounds[number], within=0.0)
    each_sample_once_an_epoch(members)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_batch_that_does_not_fit_into_memory_is_computed_in_micro_batches(where: str) -> None:
    def check(size: int) -> None:
        if size > 7:
            raise torch.OutOfMemoryError(f"{size} samples do not fit")

    def forward(_model: Any, inputs: Any) -> None:
        if where == "forward" and torch.is_grad_enabled():
            check(len(inputs[0]))

    def backward(_model: Any, _inputs: Any, output: torch.Tensor) -> None:
        if where == "backward" and output.requires_grad:
            output.register_hook(lambda gradient: check(len(gradient)))

    def small(session: FixedWorldSession) -> Seen:
        def hook(model: torch.nn.Module) -> None:
            if session.rank == 1:
                layer: Any = model[0]  # type: ignore[index]
                layer.register_forward_pre_hook(forward)
                layer.register_forward_hook(backward)

        return train("local:2", lambda p: torch.optim.Adam(p, 0.01), shares="equal", prepare=hook)(session)

    roomy = together(2, train("local:2", lambda p: torch.optim.Adam(p, 0.01), shares="equal"))
    tight = together(2, small)
    assert max(tight[1].sizes[-1]) <= 7 < max(roomy[1].sizes[-1])
    same(roomy[0].end, tight[1].end, within=1e-12)


# --- schedules


def test_schedule_advances_as_without_rounds_for_any_split_of_steps() -> None:
    decay = lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.9)  # noqa: E731
    stepped = together(2, train("step", schedule=decay))
    members = together(3, train("local:3", schedule=decay, shares="fixed:6,2,1"), catching_up=(2,))
    for seen in members:
        assert seen.rates == [stepped[0].rates[i] for i in (2, 3, 6, 7)]


@pytest.mark.parametrize("when", [lambda run: run.epoch_ended, lambda run: run.committed])
def test_schedule_per_epoch_or_round_advances_once(when: Callable[[Run], bool]) -> None:
    decay = lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5)  # noqa: E731
    members = together(2, train("local:4", schedule=decay, when=when, shares="fixed:4,1"))
    for seen in members:
        assert seen.rates == [0.025, 0.0125]


def test_irregularly_stepped_schedule_is_refused() -> None:
    decay = lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5)  # noqa: E731
    with pytest.raises((UnsupportedWithLocalSgd, ExchangeBroken), match=r"stepped after some|UnsupportedWithLocalSgd"):
        together(2, train("local:4", schedule=decay, when=lambda run: run._trainer.current.index == 1))


def test_scaler_scales_the_gradients_of_each_member() -> None:
    without, scaled = together(2, train("local:2")), together(2, train("local:2", scaler=True))
    same(without[0].end, scaled[0].end, within=1e-12)
    together(3, train("local:2", scaler=True), catching_up=(2,))


# --- unsupported features


def a_run(session: FixedWorldSession) -> tuple[Run, torch.nn.Module, torch.optim.Optimizer]:
    session.settings = msgspec.structs.replace(session.settings, sync="local:2")
    run, model = Run(session, "test", "unused"), mlp()
    return (run, *run.attach(model, plain(model.parameters())))


def test_streams_exact_mode_and_synchronised_batchnorm_are_refused() -> None:
    def body(session: FixedWorldSession) -> None:
        run, model, _ = a_run(session)
        for use in (
            lambda: run.stream([range(4)], 2),
            lambda: run.sync_batchnorm(model),
            lambda: run.batches(Numbered(), SIZE, exact=4),
        ):
            with pytest.raises(UnsupportedWithLocalSgd, match="local:2"):
                use()

    together(1, body)


@pytest.mark.parametrize("step", [0, 1, 2])
def test_batch_without_optimizer_step_is_refused(step: int) -> None:
    def body(session: FixedWorldSession) -> None:
        run, model, optimizer = a_run(session)
        for number, (_, x, y) in enumerate(run.batches(Numbered(), SIZE)):
            run.backward(torch.nn.functional.mse_loss(model(x), y))
            for _ in range(step if number == 1 else 1):
                optimizer.step()

    if step == 1:
        together(1, body)
    else:
        with pytest.raises(UnusableBackward, match=r"ended without optimizer.step|called twice"):
            together(1, body)


# --- uncommitted rounds


class Breaking(FixedWorldSession):
    """A session whose world breaks on request and is whole again at the next step."""

    broken = False
    broke = 0

    def fail(self, broken: ExchangeBroken) -> None:
        self.broken = True
        self.broke += 1

    def next_step(self) -> int:
        self.broken = False
        return super().next_step()


@pytest.mark.parametrize("sync", ["step", "local:2"])
@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_uncommitted_round_leaves_no_trace(at: int, sync: str) -> None:
    def body(session: FixedWorldSession, breaks: bool) -> str:
        run, model = Run(session, "test", "unused"), mlp(batchnorm=True)
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        run.attach(model, optimizer, scheduler, scaler)
        left = breaks
        for number, (_, x, y) in enumerate(run.batches(Numbered(), SIZE, 1)):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y) + 0 * torch.rand(1).item()
            run.backward(scaler.scale(loss))
            scaler.unscale_(optimizer)
            if left and number == at:
                left = False
                session.fail(ExchangeBroken("on request"))
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
        parts = {"optimizer": optimizer, "scheduler": scheduler, "scaler": scaler, "model": model}
        return checksum(parts)

    def member(session: FixedWorldSession, breaks: bool) -> str:
        session.settings = msgspec.structs.replace(session.settings, sync=sync, outer_momentum=0.9)
        session.__class__ = Breaking
        returned = body(session, breaks)
        assert session.broke == int(breaks)
        return returned

    undisturbed = together(1, lambda session: member(session, False))[0]
    disturbed = together(1, lambda session: member(session, True))[0]
    assert undisturbed == disturbed
