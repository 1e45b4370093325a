"""Rebuilding the stored views from the snapshot and the journal, for a coordinator that is not running."""

from __future__ import annotations

import logging
import os
import sqlite3
import tempfile
from pathlib import Path

from shoal.coordinator import api_views
from shoal.coordinator.live_state import LiveRun
from shoal.coordinator.storage import state_snapshot, view_rows
from shoal.core.runs import events as run_events
from shoal.core.runs import story
from shoal.core.runs.decide import apply
from shoal.errors import JournalUnwritable
from shoal.store import journal, journal_repair
from shoal.store.journal_repair import SkippedLine
from shoal.store.sqlite_views import FILE, SqliteViews

log = logging.getLogger("shoal.coordinator")


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
    snapshot = journal.read_snapshot(directory)
    stored = state_snapshot.decode(snapshot.body) if snapshot is not None else state_snapshot.StoredState()
    state, live, last_at = stored.state, dict[str, LiveRun](), 0.0
    views = SqliteViews(target)
    if snapshot is not None:
        views.put_lines([story.lost_history(snapshot.seq, snapshot.at)])
        last_at = snapshot.at
    for name, progress in stored.progress.items():
        live.setdefault(name, LiveRun()).progress = progress
    for entry in journal.read(directory):
        event = journal.decode_event(entry, run_events.KINDS, directory)
        last_at = entry.at
        try:
            instructions = apply(state, entry.run, event, entry.at)
        except Exception:
            # An event that could not be handled when it happened is skipped here in the same way.
            log.exception("an event could not be handled")
            continue
        view_rows.put(views, entry, event, instructions, state.runs.get(getattr(event, "run", "") or entry.run))
        if isinstance(event, run_events.ProgressMeasured):
            live.setdefault(entry.run, LiveRun()).progress = event
    for name, run in state.runs.items():
        run_dir = str(directory / "runs" / name)
        views.put_run(api_views.run_view(run, state, live.get(name, LiveRun()), run_dir, last_at))
    for view in api_views.agent_views(state, {}, last_at):
        views.put_agent(view)
    views.flush()
    views.close()


def repair(directory: Path) -> list[SkippedLine]:
    """Step past everything that is unreadable in the journal of this directory; return what was skipped."""
    return journal_repair.repair(directory, _check_entry, state_snapshot.decode)


def _check_entry(entry: journal.JournalEntry) -> object:
    return journal.decode_event(entry, run_events.KINDS)
