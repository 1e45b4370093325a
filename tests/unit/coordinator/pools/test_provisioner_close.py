"""Closing the provisioner: machines are released, and events are journaled on the event loop."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from shoal.coordinator.pools import provisioner
from shoal.coordinator.pools.pool_worker import AT_ONCE
from shoal.coordinator.pools.provisioner import Provisioner
from shoal.coordinator.service import CoordinatorService
from shoal.core.provisioning import events as pe
from shoal.engines.engine import AllocationStatus
from shoal.engines.ray import driver
from shoal.store.journal import Journal
from shoal.store.sqlite_views import SqliteViews
from shoal.wire.pool_files import RELEASING, ReleaseProgress, read_release_progress


class EmptyEngine:
    """An engine without allocations."""

    def watch(self, _tag: str) -> list[AllocationStatus]:
        return []

    def close(self) -> None:
        return

    def cancel_timeout_s(self, _grace_s: float) -> float:
        return 60.0


def test_closing_a_pool_is_journaled_on_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = CoordinatorService(tmp_path, Journal(tmp_path), SqliteViews(tmp_path), "here")
    threads: dict[type, int] = {}

    def record(_run: str, event: Any) -> None:
        threads[type(event)] = threading.get_ident()

    monkeypatch.setattr(service, "record", record)

    async def open_and_close() -> None:
        await Provisioner(service, "tag", {"lab": EmptyEngine()}, lambda _: None).close(release_all=True)  # type: ignore[dict-item,arg-type,return-value]

    asyncio.run(open_and_close())
    service.close()
    assert threads == {pe.PoolClosed: threading.get_ident()}


class SlowEngine(EmptyEngine):
    """An engine with many allocations, each of which takes a while to cancel."""

    def __init__(self, count: int) -> None:
        self.active = {f"job-{at}" for at in range(count)}
        self.progress: list[ReleaseProgress | None] = []
        self.directory = Path()

    def watch(self, _tag: str) -> list[AllocationStatus]:
        return [AllocationStatus(f"lab-{handle[4:]}", handle, "running") for handle in sorted(self.active)]

    def cancel(self, handle: str) -> None:
        deadline = time.monotonic() + 20.0
        while (
            not ((progress := read_release_progress(self.directory)) and progress.remaining)
            and time.monotonic() < deadline
        ):
            time.sleep(0.01)
        time.sleep(0.3)
        self.progress.append(progress)
        self.active.discard(handle)


def closed(service: CoordinatorService, engine: Any) -> None:
    async def open_and_close() -> None:
        await Provisioner(service, "tag", {"lab": engine}, lambda _: None).close(release_all=True)  # type: ignore[arg-type,return-value]

    asyncio.run(open_and_close())
    service.close()


def test_every_allocation_is_released_however_many_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provisioner, "JOIN_S", 0.5)
    engine = SlowEngine(3 * AT_ONCE)
    engine.directory = tmp_path
    closed(CoordinatorService(tmp_path, Journal(tmp_path), SqliteViews(tmp_path), "here"), engine)
    assert not engine.active
    last = engine.progress[-1]
    assert last is not None, "waiting commands see the progress"
    assert 0 < last.remaining <= 3 * AT_ONCE
    assert last.until > time.time()
    assert not (tmp_path / RELEASING).exists()


def test_close_does_not_wait_for_an_engine_that_never_responds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(provisioner, "JOIN_S", 0.1)
    engine, answers = SlowEngine(1), threading.Event()
    monkeypatch.setattr(engine, "cancel_timeout_s", lambda _grace_s: 1.0)
    monkeypatch.setattr(engine, "cancel", lambda _handle: answers.wait())
    with caplog.at_level(logging.ERROR):
        closed(CoordinatorService(tmp_path, Journal(tmp_path), SqliteViews(tmp_path), "here"), engine)
    answers.set()
    assert "may still be running" in caplog.text


def test_ray_driver_cancels_as_many_at_once_as_a_worker_does() -> None:
    assert driver.THREADS > AT_ONCE
