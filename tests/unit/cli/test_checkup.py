"""Whatever the doctor hired is given back, whoever is impatient or cannot be reached."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.doctor.pool_check import PoolCheck, _CheckedAllocation
from shoal.engines.engine import AllocationRequest, AllocationStatus, Capacity, Engine, EngineOptions, RenderedRequest
from shoal.errors import EngineUnreachable
from shoal.launch.settings_layers import ResolvedSettings


class Cluster(Engine):
    """Remembers what runs; its first cancellations may fail."""

    def __init__(self, *running: str, trouble: tuple[BaseException, ...] = ()) -> None:
        super().__init__("lab", EngineOptions())
        self.running, self.trouble, self.closed = list(running), list(trouble), False

    def render(self, ask: AllocationRequest) -> RenderedRequest:
        raise NotImplementedError

    def submit(self, ask: AllocationRequest) -> str:
        raise NotImplementedError

    def watch(self, tag: str) -> list[AllocationStatus]:
        assert tag == "doctors-tag"
        return [AllocationStatus(name, name, "running") for name in self.running]

    def cancel(self, handle: str) -> None:
        if self.trouble:
            raise self.trouble.pop(0)
        if handle in self.running:
            self.running.remove(handle)

    def capacity(self) -> list[Capacity]:
        return []

    def close(self) -> None:
        self.closed = True


def checkup(cluster: Cluster, *known: str) -> PoolCheck:
    made = PoolCheck(ResolvedSettings({}, None), ["lab"], 2, Path("doctors-tag"), 1.0, lambda _: None)
    made._hires = [_CheckedAllocation(name, "lab", cluster, handle=name) for name in known]
    return made


def test_what_was_asked_for_and_what_came_unnoticed_are_both_given_back():
    cluster = Cluster("lab-1", "lab-2")
    made = checkup(cluster, "lab-1")
    made._surely_give_back([cluster])
    assert (cluster.running, made.left, cluster.closed) == ([], [], True)


def test_an_interruption_while_giving_back_leaves_nothing():
    cluster = Cluster("lab-1", trouble=(KeyboardInterrupt(),))
    with pytest.raises(KeyboardInterrupt):
        checkup(cluster, "lab-1")._surely_give_back([cluster])
    assert (cluster.running, cluster.closed) == ([], True)


def test_what_goes_at_the_second_asking_is_not_called_left():
    cluster = Cluster("lab-1", trouble=(EngineUnreachable("busy"),))
    made = checkup(cluster, "lab-1")
    made._surely_give_back([cluster])
    assert (cluster.running, made.left) == ([], [])


def test_what_will_not_go_is_named():
    cluster = Cluster("lab-1", trouble=(EngineUnreachable("down"), EngineUnreachable("down", why="no host")))
    made = checkup(cluster, "lab-1")
    made._surely_give_back([cluster])
    assert made.left == ["lab-1: down: no host"]
