"""Runs of a coordinator that has ended, read from its directory without starting it."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import msgspec

from shoal.coordinator.rebuild_views import rebuild
from shoal.coordinator.storage import logs
from shoal.errors import StorageError, UnknownRun
from shoal.launch.run_lookup import ENDED
from shoal.store import journal, sqlite_views
from shoal.wire.api import LogPage, RunView, StoryLine


class OfflineRecords:
    """The runs of one coordinator directory, as `run_lookup.RunRecords`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def runs(self) -> tuple[RunView, ...]:
        try:
            if not (self._directory / sqlite_views.FILE).exists() and (self._directory / journal.FILE).exists():
                rebuild(self._directory)
            return tuple(_as_ended(view) for view in sqlite_views.runs(self._directory))
        except (sqlite3.Error, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise StorageError(
                "the records of an ended coordinator cannot be read",
                where=str(self._directory / sqlite_views.FILE),
                why=str(error),
                do="delete that file; it is made again from the journal, without the story before its snapshot",
            ) from error
        except OSError as error:
            raise StorageError(
                "the directory of a coordinator cannot be read", where=str(self._directory), why=str(error)
            ) from error

    def run(self, run: str) -> RunView:
        for view in self.runs():
            if view.run == run:
                return view
        raise UnknownRun(f"unknown run {run}", where=str(self._directory))

    def story(self, run: str, member: str = "", after: int = 0, limit: int = 1000) -> tuple[StoryLine, ...]:
        return tuple(sqlite_views.story(self._directory, run, member, after, limit))

    def logs(self, run: str, member: str = "", after: int = 0, limit: int = 1000) -> LogPage:
        return logs.page(self._directory, run, member, after, limit)


def _as_ended(view: RunView) -> RunView:
    """Return the view as resumable if the coordinator ended before the run did."""
    if view.status in ENDED:
        return view
    reason = f"its coordinator ended while the run was {view.status}"
    return msgspec.structs.replace(view, status="resumable", reason=reason, members=(), world_size=0, samples_per_s=0.0)
