"""The views of a coordinator that is not there, made anew from its journal."""

from __future__ import annotations

from pathlib import Path

from shoal.coordinator import history, present, records
from shoal.coordinator.runs import Runs
from shoal.store import journal
from shoal.store.views import Views


def rebuild(directory: Path) -> None:
    """Write views.sqlite as the journal of this directory has it."""
    runs, live, last_at = Runs(), dict[str, present.Live](), 0.0
    views = Views(directory)
    views.forget()
    for entry in journal.read(directory / journal.FILE):
        event = journal.event_of(entry, records.KINDS)
        asked = runs.apply(entry.run, event, entry.at)
        history.put(views, entry, event, asked, runs.runs.get(getattr(event, "run", "") or entry.run))
        if isinstance(event, records.Measured):
            live.setdefault(entry.run, present.Live()).measured = event
        last_at = entry.at
    for name, run in runs.runs.items():
        known = live.get(name, present.Live())
        views.put_run(present.run_view(run, runs, known, str(directory / "runs" / name), last_at))
    for view in present.agent_views(runs, {}, last_at):
        views.put_agent(view)
    views.close()
