"""The views say what the journal says, and can be thrown away."""

from __future__ import annotations

import itertools
import sqlite3
from pathlib import Path

import pytest

from shoal.coordinator.rebuild_views import rebuild
from shoal.core.membership import events as ev
from shoal.core.runs import events as runs_events
from shoal.core.world import Address
from shoal.errors import JournalDamaged, JournalUnwritable
from shoal.launch.offline_records import OfflineRecords
from shoal.store import sqlite_views
from shoal.store.journal import Journal
from shoal.store.sqlite_views import FILE, MetricRow, SqliteViews, WorldRow
from shoal.wire.api import RunSpec, StoryLine


def line(seq: int, run: str = "r", member: str = "", at: float = 5.0) -> StoryLine:
    return StoryLine(seq, at, run, "MembershipNote", member, None, None, f"line {seq}", "")


def test_what_was_put_is_read_back_after_a_flush(tmp_path: Path) -> None:
    opened = SqliteViews(tmp_path)
    opened.put_lines([line(100), line(200, member="a/0"), line(300, run="other"), line(400, run="", at=1.0)])
    opened.put_world("r", WorldRow(1, 0, None, 1.0, ("a/0", "b/0"), "first"))
    opened.put_world("r", WorldRow(2, None, None, 2.0, ("a/0",), "b/0 leaves"))
    opened.begin_world("r", 2, 50)
    opened.put_metric("r", MetricRow(1.0, 3, 0.5, 10.0))
    opened.put_checkpoint("r", 40, "there", 2.0)
    opened.mark_seq(7)
    opened.flush()
    assert [found.seq for found in opened.story("r", since=3.0)] == [100, 200]
    assert [found.seq for found in opened.story("r", member="a/0")] == [200]
    assert [found.seq for found in opened.story("r", after=100, limit=1)] == [200]
    assert opened.seq == 7
    opened.close()
    assert [(w.number, w.first_step, w.last_step) for w in sqlite_views.worlds(tmp_path, "r")] == [
        (1, 0, 50),
        (2, 50, None),
    ]
    assert sqlite_views.metrics(tmp_path, "r") == [MetricRow(1.0, 3, 0.5, 10.0)]
    assert sqlite_views.checkpoints(tmp_path, "r") == [(40, "there")]


def test_measurements_of_a_run_of_months_are_few_and_spread_over_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_views, "MAX_METRICS", 16)
    opened = SqliteViews(tmp_path)
    opened.put_metric("other", MetricRow(0.0, 1, 0.5, 1.0))
    for second in range(1000):
        opened.put_metric("r", MetricRow(float(second), second, 0.5, 1.0))
        if second == 500:  # a coordinator that is started again goes on at the same pace
            opened.close()
            opened = SqliteViews(tmp_path)
    opened.close()
    steps = [row.step for row in sqlite_views.metrics(tmp_path, "r")]
    assert 8 <= len(steps) <= 16
    assert (steps[0], steps[-1] > 850) == (0, True)
    gaps = [later - step for step, later in itertools.pairwise(steps)]
    assert max(gaps) <= 3 * min(gaps)
    assert len(sqlite_views.metrics(tmp_path, "other")) == 1


def test_row_that_sqlite_cannot_hold_costs_that_row_only(tmp_path: Path) -> None:
    opened = SqliteViews(tmp_path)
    opened.put_checkpoint("r", 1 << 63, "too far", 1.0)
    opened.put_checkpoint("r", 5, "\ud800", 1.0)
    opened.put_checkpoint("r", 40, "there", 2.0)
    opened.mark_seq(7)
    opened.flush()
    assert opened.sync() == 7
    opened.close()
    assert sqlite_views.checkpoints(tmp_path, "r") == [(40, "there")]


def test_event_without_rows_is_marked_as_stored_too(tmp_path: Path) -> None:
    opened = SqliteViews(tmp_path)
    assert not opened.pending
    opened.mark_seq(7)
    assert opened.pending
    opened.flush()
    assert (opened.pending, opened.sync()) == (False, 7)
    opened.close()


