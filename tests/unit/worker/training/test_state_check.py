"""Members that drift apart are noticed before the next step is applied; the error names the tensor and a cause."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from shoal.core.state_check import StateDigest, TensorDigest
from shoal.core.step_report import StepReport
from shoal.core.world import Address, Seat, World
from shoal.errors import StateDiverged
from shoal.settings import parse_settings
from shoal.testing.threaded_world import FixedWorldSession, together
from shoal.torch.run import Run
from shoal.worker.training.state_check import MAX_REPAIRS, StateCheck
from shoal.worker.transport.exchange_broken import ExchangeBroken

X = torch.randn(64, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
DATA = TensorDataset(X, X.sum(1, keepdim=True))
Spoil = Callable[["Member"], None]


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = torch.nn.Linear(4, 3).double(), torch.nn.Linear(3, 1).double()
        self.register_buffer("seen", torch.zeros(1))
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view(parameter.shape) / (number + 1))

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(torch.tanh(self.body(x)))


class Member:
    """One member of a world in threads; `spoil` is called in every step before the optimizer's."""

    def __init__(self, session: FixedWorldSession, directory: Path, sync: str = "step", **settings: Any) -> None:
        session.settings = msgspec.structs.replace(session.settings, sync=sync, **settings)
        self.session, self.model, self.steps = session, Net(), 0
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.run = Run(session, "unit", str(directory))
        self.run.attach(self.model, self.optimizer)

    @property
    def odd(self) -> bool:
        return self.session.rank == 1

    def train(self, spoil: Spoil, epochs: int = 2) -> int:
        for x, y in self.run.batches(DATA, size=8, epochs=epochs):
            self.run.backward(torch.nn.functional.mse_loss(self.model(x), y))
            spoil(self)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.steps += self.run.committed
        return self.steps


def train(tmp_path: Path, spoil: Spoil, count: int = 2, **settings: Any) -> list[int]:
    return together(count, lambda session: Member(session, tmp_path, **settings).train(spoil))


def add_noise(member: Member) -> None:
    if member.odd and member.steps == 3:
        for parameter in member.model.head.parameters():
            assert parameter.grad is not None
            parameter.grad += 1e-3


def test_gradient_changed_on_one_member_stops_the_run_and_names_the_parameter(tmp_path: Path) -> None:
    with pytest.raises(StateDiverged) as caught:
        train(tmp_path, add_noise)
    # Step 3 was spoiled, states are compared before steps 0, 1, 3, 7.
    assert caught.value.where == "before step 7, world 1"
    assert caught.value.why.startswith("head.weight differs (")
    assert "equal before step 3" in caught.value.why
    assert "gradients were changed after run.backward" in caught.value.do


def test_optimizer_that_is_not_attached_is_named_as_the_cause(tmp_path: Path) -> None:
    class Apart(Member):
        def __init__(self, session: FixedWorldSession, directory: Path) -> None:
            super().__init__(session, directory)
            self.optimizer.param_groups[0]["params"] = list(self.model.body.parameters())

    def step_of_another(member: Member) -> None:
        with torch.no_grad():
            for parameter in member.model.head.parameters():
                parameter -= 0.1 * member.session.rank

    with pytest.raises(StateDiverged, match=r"head\.weight differs .* at rank 0") as caught:
        together(2, lambda session: Apart(session, tmp_path).train(step_of_another))
    assert "not attached" in caught.value.do


def test_optimizer_state_that_differs_is_noticed_before_the_parameters_do(tmp_path: Path) -> None:
    def spoil(member: Member) -> None:
        state = member.optimizer.state.get(member.model.head.bias)
        if member.odd and state and member.steps == 3:
            state["exp_avg_sq"] += 1e-12

    with pytest.raises(StateDiverged) as caught:
        train(tmp_path, spoil)
    assert "head.bias" in caught.value.why


def test_difference_in_the_last_step_is_noticed_at_the_end(tmp_path: Path) -> None:
    """No step follows whose report would carry the checksum: the run once ended well with different parameters."""

    def spoil_last(member: Member) -> None:
        if member.odd and member.steps == 15:
            member.optimizer.param_groups[0]["weight_decay"] = 0.1

    with pytest.raises(StateDiverged, match=r"body.weight differs") as error:
        train(tmp_path, spoil_last)
    assert "after the last step, world 1" in str(error.value)


def test_training_mode_of_one_member_alone_is_noticed(tmp_path: Path) -> None:
    def forget_to_train(member: Member) -> None:
        if member.odd and member.steps == 2:
            member.model.eval()

    with pytest.raises(StateDiverged, match=r"modules in training mode differs \(3 at rank 0, 0 at rank 1\)") as error:
        train(tmp_path, forget_to_train)
    assert "model.eval() was called on one member alone" in str(error.value)


