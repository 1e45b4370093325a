"""Worlds form and re-form through a real coordinator."""

from __future__ import annotations

import pytest
from tests.process.coordinator.fakes import Coordinator, FakeMember

from shoal.wire import member_messages as ms

pytestmark = pytest.mark.process
CALM = {"regroup_s": 60.0, "lease_s": 60.0, "reconnect_s": 60.0}


def members_of(coordinator: Coordinator, run: str, count: int) -> list[FakeMember]:
    found = [FakeMember(coordinator, run, f"m/{i}").hello() for i in range(count)]
    for member in found:
        assert not member.hear(ms.WelcomeMsg).started
        member.ready()
    return found


def test_world_forms_when_all_members_are_ready(coordinator: Coordinator) -> None:
    run = coordinator.create(2, 2, settings=CALM)
    members = members_of(coordinator, run, 2)
    worlds = [member.hear(ms.EnterWorldMsg).world for member in members]
    assert worlds[0] == worlds[1]
    assert [seat.member for seat in worlds[0].seats] == ["m/0", "m/1"]
    view = coordinator.view(run)
    assert (view["status"], view["world"], view["world_size"]) == ("training", 1, 2)


def test_closed_connection_and_broken_ring_form_the_next_world_at_once(coordinator: Coordinator) -> None:
    run = coordinator.create(1, 3, settings=CALM)
    members = members_of(coordinator, run, 3)
    for member in members:
        member.hear(ms.EnterWorldMsg)
    members[2].socket.close()
    for member in members[:2]:
        member.say(ms.WorldBrokenMsg(1, 17, ("m/2",), "connection reset"))
    world = members[0].hear(ms.EnterWorldMsg).world
    assert (world.number, world.step, world.size) == (2, 17, 2)
    assert members[1].hear(ms.EnterWorldMsg).world == world
    assert any("m/2 is lost" in line for line in coordinator.story(run))
