"""When a server that was told to go may go, and what it leaves."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from shoal.core.placement import PartAssignment, Placement
from shoal.core.world import Address, Seat
from shoal.worker.parameter_server.server_main import _ServerMain


class Leaver:
    """A server `s0` that was told to go: how much time it has, and whether its state can be had just now."""

    def __init__(self, *servers: str, leads: bool = True) -> None:
        self.me, self.left_s, self.leads = "s0", 60.0, leads
        seats = tuple(Seat(name, "1", Address("h", 1)) for name in servers)
        self.placement = Placement(1, 1, seats, (PartAssignment("s0"),))
        self.gathers: list[bool] = []
        self.wrote = 0

    def overdue(self, margin_s: float) -> bool:
        return self.left_s < margin_s

    def write(self) -> bool:
        can = self.gathers.pop(0) if self.gathers else True
        self.wrote += can
        return can


def service(leaver: Leaver) -> Any:
    made: Any = object.__new__(_ServerMain)
    made._session = made._server = leaver
    made._left_behind, made._pen = False, threading.Lock()
    made._write_one = leaver.write
    return made


def test_the_only_one_leaves_a_checkpoint_at_once_and_serves_on_until_its_time_is_up() -> None:
    leaver = Leaver("s0")
    going = service(leaver)
    assert [going._may_go() for _ in range(3)] == [False] * 3
    assert leaver.wrote == 1
    leaver.left_s = 4.0
    assert going._may_go()
    assert leaver.wrote == 2, "what was trained meanwhile is not lost"


def test_a_state_that_cannot_be_had_just_now_is_tried_again_and_not_left_without() -> None:
    leaver = Leaver("s0")
    leaver.left_s, leaver.gathers = 4.0, [False, False, False]
    going = service(leaver)
    tried = 0
    while not going._may_go():
        tried += 1
        assert tried < 10
    assert leaver.wrote == 1


def test_one_that_does_not_keep_the_ledger_stays_longer_than_the_one_that_does() -> None:
    leaver = Leaver("s0", "s1", leads=False)
    going = service(leaver)
    leaver.left_s = 4.0
    assert not going._may_go()
    leaver.left_s = 0.5
    assert going._may_go()


@pytest.mark.parametrize("leads", [True, False])
def test_who_has_handed_everything_over_goes_at_once(leads: bool) -> None:
    leaver = Leaver("s1", leads=leads)
    assert service(leaver)._may_go()
    assert leaver.wrote == 0
