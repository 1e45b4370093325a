"""The end of a coordinator: what it writes down then is written like everything else, one event at a time."""

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
from shoal.core.provisioning import events as se
from shoal.engines.engine import AllocationStatus
from shoal.engines.ray import driver
from shoal.store.journal import Journal
from shoal.store.sqlite_views import SqliteViews
from shoal.wire.pool_files import LEAVING, ReleaseProgress, leaving_of


class Empty:
    """An engine that has nothing."""

    def watch(self, _tag: str) -> list[AllocationStatus]:
        return []

    def close(self) -> None:
        return

    def cancel_timeout_s(self, _grace_s: float) -> float:
        return 60.0


def test_that_a_pool_is_closed_is_journaled_by_the_thread_that_journals_all_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = CoordinatorService(tmp_path, Journal(tmp_path), SqliteViews(tmp_path), "here")
    told: dict[type, int] = {}

    def record(_run: str, event: Any) -> None:
        told[type(event)] = threading.get_ident()

    monkeypatch.setattr(service, "record", record)

    async def live() -> None:
        await Provisioner(service, "tag", {"lab": Empty()}, lambda _: None).close(end_all=True)  # type: ignore[dict-item,arg-type,return-value]

    asyncio.run(live())
    service.close()
    assert told == {se.PoolClosed: threading.get_ident()}


class Full(Empty):
    """An engine with very many hires, of which each takes a while to end."""

    def __init__(self, count: int) -> None:
        self.left = {f"job-{at}" for at in range(count)}
        self.told: list[ReleaseProgress | None] = []
        self.directory = Path()

    def watch(self, _tag: str) -> list[AllocationStatus]:
        return [AllocationStatus(f"lab-{handle[4:]}", handle, "running") for handle in sorted(self.left)]

    def cancel(self, handle: str) -> None:
        deadline = time.monotonic() + 20.0
        while not ((told := leaving_of(self.directory)) and told.left) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.3)
        self.told.append(told)
        self.left.discard(handle)


def closed(service: CoordinatorService, engine: Any) -> None:
    async def live() -> None:
        await Provisioner(service, "tag", {"lab": engine}, lambda _: None).close(end_all=True)  # type: ignore[arg-type,return-value]

    asyncio.run(live())
    service.close()


def test_all_are_given_back_however_many_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provisioner, "CLOSE_S", 0.5)
    engine = Full(3 * AT_ONCE)
    engine.directory = tmp_path
    closed(CoordinatorService(tmp_path, Journal(tmp_path), SqliteViews(tmp_path), "here"), engine)
    assert not engine.left
    last = engine.told[-1]
    assert last is not None, "who waits for the coordinator is told"
    assert 0 < last.left <= 3 * AT_ONCE
    assert last.until > time.time()
    assert not (tmp_path / LEAVING).exists()


def test_an_engine_that_never_answers_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(provisioner, "CLOSE_S", 0.1)
    engine, answers = Full(1), threading.Event()
    monkeypatch.setattr(engine, "cancel_timeout_s", lambda _grace_s: 1.0)
    monkeypatch.setattr(engine, "cancel", lambda _handle: answers.wait())
    with caplog.at_level(logging.ERROR):
        closed(CoordinatorService(tmp_path, Journal(tmp_path), SqliteViews(tmp_path), "here"), engine)
    answers.set()
    assert "may be left of this coordinator" in caplog.text


def test_ray_ends_as_many_at_a_time_as_it_is_asked_to() -> None:
    assert driver.THREADS > AT_ONCE
