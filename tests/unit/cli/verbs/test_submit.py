"""`shoal submit` names the commands that find the run again."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.views import run_view

from shoal.cli.main import run as shoal_cli
from shoal.cli.verbs import submit
from shoal.launch.coordinator_target import CoordinatorTarget


def test_submit_without_a_coordinator_is_a_usage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SHOAL_URL", raising=False)
    (tmp_path / "train.py").touch()
    assert shoal_cli(["submit", "train.py"]) == 2
    assert "SHOAL_URL" in capsys.readouterr().err


def test_queued_run_is_shown_with_its_place_and_user() -> None:
    queued = run_view(status="starting", queued=2, waits_for="a slot; held by other (4)", user="bob")
    assert "number 2, waits for a slot" in submit.text(queued)
    assert "as a run of bob" in submit.text(queued)


def test_advised_commands_address_the_same_coordinator() -> None:
    target = CoordinatorTarget(Path("home"), "https://head:29300", "/my tokens/ada")
    commands = submit.text(run_view(), target.options).splitlines()[1:]
    assert len(commands) == 3
    assert all(line.endswith(" --url https://head:29300 --token-file '/my tokens/ada'") for line in commands)
    assert submit.text(run_view()).endswith("shoal stop train-7f3k"), "without a URL, none is advised"
