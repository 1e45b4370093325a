"""A pool check releases every machine, even if it is interrupted or an engine does not answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.doctor import pool_check
from shoal.doctor.pool_check import PoolCheck, _CheckedAllocation
from shoal.engines.engine import AllocationRequest, AllocationStatus, Capacity, Engine, EngineOptions, RenderedRequest
from shoal.errors import EngineUnreachable
from shoal.launch import settings_layers
from shoal.launch.settings_layers import ResolvedSettings
from shoal.pack.environments import recipe


class Cluster(Engine):
    """An engine that remembers what runs; its first cancellations may fail."""

    def __init__(self, *running: str, failures: tuple[BaseException, ...] = ()) -> None:
        super().__init__("lab", EngineOptions())
        self.running, self.failures, self.closed = list(running), list(failures), False

    def render(self, request: AllocationRequest) -> RenderedRequest:
        raise NotImplementedError

    def submit(self, request: AllocationRequest) -> str:
        raise NotImplementedError

    def watch(self, tag: str) -> list[AllocationStatus]:
        assert tag == "doctors-tag"
        return [AllocationStatus(name, name, "running") for name in self.running]

    def cancel(self, handle: str) -> None:
        if self.failures:
            raise self.failures.pop(0)
        if handle in self.running:
            self.running.remove(handle)

    def capacity(self) -> list[Capacity]:
        return []

    def close(self) -> None:
        self.closed = True


class Client:
    """A coordinator that stores blobs."""

    def __init__(self) -> None:
        self.blobs: dict[str, Path | bytes] = {}

    def send(self, contents: dict[str, Path | bytes]) -> int:
        self.blobs.update(contents)
        return len(contents)


class Machines(Cluster):
    """A cluster whose pool has an environment; remembers what is requested of it."""

    def __init__(self, environment: str) -> None:
        super().__init__()
        self.options = EngineOptions(environment=environment)
        self.requests: list[AllocationRequest] = []

    def submit(self, request: AllocationRequest) -> str:
        self.requests.append(request)
        return request.allocation


def test_machines_are_checked_in_the_environment_of_their_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe.wheel, "build_shoal_wheel", lambda: ("shoal.whl", b"wheel"))
    (tmp_path / "env.tar.gz").write_bytes(b"packed")
    (tmp_path / "token").write_text("secret\n")
    (tmp_path / "url").write_text("http://127.0.0.1:1\n")
    packed, plain, client = Machines(str(tmp_path / "env.tar.gz")), Machines(""), Client()
    settings = settings_layers.resolve(tmp_path, {}, (), {})
    check = PoolCheck(settings, ["lab", "spot"], 1, tmp_path, None, lambda _: None)
    check._publish_environments(client, [packed, plain])  # type: ignore[arg-type]
    check._allocate({"lab": (packed, 1), "spot": (plain, 1)})
    environment = packed.requests[0].environment
    assert environment is not None
    assert {environment.shoal, environment.recipe} < set(client.blobs)
    assert plain.requests[0].environment is None
    assert check._limit_s == pool_check.BUILD_WAIT_S


def check_with(cluster: Cluster, *requested: str) -> PoolCheck:
    check = PoolCheck(ResolvedSettings({}, None), ["lab"], 2, Path("doctors-tag"), 1.0, lambda _: None)
    check._allocations = [_CheckedAllocation(name, "lab", cluster, handle=name) for name in requested]
    return check


def test_requested_and_unexpected_machines_are_both_released():
    cluster = Cluster("lab-1", "lab-2")
    check = check_with(cluster, "lab-1")
    check._release_and_close([cluster])
    assert (cluster.running, check.unreleased, cluster.closed) == ([], [], True)


def test_interrupted_release_is_completed():
    cluster = Cluster("lab-1", failures=(KeyboardInterrupt(),))
    with pytest.raises(KeyboardInterrupt):
        check_with(cluster, "lab-1")._release_and_close([cluster])
    assert (cluster.running, cluster.closed) == ([], True)


def test_machine_released_at_the_second_attempt_is_not_reported():
    cluster = Cluster("lab-1", failures=(EngineUnreachable("busy"),))
    check = check_with(cluster, "lab-1")
    check._release_and_close([cluster])
    assert (cluster.running, check.unreleased) == ([], [])


def test_machine_that_cannot_be_released_is_reported():
    cluster = Cluster("lab-1", failures=(EngineUnreachable("down"), EngineUnreachable("down", why="no host")))
    check = check_with(cluster, "lab-1")
    check._release_and_close([cluster])
    assert check.unreleased == ["lab-1: down: no host"]
