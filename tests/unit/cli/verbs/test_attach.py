"""`shoal attach`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

import pytest
from click.testing import CliRunner
from tests.unit.directories import ended_coordinator

from shoal.cli import foreground
from shoal.cli.main import shoal
from shoal.cli.verbs import attach
from shoal.errors import CoordinatorUnreachable
from shoal.launch.run_lookup import SUPERVISOR_FILE, CoordinatorRef


def live_coordinator(directory: Path) -> CoordinatorRef:
    return CoordinatorRef("c", "u", "t", directory, cast(Any, object()), cast(Any, object()))


def test_end_of_a_coordinator_is_noticed_unless_it_is_about_to_be_restarted(tmp_path: Path) -> None:
    check = attach.end_check(live_coordinator(tmp_path))
    (tmp_path / "pid").write_text(str(os.getpid()))
    assert check() == []
    (tmp_path / "pid").write_text(str(2**22 + 1))
    with pytest.raises(CoordinatorUnreachable):
        check()
    (tmp_path / SUPERVISOR_FILE).write_text(str(os.getppid()))
    assert check() == []


def test_ended_run_is_summarised_with_its_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path))
    ended_coordinator(tmp_path, "a")
    result = CliRunner().invoke(shoal, ["attach", "run-a"])
    assert result.exit_code == 0, result.output
    assert "run-a" in result.output


def test_interrupt_detaches_and_says_that_the_run_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setenv("SHOAL_HOME", str(tmp_path))
    monkeypatch.setattr(foreground, "conclude", interrupt)
    ended_coordinator(tmp_path, "a")
    result = CliRunner().invoke(shoal, ["attach", "run-a"])
    assert result.exit_code == 0
    assert "detached; run run-a continues" in result.output
