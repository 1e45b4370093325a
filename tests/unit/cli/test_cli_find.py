"""Which run is meant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.errors import AmbiguousRun, UnknownRun, UsageError
from shoal.launch import run_lookup
from shoal.launch.coordinator_target import CoordinatorTarget
from shoal.launch.offline_records import OfflineRecords

HERE = run_lookup.CoordinatorRef("c", "", "", None, None, OfflineRecords(Path("nowhere")))


def pairs(*views: Any) -> list[tuple[run_lookup.CoordinatorRef, Any]]:
    return [(HERE, view) for view in views]


def test_an_id_wins_over_a_name_and_a_beginning(make: Any) -> None:
    runs = pairs(make.run("a", name="b"), make.run("b", name="c"), make.run("bb", name="d"))
    assert run_lookup.choose(runs, "b")[1].run == "b"


def test_a_beginning_is_enough_if_only_one_run_has_it(make: Any) -> None:
    runs = pairs(make.run("train-aaaa", name="x"), make.run("train-bbbb", name="y"))
    assert run_lookup.choose(runs, "train-b")[1].run == "train-bbbb"
    with pytest.raises(AmbiguousRun) as caught:
        run_lookup.choose(runs, "train-")
    assert "train-aaaa" in caught.value.why
    assert "train-bbbb" in caught.value.why


def test_of_several_with_one_name_the_one_that_goes_on_is_meant(make: Any) -> None:
    runs = pairs(make.run("1", status="done"), make.run("2"), make.run("3", status="failed"))
    assert run_lookup.choose(runs, "train")[1].run == "2"


def test_two_that_go_on_under_one_name_are_ambiguous(make: Any) -> None:
    with pytest.raises(AmbiguousRun):
        run_lookup.choose(pairs(make.run("1"), make.run("2")), "train")


def test_an_unknown_run_comes_with_the_nearest(make: Any) -> None:
    with pytest.raises(UnknownRun) as caught:
        run_lookup.choose(pairs(make.run("train-7f3k")), "trian")
    assert caught.value.do == "did you mean train?"


def test_a_directory_without_a_journal_is_no_coordinator(tmp_path: Path) -> None:
    (tmp_path / "coordinators" / "x").mkdir(parents=True)
    assert run_lookup.coordinators(run_lookup.CoordinatorTarget(tmp_path)) == []


def test_an_ended_coordinator_shows_its_runs_as_resumable(tmp_path: Path, make: Any) -> None:
    from shoal.coordinator.storage.logs import Logs
    from shoal.store.sqlite_views import SqliteViews

    directory = tmp_path / "coordinators" / "x"
    directory.mkdir(parents=True)
    (directory / "journal.jsonl").touch()
    (directory / "pid").write_text("4194999")
    views = SqliteViews(directory)
    views.put_run(make.run("r1"))
    views.put_run(make.run("r2", status="done", started=50.0))
    views.put_lines([make.line(1, "MembershipNote", "hello", run="r1")])
    views.close()
    Logs(directory).append("r1", "local/0", ["one", "two"])
    ((coordinator, going), (_, over)) = run_lookup.all_runs(run_lookup.CoordinatorTarget(tmp_path))
    assert coordinator.client is None
    assert (going.run, going.status, going.members) == ("r1", "resumable", ())
    assert (over.run, over.status) == ("r2", "done")
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
def test_what_is_no_url_is_said_to_be_none(tmp_path: Path, url: str) -> None:
    (tmp_path / "token").write_text("secret\n")
    with pytest.raises(UsageError, match="is no URL of a coordinator"):
        run_lookup.coordinators(CoordinatorTarget(tmp_path, url, str(tmp_path / "token")))
