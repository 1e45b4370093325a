"""The views of a coordinator that is not there, made anew from its journal."""

from __future__ import annotations

import os
import sqlite3
import tempfile
from pathlib import Path

from shoal.coordinator import live_state as present
from shoal.coordinator.storage import view_rows
from shoal.core.runs import events as runs_events
from shoal.core.runs.state import CoordinatorState
from shoal.errors import JournalUnwritable
from shoal.store import journal
from shoal.store.sqlite_views import FILE, SqliteViews


def rebuild(directory: Path) -> None:
    """Write views.sqlite as the journal of this directory has it, whole; one that is there by then stays."""
    try:
        with tempfile.TemporaryDirectory(prefix="views-", dir=directory) as aside:
            _write(directory, Path(aside))
            if not (directory / FILE).exists():
                os.replace(Path(aside, FILE), directory / FILE)
    except (OSError, sqlite3.Error) as error:
        raise JournalUnwritable(
            "the views of a coordinator cannot be written", where=str(directory), why=str(error)
        ) from error


def _write(directory: Path, to: Path) -> None:
    runs, live, last_at = CoordinatorState(), dict[str, present.LiveRun](), 0.0
    views = SqliteViews(to)
    for entry in journal.read(directory / journal.FILE):
        event = journal.event_of(entry, runs_events.KINDS)
        asked = runs.apply(entry.run, event, entry.at)
        view_rows.put(views, entry, event, asked, runs.runs.get(getattr(event, "run", "") or entry.run))
        if isinstance(event, runs_events.ProgressMeasured):
            live.setdefault(entry.run, present.LiveRun()).measured = event
        last_at = entry.at
    for name, run in runs.runs.items():
        known = live.get(name, present.LiveRun())
        views.put_run(present.run_view(run, runs, known, str(directory / "runs" / name), last_at))
    for view in present.agent_views(runs, {}, last_at):
        views.put_agent(view)
    views.flush()
    views.close()
