"""Lookup of the run that a user names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.unit.directories import ended_coordinator
from tests.unit.views import run_view, story_line

from shoal.errors import AmbiguousRun, DirectoryVersionMismatch, UnknownRun, UsageError
from shoal.launch import run_lookup
from shoal.launch.coordinator_target import CoordinatorTarget
from shoal.launch.offline_records import OfflineRecords
from shoal.store import journal
from shoal.wire.protocol import PROTOCOL

ENDED_COORDINATOR = run_lookup.CoordinatorRef("c", "", "", None, None, OfflineRecords(Path("nowhere")))


def pairs(*views: Any) -> list[tuple[run_lookup.CoordinatorRef, Any]]:
    return [(ENDED_COORDINATOR, view) for view in views]


def test_id_wins_over_name_and_beginning() -> None:
    runs = pairs(run_view("a", name="b"), run_view("b", name="c"), run_view("bb", name="d"))
    assert run_lookup.select_run(runs, "b")[1].run == "b"


def test_beginning_is_enough_if_only_one_run_has_it() -> None:
    runs = pairs(run_view("train-aaaa", name="x"), run_view("train-bbbb", name="y"))
    assert run_lookup.select_run(runs, "train-b")[1].run == "train-bbbb"
    with pytest.raises(AmbiguousRun) as caught:
        run_lookup.select_run(runs, "train-")
    assert "train-aaaa" in caught.value.why
    assert "train-bbbb" in caught.value.why


def test_active_run_wins_among_runs_of_one_name() -> None:
    runs = pairs(run_view("1", status="done"), run_view("2"), run_view("3", status="failed"))
    assert run_lookup.select_run(runs, "train")[1].run == "2"


def test_two_active_runs_of_one_name_are_ambiguous() -> None:
    with pytest.raises(AmbiguousRun):
        run_lookup.select_run(pairs(run_view("1"), run_view("2")), "train")


def test_unknown_run_is_reported_with_a_similar_name() -> None:
    with pytest.raises(UnknownRun) as caught:
        run_lookup.select_run(pairs(run_view("train-7f3k")), "trian")
    assert caught.value.do == "did you mean train?"


def test_directory_without_a_journal_is_not_a_coordinator(tmp_path: Path) -> None:
    (tmp_path / "coordinators" / "x").mkdir(parents=True)
    assert run_lookup.coordinators(run_lookup.CoordinatorTarget(tmp_path)) == []


def test_unfinished_run_of_an_ended_coordinator_is_resumable(tmp_path: Path) -> None:
    from shoal.coordinator.storage.logs import Logs
    from shoal.store.sqlite_views import SqliteViews

    directory = tmp_path / "coordinators" / "x"
    directory.mkdir(parents=True)
    (directory / "journal.jsonl").touch()
    (directory / "pid").write_text("4194999")
    views = SqliteViews(directory)
    views.put_run(run_view("r1"))
    views.put_run(run_view("r2", status="done", started=50.0))
    views.put_lines([story_line(1, "MembershipNote", "hello", run="r1")])
    views.close()
    Logs(directory).append("r1", "local/0", ["one", "two"])
    ((coordinator, first), (_, second)) = run_lookup.all_runs(run_lookup.CoordinatorTarget(tmp_path))
    assert coordinator.client is None
    assert (first.run, first.status, first.members) == ("r1", "resumable", ())
    assert (second.run, second.status) == ("r2", "done")
    assert [line.text for line in coordinator.records.story("r1")] == ["hello"]
    page = coordinator.records.logs("r1", limit=1)
    assert page.lines == (("local/0", "one"),)
    assert coordinator.records.logs("r1", after=page.next).lines == (("local/0", "two"),)


@pytest.mark.parametrize(
    "url",
    [
        "head:29300",
        "ftp://head:29300",
        "https://head:99999",
        "http://head:port",
        "http://[::1",
        "http://",
        "http://a:0",
    ],
)
def test_invalid_url_is_a_usage_error(tmp_path: Path, url: str) -> None:
    (tmp_path / "token").write_text("secret\n")
    with pytest.raises(UsageError, match="invalid coordinator URL"):
        run_lookup.coordinators(CoordinatorTarget(tmp_path, url, str(tmp_path / "token")))


def test_damaged_coordinator_hides_no_run_of_the_others(tmp_path: Path) -> None:
    ended_coordinator(tmp_path, "good")
    for name, text in (("bad", "nonsense\n" * 3), ("older", '{"seq":1}\n')):
        directory = tmp_path / "coordinators" / name
        directory.mkdir()
        (directory / "journal.jsonl").write_text(text)
    (tmp_path / "coordinators" / "bad" / "format").write_bytes(
        msgspec.json.encode(journal.DirectoryFormat(PROTOCOL, "x"))
    )
    target = CoordinatorTarget(tmp_path)
    runs, damaged = run_lookup.runs_and_damage(target)
    assert [view.run for _, view in runs] == ["run-good"]
    assert {coordinator.directory.name: coordinator.error.code for coordinator in damaged} == {
        "bad": "S521",
        "older": "S523",
    }
    assert run_lookup.find_run(target, "run-good")[1].run == "run-good"
    with pytest.raises(UnknownRun) as unknown:
        run_lookup.find_run(target, "other")
    assert "cannot be read" in unknown.value.why


def test_only_damaged_coordinators_are_no_empty_list(tmp_path: Path) -> None:
    directory = tmp_path / "coordinators" / "older"
    directory.mkdir(parents=True)
    (directory / "journal.jsonl").write_text('{"seq":1}\n')
    with pytest.raises(DirectoryVersionMismatch):
        run_lookup.find_run(CoordinatorTarget(tmp_path), None)
