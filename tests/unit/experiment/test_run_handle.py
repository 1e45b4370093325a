"""The handle of a run, on the records of an ended coordinator."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.views import run_view, story_line

from shoal.coordinator.storage.logs import Logs
from shoal.errors import RunFailed, UsageError
from shoal.experiment.run_handle import RunHandle, Story
from shoal.store.sqlite_views import SqliteViews
from shoal.wire.api import EvaluationView, RunView


def handle_of(directory: Path, view: RunView) -> RunHandle:
    (directory / "journal.jsonl").touch()
    views = SqliteViews(directory)
    views.put_run(view)
    views.put_lines([story_line(1, "MembershipNote", "hello", run=view.run, reason="first", step=3)])
    views.close()
    Logs(directory).append(view.run, "local/0", ["one", "two"])
    return RunHandle(directory, view, None)


def test_metrics_of_the_evaluator_do_not_hide_those_of_the_trainers(tmp_path: Path) -> None:
    evaluation = EvaluationView(step=9, metrics={"loss": 0.5, "accuracy": 0.9}, at=1.0, evaluations=1)
    view = run_view("r", status="done", step=10, epoch=2, loss=0.25, metrics={"lr": 0.1}, evaluation=evaluation)
    assert handle_of(tmp_path, view).metrics() == {
        "step": 10.0,
        "epoch": 2.0,
        "loss": 0.25,
        "lr": 0.1,
        "val_loss": 0.5,
        "accuracy": 0.9,
    }


def test_logs_and_story_are_readable_after_the_run(tmp_path: Path) -> None:
    handle = handle_of(tmp_path, run_view("r", status="done"))
    assert handle.logs() == "local/0 | one\nlocal/0 | two"
    assert handle.logs("local/0") == "one\ntwo"
    assert str(handle.story()).endswith(" step 3: hello (first)")
    assert str(Story()) == "nothing has happened yet"


def test_logs_of_a_member_that_never_was_are_an_error(tmp_path: Path) -> None:
    handle = handle_of(tmp_path, run_view("r", status="done"))
    with pytest.raises(UsageError, match="run r has no member local/7") as error:
        handle.logs("local/7")
    assert "local/0" in error.value.do


def test_wait_returns_the_view_or_raises_the_failure(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert handle_of(tmp_path / "a", run_view("r", status="done")).wait(1.0).status == "done"
    with pytest.raises(RunFailed) as failed:
        handle_of(tmp_path / "b", run_view("r", status="failed", step=7, reason="it raised")).wait(1.0)
    assert (failed.value.what, failed.value.why) == ("run r failed at step 7", "it raised")
