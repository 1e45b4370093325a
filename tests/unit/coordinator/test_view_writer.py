"""Stored views are written in order, and none is lost at the end."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from shoal.coordinator import api_views
from shoal.coordinator.service import CoordinatorService
from shoal.coordinator.storage import view_rows
from shoal.core.runs.events import RunCreated, UserStopRequested
from shoal.core.runs.state import RunState
from shoal.store import sqlite_views
from shoal.store.journal import Journal
from shoal.store.sqlite_views import RowBatch, SqliteViews
from shoal.wire.api import RunSpec, RunView

SPEC = RunSpec("r", ("train.py",), "/", (1, 1))


class SlowFirst(SqliteViews):
    """Views whose first write is so slow that a second one would overtake it."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.begun, self.overtaken = threading.Event(), threading.Event()

    def write_batch(self, batch: RowBatch) -> None:
        if not self.begun.is_set():
            self.begun.set()
            self.overtaken.wait(0.5)
            super().write_batch(batch)
        else:
            super().write_batch(batch)
            self.overtaken.set()


def test_older_view_is_never_written_over_a_newer_one(tmp_path: Path) -> None:
    views = SlowFirst(tmp_path)
    service = CoordinatorService(tmp_path, Journal(tmp_path), views, "here")

    async def run() -> list[str]:
        service.handle("r-1", RunCreated(SPEC, {"tensorboard": False}))
        first = asyncio.create_task(service.views.flush())
        await asyncio.to_thread(views.begun.wait)
        service.handle("r-1", UserStopRequested("enough", False, 0.0))
        lines = await service.views.story(service.state.runs["r-1"], "", 0, 100)
        await first
        return [line.kind for line in lines]

    kinds = asyncio.run(run())
    assert kinds[0] == "RunCreated"
    assert "UserStopRequested" in kinds
    assert [view.status for view in sqlite_views.runs(tmp_path)] == ["stopped"]
    assert views.seq == 2
    service.close()


def test_run_that_cannot_be_shown_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = CoordinatorService(tmp_path, Journal(tmp_path), SqliteViews(tmp_path), "here")
    real = api_views.run_view

    def fails_for_one(run: RunState, *rest: Any) -> RunView:
        if run.name == "r-1":
            raise ValueError("odd")
        return real(run, *rest)

    monkeypatch.setattr(api_views, "run_view", fails_for_one)
    for name in ("r-1", "r-2"):
        service.handle(name, RunCreated(SPEC, {"tensorboard": False}))
    asyncio.run(service.views.flush())
    assert [view.run for view in service.views.runs()] == ["r-2"]
    assert [view.run for view in sqlite_views.runs(tmp_path)] == ["r-2"]
    service.close()


def test_event_whose_rows_cannot_be_made_is_carried_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = CoordinatorService(tmp_path, Journal(tmp_path), SqliteViews(tmp_path), "here")

    def fail(*_arguments: Any) -> None:
        raise OverflowError("too large")

    monkeypatch.setattr(view_rows, "put", fail)
    service.handle("r-1", RunCreated(SPEC, {"tensorboard": False}))
    service.handle("r-1", UserStopRequested("enough", False, 0.0))
    assert service.state.runs["r-1"].has_ended
    service.close()


def test_write_in_progress_is_completed_at_the_end(tmp_path: Path) -> None:
    views = SlowFirst(tmp_path)
    service = CoordinatorService(tmp_path, Journal(tmp_path), views, "here")

    async def run() -> None:
        service.handle("r-1", RunCreated(SPEC, {"tensorboard": False}))
        task = asyncio.create_task(service.views.write_forever())
        await asyncio.to_thread(views.begun.wait)
        await service.views.stop([task])
        service.close()

    asyncio.run(run())
    assert [view.run for view in sqlite_views.runs(tmp_path)] == ["r-1"]
    assert sqlite_views.story(tmp_path, "r-1")[0].kind == "RunCreated"
