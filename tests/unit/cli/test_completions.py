"""Completion of values in the shell."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.shell_completion import ShellComplete
from tests.unit.directories import ended_coordinator

from shoal.cli.main import VERBS, shoal
from shoal.store import sqlite_views


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "home"))
    return tmp_path


def complete(*arguments: str) -> list[str]:
    """Return what the shell would suggest for the last of the arguments."""
    completion = ShellComplete(shoal, {}, "shoal", "_SHOAL_COMPLETE")
    return [item.value for item in completion.get_completions(list(arguments[:-1]), arguments[-1])]


@pytest.mark.parametrize("verb", ["status", "why", "stop", "logs", "attach", "rm", "resume", "fetch", "config", "cost"])
def test_runs_are_completed_by_id_and_name(verb: str, project: Path) -> None:
    assert verb in VERBS
    ended_coordinator(project / "home", "a")
    ended_coordinator(project / "home", "b")
    assert complete(verb, "run-") == ["run-b", "run-a"]
    assert "train" in complete(verb, "tr")


def test_damaged_records_suggest_nothing_and_do_not_hide_others(project: Path) -> None:
    ended_coordinator(project / "home", "a")
    damaged = ended_coordinator(project / "home", "b")
    (damaged / sqlite_views.FILE).write_text("not a database")
    assert complete("status", "run-") == ["run-a"]


def test_errors_suggest_nothing(project: Path) -> None:
    assert complete("status", "") == []
    (project / "shoal.toml").write_text("not toml")
    assert complete("run", "--on", "") == []


def test_settings_are_completed_and_flags_have_values() -> None:
    assert complete("run", "--set", "retain") == ["retain_days="]
    assert complete("config", "--set", "lease") == ["lease_s="]
    assert complete("run", "--set", "tensorboard=t") == ["tensorboard=true"]


def test_error_codes_are_completed() -> None:
    assert complete("explain", "S116") == ["S116"]
    assert len(complete("explain", "S1")) > 5


def test_pools_are_completed_after_those_of_the_list(project: Path) -> None:
    (project / "shoal.toml").write_text('[pool.spot]\nengine = "local"\n[pool.lab]\nengine = "local"\n')
    assert complete("run", "--on", "") == ["spot", "lab"]
    assert complete("run", "--on", "spot,") == ["spot,lab"]
    assert complete("run", "--servers-on", "l") == ["lab"]
