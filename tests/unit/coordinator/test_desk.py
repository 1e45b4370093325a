"""What is ended with a coordinator, where two pools are of one cluster."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.coordinator.hiring import _Desk
from shoal.engines.engine import Seen
from shoal.errors import EngineUnreachable


class Cluster:
    """Has machines of two pools, and may refuse to end some."""

    def __init__(self, unendable: str = "") -> None:
        self.cancelled: list[str] = []
        self.unendable = unendable

    def watch(self, _tag: str) -> list[Seen]:
        return [Seen("lab-1", "job-1", "running"), Seen("spot-1", "job-2", "running"), Seen("lab-2", "job-3", "gone")]

    def cancel(self, handle: str) -> None:
        if handle == self.unendable:
            raise EngineUnreachable("the controller does not answer")
        self.cancelled.append(handle)


def desk(cluster: Any) -> _Desk:
    return _Desk("lab", "tag", cluster, ask_of=lambda _: None, said=lambda _: None, ends=lambda _: None)  # type: ignore[arg-type,return-value]


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
