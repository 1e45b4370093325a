"""What one pool is asked by its desk: whatever its engine does, it is asked again, and nothing of it is forgotten."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from shoal.coordinator.pools.pool_worker import PoolWorker
from shoal.coordinator.pools.provisioner import tag_of
from shoal.core.provisioning import events as se
from shoal.engines.engine import AllocationStatus
from shoal.errors import AllocationRefused, EngineUnreachable


class Cluster:
    """Has machines of two pools, and may refuse to end some."""

    def __init__(self, unendable: str = "") -> None:
        self.cancelled: list[str] = []
        self.unendable = unendable

    def watch(self, _tag: str) -> list[AllocationStatus]:
        return [
            AllocationStatus("lab-1", "job-1", "running"),
            AllocationStatus("spot-1", "job-2", "running"),
            AllocationStatus("lab-2", "job-3", "gone"),
        ]

    def cancel(self, handle: str) -> None:
        if handle == self.unendable:
            raise EngineUnreachable("the controller does not answer")
        self.cancelled.append(handle)


def desk(cluster: Any) -> PoolWorker:
    return PoolWorker("lab", "tag", cluster, ask_of=lambda _: None, said=lambda _: None, ends=lambda _: None)  # type: ignore[arg-type,return-value]


def test_each_pool_ends_its_own_and_what_they_left() -> None:
    cluster = Cluster()
    one = desk(cluster)
    one._end_everything()
    assert sorted(cluster.cancelled) == ["job-1", "job-3"]
    assert one.all_ended


@pytest.mark.parametrize(("unendable", "all_ended"), [("job-1", False), ("job-3", True)])
def test_one_that_runs_and_cannot_be_ended_is_not_said_to_be(unendable: str, all_ended: bool) -> None:
    one = desk(Cluster(unendable))
    one._end_everything()
    assert one.all_ended == all_ended


class Moody(Cluster):
    """Raises what no engine should, when it is next asked."""

    mood: Exception | None = None

    def watch(self, tag: str) -> list[AllocationStatus]:
        self._vent()
        return super().watch(tag)

    def cancel(self, handle: str) -> None:
        self._vent()
        super().cancel(handle)

    def clean_up(self, _tag: str, _known: object) -> None:
        self._vent()

    def _vent(self) -> None:
        mood, self.mood = self.mood, None
        if mood is not None:
            raise mood


@pytest.mark.parametrize("mood", [OSError(24, "Too many open files"), KeyError("pid")])
def test_an_engine_that_fails_as_none_should_is_asked_again(mood: Exception) -> None:
    said: list[se.Event] = []
    cluster = Moody()
    one = PoolWorker("lab", "tag", cluster, lambda _: None, said.append, lambda _: None)  # type: ignore[arg-type,return-value]
    trouble = se.PoolUnreachable("lab", f"the engine failed: {type(mood).__name__}: {mood}")
    for ask in (one._look, lambda: one._do(se.CancelAllocation("lab", "lab-1", "job-1", "no run needs it"))):
        cluster.mood = mood
        ask()
        assert said.pop() == trouble
        ask()
        assert not isinstance(said.pop(), se.PoolUnreachable)
    cluster.mood = mood
    one._tidy()


def test_what_cannot_be_ended_for_any_cause_is_not_said_to_be_and_the_others_are() -> None:
    cluster = Moody()
    one, found = desk(cluster), cluster.watch("tag")
    cluster.mood = ValueError("what?")
    assert [one._end(seen) for seen in found[:2]] == [False, True]
    cluster.mood = ValueError("what?")
    one._end_everything()
    assert not one.all_ended


def test_a_machine_that_the_engine_will_not_end_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[se.Event] = []
    cluster = Cluster()
    one = PoolWorker("lab", "tag", cluster, lambda _: None, said.append, lambda _: None)  # type: ignore[arg-type,return-value]
    monkeypatch.setattr(cluster, "cancel", _refuse)
    one._do(se.CancelAllocation("lab", "lab-1", "job-1", "no run needs it"))
    assert not [event for event in said if isinstance(event, se.AllocationEnded | se.AllocationRejected)]


def _refuse(_handle: str) -> None:
    raise AllocationRefused("scancel is not on this machine")


def test_the_hires_of_coordinators_are_told_apart_whatever_these_are_called(tmp_path: Path) -> None:
    places = [tmp_path / "a" / "my $(runs)", tmp_path / "b" / "my $(runs)", tmp_path / "…"]
    for place in places:
        place.mkdir(parents=True)
    tags = [tag_of(place) for place in places]
    assert len(set(tags)) == 3
    assert tags == [tag_of(place) for place in places], "one that is started again finds what it had hired"
    assert all(re.fullmatch(r"[a-z0-9-]+", tag) for tag in tags)
