"""What is shown is written in the order in which it came, whoever asks for it meanwhile."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

from shoal.coordinator.service import CoordinatorService
from shoal.core.runs.events import RunCreated, UserStopRequested
from shoal.store import sqlite_views
from shoal.store.journal import Journal
from shoal.store.sqlite_views import RowBatch, SqliteViews
from shoal.wire.api import RunSpec

SPEC = RunSpec("r", ("train.py",), "/", (1, 1))


class SlowFirst(SqliteViews):
    """Is overtaken by the second batch while it writes the first, if that is possible."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.begun, self.overtaken = threading.Event(), threading.Event()

    def write(self, batch: RowBatch) -> None:
        if not self.begun.is_set():
            self.begun.set()
            self.overtaken.wait(0.5)
            super().write(batch)
        else:
            super().write(batch)
            self.overtaken.set()


def test_an_older_view_of_a_run_never_hides_a_newer_one(tmp_path: Path) -> None:
    shown = SlowFirst(tmp_path)
    service = CoordinatorService(tmp_path, Journal(tmp_path), shown, "here")

    async def happen() -> list[str]:
        service.handle("r-1", RunCreated(SPEC, {"tensorboard": False}))
        first = asyncio.create_task(service.flush())
        await asyncio.to_thread(shown.begun.wait)
        service.handle("r-1", UserStopRequested("enough", False, 0.0))
        told = await service.story(service.runs.runs["r-1"], "", 0, 100)
        await first
        return [line.kind for line in told]

    kinds = asyncio.run(happen())
    assert kinds[0] == "RunCreated"
    assert "UserStopRequested" in kinds
    assert [view.status for view in sqlite_views.runs(tmp_path)] == ["stopped"]
    assert shown.seq == 2
    service.close()


def test_what_is_being_written_at_the_end_is_written(tmp_path: Path) -> None:
    shown = SlowFirst(tmp_path)
    service = CoordinatorService(tmp_path, Journal(tmp_path), shown, "here")

    async def happen() -> None:
        service.handle("r-1", RunCreated(SPEC, {"tensorboard": False}))
        keeper = asyncio.create_task(service.keep_views())
        await asyncio.to_thread(shown.begun.wait)
        await service.settle([keeper])
        service.close()

    asyncio.run(happen())
    assert [view.run for view in sqlite_views.runs(tmp_path)] == ["r-1"]
    assert sqlite_views.story(tmp_path, "r-1")[0].kind == "RunCreated"
