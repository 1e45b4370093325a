"""Pool worker: errors of its engine are retried, and no allocation is forgotten."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from shoal.coordinator.pools.pool_worker import PoolWorker
from shoal.coordinator.pools.provisioner import tag_of
from shoal.core.provisioning import events as pe
from shoal.engines.engine import AllocationStatus
from shoal.errors import AllocationRefused, EngineUnreachable


class Cluster:
    """An engine with allocations of two pools, of which one cannot be cancelled."""

    def __init__(self, stuck: str = "") -> None:
        self.cancelled: list[str] = []
        self.stuck = stuck

    def watch(self, _tag: str) -> list[AllocationStatus]:
        return [
            AllocationStatus("lab-1", "job-1", "running"),
            AllocationStatus("spot-1", "job-2", "running"),
            AllocationStatus("lab-2", "job-3", "gone"),
        ]

    def cancel(self, handle: str) -> None:
        if handle == self.stuck:
            raise EngineUnreachable("the controller does not respond")
        self.cancelled.append(handle)


def worker_of(cluster: Any) -> PoolWorker:
    return PoolWorker(
        "lab", "tag", cluster, request_of=lambda _: None, report=lambda _: None, report_ends=lambda _: None
    )  # type: ignore[arg-type,return-value]


def test_worker_releases_the_allocations_of_its_own_pool() -> None:
    cluster = Cluster()
    worker = worker_of(cluster)
    worker._release_everything()
    assert sorted(cluster.cancelled) == ["job-1", "job-3"]
    assert worker.all_released


@pytest.mark.parametrize(("stuck", "all_released"), [("job-1", False), ("job-3", True)])
def test_running_allocation_that_cannot_be_cancelled_is_not_released(stuck: str, all_released: bool) -> None:
    worker = worker_of(Cluster(stuck))
    worker._release_everything()
    assert worker.all_released == all_released


class Unreliable(Cluster):
    """An engine that raises an unexpected error on its next call."""

    failure: Exception | None = None

    def watch(self, tag: str) -> list[AllocationStatus]:
        self._fail_once()
        return super().watch(tag)

    def cancel(self, handle: str) -> None:
        self._fail_once()
        super().cancel(handle)

    def clean_up(self, _tag: str, _known: object) -> None:
        self._fail_once()

    def _fail_once(self) -> None:
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure


@pytest.mark.parametrize("failure", [OSError(24, "Too many open files"), KeyError("pid")])
def test_unexpected_error_of_an_engine_is_retried(failure: Exception) -> None:
    reports: list[pe.Event] = []
    cluster = Unreliable()
    worker = PoolWorker("lab", "tag", cluster, lambda _: None, reports.append, lambda _: None)  # type: ignore[arg-type,return-value]
    unreachable = pe.PoolUnreachable("lab", f"the engine failed: {type(failure).__name__}: {failure}")
    for call in (
        worker._list,
        lambda: worker._carry_out(pe.CancelAllocation("lab", "lab-1", "job-1", "no run needs it")),
    ):
        cluster.failure = failure
        call()
        assert reports.pop() == unreachable
        call()
        assert not isinstance(reports.pop(), pe.PoolUnreachable)
    cluster.failure = failure
    worker._clean_up()


def test_failure_to_release_one_allocation_does_not_stop_the_others() -> None:
    cluster = Unreliable()
    worker, statuses = worker_of(cluster), cluster.watch("tag")
    cluster.failure = ValueError("what?")
    assert [worker._release(status) for status in statuses[:2]] == [False, True]
    cluster.failure = ValueError("what?")
    worker._release_everything()
    assert not worker.all_released


def test_refused_cancellation_is_not_reported_as_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    reports: list[pe.Event] = []
    cluster = Cluster()
    worker = PoolWorker("lab", "tag", cluster, lambda _: None, reports.append, lambda _: None)  # type: ignore[arg-type,return-value]
    monkeypatch.setattr(cluster, "cancel", _refuse)
    worker._carry_out(pe.CancelAllocation("lab", "lab-1", "job-1", "no run needs it"))
    assert not [event for event in reports if isinstance(event, pe.AllocationEnded | pe.AllocationRejected)]


def _refuse(_handle: str) -> None:
    raise AllocationRefused("scancel is not on this machine")


def test_tags_of_coordinators_differ_whatever_their_directories_are_called(tmp_path: Path) -> None:
    directories = [tmp_path / "a" / "my $(runs)", tmp_path / "b" / "my $(runs)", tmp_path / "…"]
    for directory in directories:
        directory.mkdir(parents=True)
    tags = [tag_of(directory) for directory in directories]
    assert len(set(tags)) == 3
    assert tags == [tag_of(directory) for directory in directories], "a restarted coordinator finds its allocations"
    assert all(re.fullmatch(r"[a-z0-9-]+", tag) for tag in tags)
