"""Timers of the coordinator."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.coordinator.service import CoordinatorService
from shoal.coordinator.timers import LISTEN_AGAIN_S, Timers
from shoal.core.membership import decide
from shoal.core.membership import events as ev
from shoal.core.membership.state import LastHeartbeat
from shoal.core.runs.events import RunCreated
from shoal.core.runs.spec import RunSpec
from shoal.core.world import Address
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


def test_members_that_are_still_to_return_get_a_full_lease_after_a_sleep(
    service: CoordinatorService, monkeypatch: pytest.MonkeyPatch
) -> None:
    hello = ev.MemberConnected("m/0", "1", Address("127.0.0.1", 1))
    service.handle("r", hello)
    service.handle("r", ev.CoordinatorRestarted())
    timers, start = Timers(service), service.clock.now()

    def lost_after(seconds: float) -> bool:
        monkeypatch.setattr(service.clock, "now", lambda: start + seconds)
        timers.tick()
        return "m/0" not in service.state.runs["r"].membership.members

    assert not lost_after(10.0), "the coordinator slept from its start on"
    assert not any(lost_after(10.0 + 0.5 * count) for count in range(1, 7)), "a lease has 3 seconds"
    assert any(lost_after(13.0 + 0.5 * count) for count in range(1, 10))


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


def test_timer_that_stays_due_is_journaled_once_a_second(
    service: CoordinatorService, monkeypatch: pytest.MonkeyPatch
) -> None:
    timers, start, before = Timers(service), service.clock.now(), service._journal.seq
    monkeypatch.setattr(decide, "due", lambda *_: [ev.TimerFired("retry")])
    for tick in range(40):
        monkeypatch.setattr(service.clock, "now", lambda tick=tick: start + 0.05 * tick)
        timers.tick()
    assert service._journal.seq - before == 2
