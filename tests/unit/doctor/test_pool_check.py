"""A pool check releases every machine, even if it is interrupted or an engine does not answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.doctor.pool_check import PoolCheck, _CheckedAllocation
from shoal.engines.engine import AllocationRequest, AllocationStatus, Capacity, Engine, EngineOptions, RenderedRequest
from shoal.errors import EngineUnreachable
from shoal.launch.settings_layers import ResolvedSettings


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
