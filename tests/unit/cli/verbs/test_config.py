"""`shoal config` shows the settings in force, or those of a run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.unit.views import run_view

from shoal.cli.main import run as shoal_cli
from shoal.cli.verbs import config
from shoal.store.sqlite_views import SqliteViews


def test_settings_of_a_run_are_shown_beside_their_defaults() -> None:
    shown = config.run_text(run_view(settings={"lease_s": 7.5, "checkpoint.keep": 2, "ancient": True}))
    assert re.search(r"^lease_s +7.5 +3.0 +\S", shown, re.M)
    assert re.search(r"^checkpoint.keep +2 +same +\S", shown, re.M)
    assert re.search(r"^ancient +true +- +unknown to this version", shown, re.M)


def test_settings_of_an_ended_run_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path))
    directory = tmp_path / "coordinators" / "x"
    directory.mkdir(parents=True)
    (directory / "journal.jsonl").touch()
    views = SqliteViews(directory)
    views.put_run(run_view("train-1", status="done", settings={"lease_s": 7.5}))
    views.close()
    assert shoal_cli(["config", "--json", "train-1"]) == 0
    assert json.loads(capsys.readouterr().out) == {"lease_s": 7.5}


def test_settings_of_a_run_cannot_be_changed(capsys: pytest.CaptureFixture[str]) -> None:
    assert shoal_cli(["config", "train-1", "--set", "lease_s=1"]) == 2
    assert "--set cannot change the settings of a run" in capsys.readouterr().err
