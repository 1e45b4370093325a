"""Records of an ended coordinator."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.views import run_view

from shoal.errors import StorageError, UnknownRun
from shoal.launch.offline_records import OfflineRecords
from shoal.store import sqlite_views


def records(directory: Path) -> OfflineRecords:
    views = sqlite_views.SqliteViews(directory)
    views.put_run(run_view("a", status="training"))
    views.put_run(run_view("b", status="failed", reason="it raised"))
    views.close()
    return OfflineRecords(directory)


def test_run_that_had_not_ended_is_resumable_and_says_what_it_was(tmp_path: Path) -> None:
    view = records(tmp_path).run("a")
    assert (view.status, view.members, view.world_size) == ("resumable", (), 0)
    assert view.reason == "its coordinator ended while the run was training"


def test_ended_run_is_shown_as_it_was(tmp_path: Path) -> None:
    view = records(tmp_path).run("b")
    assert (view.status, view.reason) == ("failed", "it raised")


def test_unknown_run_and_unreadable_records_are_reported(tmp_path: Path) -> None:
    with pytest.raises(UnknownRun):
        records(tmp_path).run("c")
    for file in tmp_path.iterdir():
        file.unlink()
    (tmp_path / sqlite_views.FILE).write_text("not a database")
    with pytest.raises(StorageError):
        OfflineRecords(tmp_path).runs()
