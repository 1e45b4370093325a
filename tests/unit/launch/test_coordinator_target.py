"""Which coordinators a command addresses."""

from __future__ import annotations

import pwd
from pathlib import Path

import pytest

from shoal import exit_codes
from shoal.cli.main import run
from shoal.errors import UsageError
from shoal.launch.coordinator_target import CoordinatorTarget, home


def test_options_address_the_same_coordinator_in_another_command() -> None:
    assert CoordinatorTarget(Path("h")).options == ""
    assert CoordinatorTarget(Path("h"), "http://a:1").options == " --url http://a:1"
    assert CoordinatorTarget(Path("h"), "http://a:1", "my token").options == (
        " --url http://a:1 --token-file 'my token'"
    )


def test_home_is_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHOAL_HOME", "below")
    assert home() == tmp_path / "below"


def test_user_without_a_home_is_told_to_set_one(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def unknown_user(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("SHOAL_HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown_user)
    with pytest.raises(UsageError, match="HOME is not set"):
        home()
    assert run(["ps"]) == exit_codes.BAD_USAGE
    assert "SHOAL_HOME" in capfd.readouterr().err
