"""What `shoal run` would start, before anything is started."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shoal.errors import BadCount, BadScript, HomeUnusable
from shoal.launch import launch_plan as launch
from shoal.launch import settings_layers
from shoal.launch.child_service import RESTARTS, restart_delay_s


@pytest.mark.parametrize(("text", "bounds"), [("1", (1, 1)), ("4", (4, 4)), ("1:8", (1, 8)), (" 2:2 ", (2, 2))])
def test_members_are_a_number_or_a_range(text: str, bounds: tuple[int, int]) -> None:
    assert launch.parse_members(text) == bounds


@pytest.mark.parametrize("text", ["0", "0:3", "3:2", "", ":", "2:", ":2", "-1", "two", "1:2:3", "1.5", "²"])
def test_anything_else_is_a_usage_error(text: str) -> None:
    with pytest.raises(BadCount) as caught:
        launch.parse_members(text)
    assert caught.value.exit_code == 2
    assert caught.value.do


def test_a_script_that_does_not_exist_names_its_neighbour(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    with pytest.raises(BadScript) as caught:
        launch.check_script("trian.py", tmp_path)
    assert caught.value.do == "did you mean train.py?"


def test_a_directory_is_no_script(tmp_path: Path) -> None:
    with pytest.raises(BadScript, match="not a file"):
        launch.check_script(".", tmp_path)


def test_a_module_is_looked_for_without_importing_it(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("raise SystemExit('imported')")
    launch.check_module("mine", tmp_path)
    with pytest.raises(BadScript):
        launch.check_module("nobody.has.this", tmp_path)


def test_the_run_carries_all_settings_and_the_scripts_own_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    choices = settings_layers.choose(tmp_path, {}, ("lease_s=2", "members=1:3"))
    spec = launch.spec_of("train.py", ("--lr", "1"), module=False, compat="", choices=choices)
    assert (spec.name, spec.argv, spec.cwd, spec.members) == ("train", ("train.py", "--lr", "1"), str(tmp_path), (1, 3))
    assert spec.settings["lease_s"] == 2.0
    assert "members" not in spec.settings


def test_an_argument_that_is_not_utf_8_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    with pytest.raises(BadScript, match="not UTF-8"):
        launch.spec_of(
            "train.py", (os.fsdecode(b"\xff"),), module=False, compat="", choices=settings_layers.choose(tmp_path, {})
        )


def test_the_agent_keeps_its_logs_where_the_coordinator_looks_for_them(tmp_path: Path) -> None:
    choices = settings_layers.choose(tmp_path, {}, ("notice.source=aws", "interface=lo", "preload=json"))
    rendered = launch.render(tmp_path / "c", choices, None)
    words = " ".join(rendered.agent)
    assert f"--dir {tmp_path / 'c'}" in words
    assert "--interface lo --preload json --notice-source aws" in words


def test_a_home_that_cannot_be_written_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(HomeUnusable):
        launch.make(tmp_path / "file" / "coordinators" / "x")


def test_a_service_comes_back_at_once_then_slower_and_not_for_ever() -> None:
    deaths = [float(n) for n in range(RESTARTS + 1)]
    delays = [restart_delay_s(deaths[: n + 1], now=deaths[n]) for n in range(RESTARTS + 1)]
    assert delays[0] == 0.0
    assert delays[-1] is None
    waits = [delay for delay in delays if delay is not None]
    assert waits == sorted(waits)


def test_old_deaths_are_forgiven() -> None:
    assert restart_delay_s([float(n) for n in range(20)] + [1000.0], now=1000.0) == 0.0
