"""`shoal.run` checks its arguments before anything is started."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import shoal
from shoal.errors import BadCount, BadFiles, BadPool, BadRole, BadSettings, InsideMember, NotShippable, ShoalError
from shoal.experiment import run as experiment_run
from shoal.experiment.roles import TRAINER
from shoal.launch import settings_layers


def nothing() -> Any: ...


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("SHOAL_MEMBER", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"on": "mars"}, BadPool, "[pool.mars]"),
        ({"roles": {"traner": shoal.Role()}}, BadRole, "trainer, evaluator, server"),
        ({"roles": {"trainer": 3}}, BadRole, "shoal.Role"),
        ({"roles": {"trainer": shoal.Role(count="many")}}, BadCount, "many"),
        ({"roles": {"trainer": shoal.Role(count="3:2")}}, BadCount, "MIN is greater"),
        ({"roles": {"trainer": shoal.Role(memory="lots")}}, BadRole, "512MiB"),
        ({"roles": {"trainer": shoal.Role(cpus=-1)}}, BadRole, "must not be negative"),
        ({"roles": {"server": shoal.Role(count=2)}}, BadRole, "has no servers"),
        ({"roles": {"server": shoal.Role(count="1:2")}, "sync": "async"}, BadRole, "only trainers may have MIN:MAX"),
        ({"roles": {"evaluator": shoal.Role(count=2)}}, BadRole, "cannot have 2 evaluators"),
        ({"members": 3}, BadSettings, "roles="),
        ({"leas_s": 3}, BadSettings, "did you mean lease_s"),
        ({"lease_s": "soon"}, BadSettings, "lease_s"),
        ({"files": ["nothing.csv"]}, BadFiles, "nothing.csv"),
    ],
)
def test_invalid_argument_is_rejected_and_leaves_no_directory(
    arguments: dict[str, Any], kind: type[ShoalError], message: str, home: Path
) -> None:
    with pytest.raises(kind) as raised:
        shoal.run(nothing, **arguments)
    assert message in str(raised.value)
    assert not home.exists() or not list((home / "coordinators").iterdir())


def test_function_that_cannot_be_pickled_leaves_no_directory(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(NotShippable):
        shoal.run(lambda: nothing())
    assert not list((home / "coordinators").iterdir())


def test_run_inside_a_member_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_MEMBER", "local/0")
    with pytest.raises(InsideMember, match="inside a run"):
        shoal.run(nothing)


POOLS = """
[pool.spot]
engine = "slurm"
labels = {gpu = "a100"}
[pool.rays]
engine = "ray"
labels = {gpu = "a100", zone = "b"}
[pool.lab]
engine = "local"
"""


def test_role_may_have_pools_and_labels(tmp_path: Path) -> None:
    (tmp_path / "shoal.toml").write_text(POOLS)

    def spec_for(roles: dict[str, shoal.Role], **settings: Any) -> Any:
        options = experiment_run._options(roles, settings, "local")
        resolved = settings_layers.resolve(tmp_path, {}, options=options)
        return experiment_run._spec(Path("/nowhere"), "fn", roles, resolved, {})

    roles = {TRAINER: shoal.Role(on="spot", where="gpu=a100"), "evaluator": shoal.Role(on="lab")}
    spec = spec_for(roles, budget=2.0)
    assert (spec.on, spec.where, spec.budget) == (("spot",), {"gpu": "a100"}, 2.0)
    assert spec.roles["evaluator"].on == ("lab",)
    assert spec_for({TRAINER: shoal.Role(where="zone=b")}).on == ("rays",)


def test_pools_of_trainers_that_are_given_twice_are_rejected() -> None:
    with pytest.raises(BadRole):
        experiment_run._options({TRAINER: shoal.Role(on="spot")}, {}, "lab")
