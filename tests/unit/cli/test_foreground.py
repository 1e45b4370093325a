"""How a run in the foreground ends: what is printed, and with which exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.unit.views import run_view

from shoal import exit_codes
from shoal.cli import foreground
from shoal.cli.follower import FollowResult
from shoal.cli.options import OutputOptions
from shoal.errors import BadSettings, FetchFailed, UsageError
from shoal.launch.coordinator_target import CoordinatorTarget
from shoal.launch.launch_plan import LaunchPlan
from shoal.wire.api import ErrorView


def test_run_that_is_done_has_a_summary_and_exit_code_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert foreground.conclude(OutputOptions(), FollowResult(run_view("r", status="done"))) == exit_codes.OK
    shown = capsys.readouterr()
    assert "done" in shown.out
    assert shown.err == ""


def test_quiet_run_prints_its_summary_only_if_it_failed(capsys: pytest.CaptureFixture[str]) -> None:
    quiet = OutputOptions(quiet=True)
    assert foreground.conclude(quiet, FollowResult(run_view("r", status="stopped"))) == exit_codes.RESUMABLE
    assert capsys.readouterr() == ("", "")
    assert foreground.conclude(quiet, FollowResult(run_view("r", status="failed"))) == exit_codes.FAILED
    assert "failed" in capsys.readouterr().err


def test_problem_of_a_run_is_shown_as_an_error_with_its_code(capsys: pytest.CaptureFixture[str]) -> None:
    problem = ErrorView(BadSettings.code, "unknown setting 'x'", "", "no such", "remove it")
    view = run_view("r", status="failed", problem=problem, exit_code=2)
    assert foreground.conclude(OutputOptions(), FollowResult(view)) == 2
    assert f"error[{BadSettings.code}] unknown setting 'x'" in capsys.readouterr().err


def test_json_ends_with_one_event(capsys: pytest.CaptureFixture[str]) -> None:
    foreground.conclude(OutputOptions(json=True), FollowResult(run_view("r", status="done")))
    assert json.loads(capsys.readouterr().out)["event"] == "end"


def test_standing_coordinator_needs_a_token_file() -> None:
    target = CoordinatorTarget(Path("/home"), "http://127.0.0.1:9", "")
    with pytest.raises(UsageError, match="--url needs --token-file"):
        foreground.submit_to_standing(target, LaunchPlan("", coordinator=(), agent=()))


def test_failed_download_is_shown_and_does_not_end_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    def fetch() -> tuple[str, ...]:
        raise FetchFailed("model.pt was not downloaded", do="shoal fetch r")

    foreground._download_outputs(OutputOptions(), fetch)
    assert "model.pt was not downloaded" in capsys.readouterr().err
    foreground._download_outputs(OutputOptions(), lambda: ("model.pt", "log.csv"))
    assert capsys.readouterr().out == "downloaded model.pt, log.csv\n"
