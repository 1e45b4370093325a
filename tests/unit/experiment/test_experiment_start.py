"""What `shoal.run` refuses, before anything is started."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import shoal
from shoal.errors import BadCount, BadFiles, BadPool, BadRole, BadSettings, InsideMember, NotShippable, ShoalError
from shoal.experiment import roles


def nothing() -> Any: ...


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("SHOAL_MEMBER", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


@pytest.mark.parametrize(
    ("arguments", "kind", "said"),
    [
        ({"on": "mars"}, BadPool, "[pool.mars]"),
        ({"roles": {"traner": shoal.Role()}}, BadRole, "trainer, evaluator, server"),
        ({"roles": {"trainer": 3}}, BadRole, "shoal.Role"),
        ({"roles": {"trainer": shoal.Role(count="many")}}, BadCount, "many"),
        ({"roles": {"trainer": shoal.Role(count="3:2")}}, BadCount, "MIN is greater"),
        ({"roles": {"trainer": shoal.Role(memory="lots")}}, BadRole, "512MiB"),
        ({"roles": {"trainer": shoal.Role(cpus=-1)}}, BadRole, "less than nothing"),
        ({"roles": {"server": shoal.Role(count=2)}}, BadRole, "has no servers"),
        ({"roles": {"server": shoal.Role(count="1:2")}, "sync": "async"}, BadRole, "only the number of trainers"),
        ({"roles": {"evaluator": shoal.Role(count=2)}}, BadRole, "cannot have 2 evaluators"),
        ({"roles": {"evaluator": shoal.Role()}, "sync": "async"}, BadRole, "has no evaluator"),
        ({"members": 3}, BadSettings, "roles="),
        ({"leas_s": 3}, BadSettings, "did you mean lease_s"),
        ({"lease_s": "soon"}, BadSettings, "lease_s"),
        ({"files": ["nothing.csv"]}, BadFiles, "nothing.csv"),
    ],
)
def test_what_cannot_be_is_said_and_nothing_is_left(
    arguments: dict[str, Any], kind: type[ShoalError], said: str, home: Path
) -> None:
    with pytest.raises(kind) as raised:
        shoal.run(nothing, **arguments)
    assert said in str(raised.value)
    assert not home.exists() or not list((home / "coordinators").iterdir())


def test_a_function_that_cannot_travel_leaves_nothing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(NotShippable):
        shoal.run(lambda: nothing())
    assert not list((home / "coordinators").iterdir())


def test_a_member_does_not_start_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_MEMBER", "local/0")
    with pytest.raises(InsideMember, match="inside a run"):
        shoal.run(nothing)


@pytest.mark.parametrize(
    ("text", "found"),
    [("", 0), ("2GiB", 2 << 30), ("1.5g", 3 << 29), ("512 MiB", 512 << 20), ("100", 100), ("1TB", 1 << 40), (7, 7)],
)
def test_memory_is_read_as_people_write_it(text: int | str, found: int) -> None:
    assert shoal.Role(memory=text).memory_bytes == found


def test_every_role_tells_the_agents_what_it_has() -> None:
    told = roles.specs({"trainer": shoal.Role("1:8", "1GiB", 4)})["trainer"]
    assert (told.count, told.cpus, told.memory_bytes) == (8, 4, 1 << 30)
