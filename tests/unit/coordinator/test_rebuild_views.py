from __future__ import annotations

from pathlib import Path

from shoal.coordinator.rebuild_views import rebuild
from shoal.core.fleet import events as fe
from shoal.core.membership import events as ev
from shoal.core.runs import events as run_events
from shoal.core.world import Address
from shoal.store import sqlite_views
from shoal.store.journal import Journal
from shoal.wire.api import RunSpec


def test_rebuilt_views_show_runs_agents_and_story_as_the_journal_has_them(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append("", fe.CoordinatorStarted("s"), 1.0)
    journal.append("", fe.AgentConnected("lab", 2, "h"), 2.0)
    journal.append("r", run_events.RunCreated(RunSpec("t", ("t.py",), "/", (1, 1)), {}), 3.0)
    journal.append("r", ev.MemberConnected("lab/0", "s-1", Address("h", 1)), 4.0)
    journal.append("r", run_events.UserStopRequested("enough", True, 5.0), 5.0)
    journal.close()
    rebuild(tmp_path)
    (view,) = sqlite_views.runs(tmp_path)
    assert (view.run, view.status, view.directory) == ("r", "stopping", str(tmp_path / "runs" / "r"))
    assert [agent.agent for agent in sqlite_views.agents(tmp_path)] == ["lab"]
    texts = [line.text for line in sqlite_views.story(tmp_path, "r")]
    assert texts[0] == "run created: t.py with 1 member"
    assert "run was asked to stop" in texts
    assert "agent lab connected with 2 slots" not in texts, "it connected before the run was created"


def test_rebuilding_leaves_nothing_else_behind(tmp_path: Path) -> None:
    Journal(tmp_path).close()
    before = {path.name for path in tmp_path.iterdir()}
    rebuild(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == before | {sqlite_views.FILE}