def test_damaged_file_is_built_again(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"this is no database, and it is long enough to be taken for one" * 100)
    opened = SqliteViews(tmp_path)
    assert opened.seq == 0
    opened.close()


def test_file_that_is_locked_for_now_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    views = SqliteViews(tmp_path)
    views.put_checkpoint("r", 40, "there", 2.0)
    views.flush()
    views.close()
    connect = sqlite3.connect
    holder = connect(tmp_path / FILE, isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    monkeypatch.setattr(sqlite3, "connect", lambda *args, **options: connect(*args, **options, timeout=0.01))
    with pytest.raises(JournalUnwritable, match="locked"):
        SqliteViews(tmp_path)
    holder.execute("ROLLBACK")
    holder.close()
    assert sqlite_views.checkpoints(tmp_path, "r") == [(40, "there")]


def test_file_of_another_layout_is_replaced(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / FILE)
    connection.executescript("CREATE TABLE metrics (other TEXT)")
    connection.close()
    SqliteViews(tmp_path).close()
    assert sqlite_views.metrics(tmp_path, "r") == []


def test_nothing_there_is_nothing_to_read(tmp_path: Path) -> None:
    assert sqlite_views.runs(tmp_path) == []
    assert sqlite_views.story(tmp_path, "r") == []
    assert not (tmp_path / FILE).exists()


@pytest.mark.parametrize("name", ["a#b", "a?b", "a%20b", "a b"])
def test_they_are_read_wherever_they_are(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    opened = SqliteViews(tmp_path / name)
    opened.put_checkpoint("r", 40, "there", 2.0)
    opened.flush()
    opened.close()
    assert sqlite_views.checkpoints(tmp_path / name, "r") == [(40, "there")]
    assert [path.name for path in tmp_path.iterdir()] == [name], "and nothing is made elsewhere"


def test_views_are_rebuilt_without_a_coordinator(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append("r", runs_events.RunCreated(RunSpec("t", ("t.py",), "/", (1, 1)), {}), 1.0)
    journal.append("r", ev.MemberConnected("a/0", "1", Address("h", 1)), 2.0)
    journal.append("r", ev.MemberReady("a/0", "x", None), 3.0)
    journal.append("r", runs_events.ProgressMeasured(9, 1, 20, 0.25, 100.0, {}), 4.0)
    journal.close()
    for _ in range(2):
        rebuild(tmp_path)
        (view,) = sqlite_views.runs(tmp_path)
        assert (view.run, view.status, view.world, view.step, view.loss) == ("r", "training", 1, 9, 0.25)
        assert sqlite_views.story(tmp_path, "r")[0].text == "run created: t.py with 1 member"
        assert [w.members for w in sqlite_views.worlds(tmp_path, "r")] == [("a/0",)]


def test_views_of_a_damaged_journal_are_not_half_made(tmp_path: Path) -> None:
    """Otherwise the next reader would find no runs and no reason."""
    journal = Journal(tmp_path)
    for run in ("r", "s", "t"):
        journal.append(run, runs_events.RunCreated(RunSpec("t", ("t.py",), "/", (1, 1)), {}), 1.0)
    journal.close()
    lines = journal.path.read_bytes().splitlines(keepends=True)
    journal.path.write_bytes(lines[0] + b"nonsense\n" + lines[2])
    for _ in range(2):
        with pytest.raises(JournalDamaged):
            OfflineRecords(tmp_path).runs()
    journal.path.write_bytes(b"".join(lines))
    assert [view.run for view in OfflineRecords(tmp_path).runs()] == ["r", "s", "t"]
    assert list(tmp_path.glob("views-*")) == []


def test_views_that_another_process_built_meanwhile_are_kept(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append("r", runs_events.RunCreated(RunSpec("t", ("t.py",), "/", (1, 1)), {}), 1.0)
    journal.close()
    theirs = SqliteViews(tmp_path)
    theirs.put_checkpoint("r", 40, "there", 2.0)
    theirs.flush()
    rebuild(tmp_path)
    theirs.close()
    assert sqlite_views.checkpoints(tmp_path, "r") == [(40, "there")]
