"""Rows of the stored views, from single journal entries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shoal.coordinator.storage import view_rows
from shoal.core.membership import events as ev
from shoal.core.runs.decide import apply
from shoal.core.runs.events import RunCreated
from shoal.core.runs.spec import RunSpec
from shoal.core.runs.state import CoordinatorState
from shoal.core.world import Address
from shoal.store import sqlite_views
from shoal.store.journal import JournalEntry
from shoal.store.sqlite_views import SqliteViews

CREATED = RunCreated(RunSpec("r", ("t.py",), "/", (1, 1)), {"tensorboard": False})


def put_all(directory: Path, *events: Any) -> None:
    """Apply events one second apart and store their rows."""
    state, views = CoordinatorState(), SqliteViews(directory)
    for seq, event in enumerate(events, start=1):
        entry = JournalEntry(seq, float(seq), "r-1", type(event).__name__, {})
        instructions = apply(state, "r-1", event, entry.at)
        view_rows.put(views, entry, event, instructions, state.runs.get("r-1"))
    views.flush()
    assert views.seq == len(events)
    views.close()


def test_world_begins_with_its_members_and_ends_when_it_is_dissolved(tmp_path: Path) -> None:
    connected = ev.MemberConnected("local/0", "1", Address("127.0.0.1", 1), None, None, False, False)
    ready, broken = ev.MemberReady("local/0", "model", None), ev.WorldBroken("local/0", 1, 7, (), "cut")
    put_all(tmp_path, CREATED, connected, ready)
    (world,) = sqlite_views.worlds(tmp_path, "r-1")
    assert (world.number, world.members, world.last_step) == (1, ("local/0",), None)
    (tmp_path / sqlite_views.FILE).unlink()
    put_all(tmp_path, CREATED, connected, ready, ev.WorldEntered("local/0", 1, 0), ev.ProgressRecorded(7), broken)
    first, *_ = sqlite_views.worlds(tmp_path, "r-1")
    assert (first.number, first.last_step) == (1, 7)


def test_events_become_the_story(tmp_path: Path) -> None:
    put_all(tmp_path, CREATED)
    assert sqlite_views.story(tmp_path, "r-1")[0].kind == "RunCreated"