def test_evaluation_on_one_member_between_two_steps_is_no_difference(tmp_path: Path) -> None:
    def evaluate(member: Member) -> None:
        if member.steps == 0:
            member.model.body.register_forward_pre_hook(lambda *_: member.model.train() and None)
        if member.odd:
            member.model.eval()

    assert train(tmp_path, evaluate) == [16, 16]


def test_members_that_agree_train_to_the_end(tmp_path: Path) -> None:
    assert train(tmp_path, lambda _: None, count=3) == [16, 16, 16]


def test_buffer_of_a_member_s_own_is_warned_of_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def count(member: Member) -> None:
        member.model.seen += member.session.rank

    assert train(tmp_path, count) == [16, 16]
    text = capfd.readouterr().err
    assert text.count("warning[S351] members hold different values of the buffer seen") == 2  # once a member


def test_check_can_be_turned_off(tmp_path: Path) -> None:
    assert train(tmp_path, add_noise, on_divergence="off") == [16, 16]


def test_rounds_of_local_sgd_compare_the_parameters_alone(tmp_path: Path) -> None:
    def own_optimizer_state(member: Member) -> None:
        for state in member.optimizer.state.values():
            state["exp_avg"] += member.session.rank * 1e-6

    train(tmp_path, own_optimizer_state, sync="local:2")

    def edit_between_rounds(member: Member) -> None:
        if member.odd and member.run.step == 2:
            member.run._training_state.parts["model"].get_parameter("head.bias").data += 1.0

    class Edits(Member):
        def train(self, spoil: Spoil, epochs: int = 2) -> int:
            for x, y in self.run.batches(DATA, size=8, epochs=epochs):
                self.run.backward(torch.nn.functional.mse_loss(self.model(x), y))
                self.optimizer.step()
                if self.run.committed:
                    spoil(self)
            return 0

    with pytest.raises(StateDiverged, match=r"head\.bias"):
        together(2, lambda session: Edits(session, tmp_path, sync="local:2").train(edit_between_rounds))


class Diverged:
    """The check of one of three ranks, of which rank 2 holds another weight than the others."""

    def __init__(self, rank: int, on_divergence: str = "stop") -> None:
        self.rank, self.settings = rank, parse_settings({"on_divergence": on_divergence})
        self.calls: list[str] = []
        self.tensors = (TensorDigest("weight", "parameter", rank // 2, (float(rank // 2),)),)
        self.check = StateCheck(self, lambda: self.tensors, lambda: "cpu")  # type: ignore[arg-type]
        seats = tuple(Seat(f"m/{number}", "1", Address("h", 1)) for number in range(3))
        self.world = World(1, seats, 0)

    def forget_state(self) -> None:
        self.calls.append("forget")

    def barrier(self) -> None:
        self.calls.append("barrier")
        raise ExchangeBroken("a peer was faster")

    def gather(self, row: Any) -> Any:
        rows = np.stack([row, row, row])
        if len(row) > 3:
            rows[:, :2] = [[0, 0], [0, 0], [1, 1]]
        return SimpleNamespace(result=lambda: rows)

    def compare(self) -> None:
        reports = [StepReport(5, compute_s=0.1, checksum=1 + rank // 2) for rank in range(3)]
        step: Any = SimpleNamespace(
            number=5, reports=reports, digest=StateDigest(self.tensors), exchange=self, world=self.world
        )
        self.check.compare(step)


def test_all_meet_before_the_first_raises_that_they_differ() -> None:
    member = Diverged(0)
    with pytest.raises(StateDiverged, match="weight differs"):
        member.compare()
    assert member.calls == ["barrier"], "a member that ends at once takes the details from the others"


def test_minority_drops_its_state_before_the_world_ends(capfd: pytest.CaptureFixture[str]) -> None:
    for rank, calls in ((0, ["barrier"]), (2, ["forget", "barrier"])):
        member = Diverged(rank, "repair")
        with pytest.raises(ExchangeBroken, match=r"m/2 diverged .* takes over the state of m/0"):
            member.compare()
        assert member.calls == calls
    assert "weight differs" in capfd.readouterr().err


def test_cause_that_persists_stops_the_run_after_some_repairs() -> None:
    member = Diverged(2, "repair")
    for _ in range(MAX_REPAIRS):
        with pytest.raises(ExchangeBroken):
            member.compare()
    with pytest.raises(StateDiverged):
        member.compare()
    assert member.calls.count("forget") == MAX_REPAIRS


def test_state_is_not_hashed_while_a_rank_catches_up() -> None:
    member = Diverged(0)
    assert member.check.digest(5, member.world, catching_up=(1,)) is None
    assert member.check.digest(5, member.world, catching_up=()) is not None
    assert Diverged(0, "off").check.digest(5, member.world, catching_up=()) is None
