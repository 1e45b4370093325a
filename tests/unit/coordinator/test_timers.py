"""Timers of the coordinator."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.coordinator.service import CoordinatorService
from shoal.coordinator.timers import LISTEN_AGAIN_S, Timers
from shoal.core.membership.state import LastHeartbeat
from shoal.core.runs.events import RunCreated
from shoal.core.runs.spec import RunSpec
from shoal.errors import JournalUnwritable
from shoal.store.journal import Journal
from shoal.store.sqlite_views import SqliteViews


@pytest.fixture
def service(tmp_path: Path):
    service = CoordinatorService(tmp_path, Journal(tmp_path), SqliteViews(tmp_path), "c")
    service.handle("r", RunCreated(RunSpec("r", ("t.py",), "/", (1, 1)), {"tensorboard": False}))
    yield service
    service.close()


def test_every_tick_calls_the_registered_actions(service: CoordinatorService) -> None:
    timers, times = Timers(service), list[float]()
    timers.every_tick(times.append)
    timers.tick()
    assert len(times) == 1


def test_leases_are_extended_by_the_time_the_process_slept(
    service: CoordinatorService, monkeypatch: pytest.MonkeyPatch
) -> None:
    timers, start, calls = Timers(service), service.clock.now(), list[float]()
    timers.every_tick(calls.append)
    service.live.run("r").leases["m/0"] = LastHeartbeat(start)
    monkeypatch.setattr(service.clock, "now", lambda: start + 60.0)
    timers.tick()
    assert service.live.run("r").leases["m/0"].at > start + 59.0
    assert calls == [], "nothing expires before the waiting heartbeats are read"
    monkeypatch.setattr(service.clock, "now", lambda: start + 60.0 + 2 * LISTEN_AGAIN_S)
    timers.tick()
    assert len(calls) == 1


def test_no_timer_fires_while_the_journal_cannot_be_written(service: CoordinatorService) -> None:
    timers, calls, full = Timers(service), list[float](), True

    def write() -> None:
        if full:
            raise JournalUnwritable("the disk is full")

    timers.every_tick(calls.append)
    service.attempt(write)
    assert service.is_blocked
    timers.tick()
    assert calls == []
    full = False
    timers.tick()
    assert (service.is_blocked, len(calls)) == (False, 1)
