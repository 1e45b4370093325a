"""Directories of coordinators, for tests of what finds or removes them."""

from __future__ import annotations

import os
from pathlib import Path

from tests.unit.views import run_view

from shoal.store import journal, sqlite_views


def ended_coordinator(home: Path, name: str, last_at: float = 1000.0) -> Path:
    """Create the directory of an ended coordinator with one run; return it."""
    directory = home / "coordinators" / name
    directory.mkdir(parents=True)
    views = sqlite_views.SqliteViews(directory)
    views.put_run(run_view(f"run-{name}", status="done"))
    views.close()
    (directory / journal.FILE).write_text("x" * 100)
    os.utime(directory / journal.FILE, (last_at, last_at))
    return directory
