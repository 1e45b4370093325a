"""Which coordinators a command addresses."""

from __future__ import annotations

from pathlib import Path

import pytest

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
