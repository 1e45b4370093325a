"""The supervisor's start and end of a coordinator, which a script stands for."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.unit.views import run_view

from shoal.errors import ServiceFailed
from shoal.launch import supervisor
from shoal.launch.api_client import ApiClient
from shoal.launch.child_service import ChildService
from shoal.launch.launch_plan import LaunchPlan
from shoal.launch.supervisor import Supervisor
from shoal.wire import pool_files
from shoal.wire.api import RunView, ScaleRequest


def plan(directory: Path, script: str) -> LaunchPlan:
    return LaunchPlan(str(directory), coordinator=("sh", "-c", script, "--port", "0"), agent=(), creates_directory=True)


def test_coordinator_that_dies_at_once_is_an_error_whose_log_still_exists(tmp_path: Path) -> None:
    directory = tmp_path / "coordinators" / "c1"
    with pytest.raises(ServiceFailed, match=r"did not start \(exit code 3\)") as error:
        Supervisor(plan(directory, "echo no port is free; exit 3")).open()
    assert error.value.why == "no port is free"
    assert Path(error.value.where).read_text() == "no port is free\n"
    assert not (directory / supervisor.SUPERVISOR_FILE).exists()


def test_coordinator_that_is_never_ready_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "READY_TIMEOUT_S", 0.05)
    service = ChildService("coordinator", ("sh", "-c", "exec sleep 60"), tmp_path / "log")
    service.start()
    try:
        with pytest.raises(ServiceFailed, match="was not ready within"):
            supervisor.wait_until_ready(service, tmp_path)
    finally:
        service.stop(0.0)
    assert not service.running()


def test_port_is_reused_only_if_it_is_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        assert supervisor.port_if_free(f"http://127.0.0.1:{taken}") == 0
    assert supervisor.port_if_free(f"http://127.0.0.1:{taken}") == taken
    assert supervisor.port_if_free("") == 0


class FakeClient:
    """A coordinator with one run; records what is asked of it."""

    def __init__(self, view: RunView) -> None:
        self.view = view
        self.requests: list[tuple[str, ScaleRequest | None]] = []

    def run(self, run: str) -> RunView:
        del run
        return self.view

    def resume(self, run: str, request: ScaleRequest | None) -> RunView:
        del run
        self.requests.append(("resume", request))
        return self.view

    def scale(self, run: str, request: ScaleRequest) -> RunView:
        del run
        self.requests.append(("scale", request))
        return self.view


@pytest.mark.parametrize(
    ("status", "members", "requests"),
    [
        ("stopped", None, [("resume", None)]),
        ("stopped", (2, 3), [("resume", ScaleRequest(2, 3, None))]),
        ("training", None, []),
        ("training", (2, 3), [("scale", ScaleRequest(2, 3, None))]),
    ],
)
def test_run_that_never_ended_is_scaled_but_not_resumed(
    status: str, members: tuple[int, int] | None, requests: list[Any]
) -> None:
    client = FakeClient(run_view("r", status=status))
    resuming = LaunchPlan("", coordinator=(), agent=(), resume="r", members=members)
    assert supervisor.submit_or_resume(cast(ApiClient, client), resuming).run == "r"
    assert client.requests == requests


def test_clock_that_jumps_back_does_not_prolong_the_release_of_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, notes = [100.0], list[str]()
    clock = SimpleNamespace(monotonic=lambda: now[0], time=lambda: 1e9 + 200.0 - 10 * now[0])

    class Releasing:
        """A coordinator that does not end; each wait takes a second."""

        def wait(self, timeout_s: float) -> bool:
            del timeout_s
            now[0] += 1.0
            return False

    monkeypatch.setattr(supervisor, "time", clock)
    progress = pool_files.ReleaseProgress(1, 1e9 - 760.0)
    monkeypatch.setattr(pool_files, "read_release_progress", lambda _: progress)
    held = Supervisor(plan(tmp_path, ""))
    held._coordinator = cast(Any, Releasing())
    held._wait_for_release(notes.append)
    assert notes == ["releasing 1 machine; this may take 50 s"]
    assert now[0] == pytest.approx(101.0 + 50.0 + supervisor.GRACE_S, abs=2.0)
