"""The supervisor thread of an attached run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
from tests.unit.views import run_view

from shoal.errors import CoordinatorUnreachable, ServiceFailed, ShoalError
from shoal.experiment import supervisor_thread
from shoal.experiment.supervisor_thread import SupervisorThread
from shoal.wire.api import RunView


class FakeClient:
    """Answers each poll with the next status, and then "done"; None for no answer."""

    def __init__(self, *statuses: str | None) -> None:
        self._statuses = iter(statuses)

    def run(self, run: str) -> RunView:
        status = next(self._statuses, "done")
        if status is None:
            raise CoordinatorUnreachable("down")
        return run_view(run, status=status)


class FakeSupervisor:
    """Counts restarts, and records how it was closed."""

    def __init__(self, failure: ShoalError | None = None) -> None:
        self.restarts, self.closed, self._failure = 0, [], failure

    def restart_dead_services(self) -> list[str]:
        self.restarts += 1
        if self._failure is not None:
            raise self._failure
        return []

    def close(self, client: object, note: Callable[[str], None]) -> None:
        del note
        self.closed.append(client)


def run_thread(supervisor: FakeSupervisor, client: FakeClient) -> SupervisorThread:
    thread = SupervisorThread(cast(Any, supervisor), cast(Any, client), "r")
    thread.start()
    thread.join(30.0)
    assert not thread.is_alive()
    return thread


@pytest.fixture(autouse=True)
def _poll_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_thread, "POLL_S", 0.001)


def test_services_are_restarted_until_the_run_has_ended_and_closed_by_request() -> None:
    supervisor, client = FakeSupervisor(), FakeClient("training", None, "training")
    assert run_thread(supervisor, client).failure is None
    assert (supervisor.restarts, supervisor.closed) == (3, [client])


def test_service_that_cannot_be_restarted_is_the_failure_and_nothing_is_asked_of_the_coordinator() -> None:
    failure = ServiceFailed("the coordinator died 6 times")
    supervisor = FakeSupervisor(failure)
    assert run_thread(supervisor, FakeClient("training")).failure is failure
    assert supervisor.closed == [None]


def test_thread_that_is_stopped_in_vain_abandons_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_thread, "STOP_TIMEOUT_S", 0.0)
    supervisor, client = FakeSupervisor(), DeafClient()
    thread = SupervisorThread(cast(Any, supervisor), cast(Any, client), "r")
    thread.start()
    thread.stop()
    assert not thread.is_alive()
    assert (client.stops, supervisor.closed) == (1, [None])


class DeafClient:
    """A coordinator that never answers."""

    stops = 0

    def another(self) -> DeafClient:
        return self

    def run(self, run: str) -> RunView:
        raise CoordinatorUnreachable("down")

    def stop(self, run: str, request: object) -> None:
        self.stops += 1
        raise CoordinatorUnreachable("down")
