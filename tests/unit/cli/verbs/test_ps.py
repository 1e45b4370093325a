"""The table of `shoal ps`."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.unit.directories import ended_coordinator
from tests.unit.views import run_view

from shoal.cli.options import OutputOptions
from shoal.cli.output import table
from shoal.cli.verbs import ps
from shoal.wire.api import ForecastView


def test_queued_run_is_shown_with_its_place_and_what_it_waits_for() -> None:
    queued = run_view(
        status="starting", queued=2, waits_for="a slot; held by other (4)", since=10.0, started=10.0, user="bob"
    )
    shown = ps.text([queued, run_view(started=10.0)], 70.0)
    assert "starting, number 2" in shown
    assert "a slot; held by other (4), for 1 min 0 s" in shown
    assert "WAITS FOR" not in ps.text([run_view(started=10.0)], 70.0)


def test_ended_run_is_shown_without_members() -> None:
    size = {"world_size": 2, "members_min": 1, "members_max": 3}
    assert " 2 (1:3) " in ps.text([run_view(**size)], 200.0)
    assert " 0 (1:3) " in ps.text([run_view(status="stopped", ended=150.0, **size)], 200.0)


def test_forecast_is_shown_in_its_own_column() -> None:
    view = run_view(forecast=ForecastView(600.0, 500.0, 700.0, 0.9))
    assert table.rough(600.0) in ps.text([view], 200.0)


def test_start_time_is_shown_with_its_date_unless_it_is_today() -> None:
    noon = time.mktime((2026, 11, 17, 12, 0, 0, 0, 0, -1))
    shown = ps.text([run_view("a", started=noon), run_view("b", started=noon - 86400)], noon + 60)
    assert re.search(r"^a .* 12:00:00 +1 min 0 s", shown, re.M)
    assert re.search(r"^b .* 2026-11-16 12:00 +24 h", shown, re.M)
    assert "STARTED" in shown


def test_name_with_escape_codes_does_not_reach_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    views = [run_view("r", name="evil\x1b]0;title\x07", user="bob")]
    OutputOptions().result(views, lambda: ps.text(views, 200.0))
    assert "\x1b" not in capsys.readouterr().out


def test_damaged_coordinator_is_listed_with_its_code_below_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended_coordinator(tmp_path, "good")
    bad = ended_coordinator(tmp_path, "bad")
    (bad / "views.sqlite").unlink()
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path))
    shown = CliRunner().invoke(ps.command, [])
    assert shown.exit_code == 0
    assert "run-good" in shown.output
    assert re.search(r"^bad +damaged +S523 +this directory was written by an older version", shown.output, re.M)
    as_json = CliRunner().invoke(ps.command, ["--json"])
    assert [view["run"] for view in json.loads(as_json.stdout)] == ["run-good"]
    assert json.loads(as_json.stderr)["code"] == "S523"
