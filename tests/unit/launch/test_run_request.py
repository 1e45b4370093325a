"""A run request is checked before anything is started."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shoal.errors import BadBudget, BadCount, BadScript, UsageError
from shoal.launch import run_request, settings_layers


@pytest.mark.parametrize(("text", "bounds"), [("1", (1, 1)), ("4", (4, 4)), ("1:8", (1, 8)), (" 2:2 ", (2, 2))])
def test_member_count_is_a_number_or_a_range(text: str, bounds: tuple[int, int]) -> None:
    assert run_request.parse_members(text) == bounds


@pytest.mark.parametrize("text", ["0", "0:3", "3:2", "", ":", "2:", ":2", "-1", "two", "1:2:3", "1.5", "²"])
def test_invalid_member_count_is_a_usage_error(text: str) -> None:
    with pytest.raises(BadCount) as caught:
        run_request.parse_members(text)
    assert caught.value.exit_code == 2
    assert caught.value.do


@pytest.mark.parametrize("amount", [0.0, -1.0, float("nan"), float("inf")])
def test_budget_must_be_positive_and_finite(amount: float) -> None:
    run_request.check_budget(12.5)
    with pytest.raises(BadBudget):
        run_request.check_budget(amount)


def test_missing_script_is_reported_with_a_similar_name(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    with pytest.raises(BadScript) as caught:
        run_request.check_script("trian.py", tmp_path)
    assert caught.value.do == "did you mean train.py?"


def test_directory_is_not_a_script(tmp_path: Path) -> None:
    with pytest.raises(BadScript, match="not a file"):
        run_request.check_script(".", tmp_path)


def test_module_is_looked_up_without_importing_it(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("raise SystemExit('imported')")
    run_request.check_module("mine", tmp_path)
    with pytest.raises(BadScript):
        run_request.check_module("missing.inner.module", tmp_path)


def test_run_carries_settings_arguments_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    settings = settings_layers.resolve(tmp_path, {}, ("lease_s=2", "members=1:3"))
    spec = run_request.build_run_spec(
        "train.py", ("--lr", "1"), module=False, compat="", settings=settings, env=("A=1", "B=x=y")
    )
    assert (spec.name, spec.argv, spec.cwd, spec.members) == ("train", ("train.py", "--lr", "1"), str(tmp_path), (1, 3))
    assert spec.settings["lease_s"] == 2.0
    assert "members" not in spec.settings
    assert spec.env == {"A": "1", "B": "x=y"}


@pytest.mark.parametrize("assignment", ["A", "=1", "1A=2", "A B=1", "SHOAL_MEMBER=local/0"])
def test_invalid_environment_variable_is_a_usage_error(assignment: str) -> None:
    with pytest.raises(UsageError):
        run_request.parse_env([assignment])


def test_argument_that_is_not_utf_8_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    settings = settings_layers.resolve(tmp_path, {})
    with pytest.raises(BadScript, match="not UTF-8"):
        run_request.build_run_spec("train.py", (os.fsdecode(b"\xff"),), module=False, compat="", settings=settings)


def test_script_with_a_syntax_error_is_refused_with_its_line_and_a_caret(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("def f():\n    x = = 2\n")
    with pytest.raises(BadScript, match="is not valid Python: invalid syntax") as caught:
        run_request.check_script("train.py", tmp_path)
    assert caught.value.where == f"{tmp_path / 'train.py'}, line 2"
    assert "  why    x = = 2\n             ^\n" in str(caught.value)


def test_only_python_files_are_compiled(tmp_path: Path) -> None:
    (tmp_path / "train").write_text("x = = 2\n")
    (tmp_path / "warns.py").write_text("if 1 is 1: pass\n")
    run_request.check_script("train", tmp_path)
    run_request.check_script("warns.py", tmp_path)
