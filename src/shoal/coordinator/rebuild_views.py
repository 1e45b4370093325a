"""Rebuilding the stored views from the journal, for a coordinator that is not running."""

from __future__ import annotations

import os
import sqlite3
import tempfile
from pathlib import Path

from shoal.coordinator import api_views
from shoal.coordinator.live_state import LiveRun
from shoal.coordinator.storage import view_rows
from shoal.core.runs import events as run_events
from shoal.core.runs.decide import apply
from shoal.core.runs.state import CoordinatorState
from shoal.errors import JournalUnwritable
from shoal.store import journal
from shoal.store.sqlite_views import FILE, SqliteViews


def rebuild(directory: Path) -> None:
    """Write views.sqlite from the journal of this directory, atomically; views that appear meanwhile are kept."""
    try:
        with tempfile.TemporaryDirectory(prefix="views-", dir=directory) as scratch:
            _write(directory, Path(scratch))
            if not (directory / FILE).exists():
                os.replace(Path(scratch, FILE), directory / FILE)
    except (OSError, sqlite3.Error) as error:
        raise JournalUnwritable(
            "the views of the coordinator cannot be written", where=str(directory), why=str(error)
        ) from error


def _write(directory: Path, target: Path) -> None:
    state, live, last_at = CoordinatorState(), dict[str, LiveRun](), 0.0
    views = SqliteViews(target)
    for entry in journal.read(directory / journal.FILE):
        event = journal.decode_event(entry, run_events.KINDS)
        instructions = apply(state, entry.run, event, entry.at)
        view_rows.put(views, entry, event, instructions, state.runs.get(getattr(event, "run", "") or entry.run))
        if isinstance(event, run_events.ProgressMeasured):
            live.setdefault(entry.run, LiveRun()).progress = event
        last_at = entry.at
    for name, run in state.runs.items():
        run_dir = str(directory / "runs" / name)
        views.put_run(api_views.run_view(run, state, live.get(name, LiveRun()), run_dir, last_at))
    for view in api_views.agent_views(state, {}, last_at):
        views.put_agent(view)
    views.flush()
    views.close()
