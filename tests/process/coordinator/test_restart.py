"""kill -9 of the coordinator: nothing is forgotten, and what was lost meanwhile is resolved."""

from __future__ import annotations

import contextlib

import pytest
from tests.process.coordinator.fakes import Coordinator, FakeAgent, FakeMember

from shoal.coordinator import compaction
from shoal.core.membership import events as ev
from shoal.store import journal, sqlite_views
from shoal.testing.wait import until
from shoal.wire import agent_messages
from shoal.wire import member_messages as ms

pytestmark = pytest.mark.process
# A world forms only when it is full, and no member is lost for being slow.
SETTINGS = {"regroup_s": 60.0, "lease_s": 60.0}


def three(coordinator: Coordinator, run: str) -> list[FakeMember]:
    members = [FakeMember(coordinator, run, f"m/{i}").hello().ready() for i in range(3)]
    for member in members:
        assert member.hear(ms.EnterWorldMsg).world.size == 3
    return members


def hear_with_heartbeats(members: list[FakeMember]) -> ms.EnterWorldMsg:
    """Return the next world of the first member, while all of these renew their leases."""
    for _ in range(200):
        for member in members:
            member.heartbeat(1, 40)
        with contextlib.suppress(TimeoutError):
            return members[0].hear(ms.EnterWorldMsg, within_s=0.1)
    raise AssertionError("no world was formed")


def test_members_reconnect_to_a_killed_coordinator_and_nothing_changes(coordinator: Coordinator) -> None:
    run = coordinator.create(1, 3, settings=SETTINGS)
    members = three(coordinator, run)
    url, token = coordinator.url, coordinator.credentials.token
    coordinator.kill()
    coordinator.restart()
    assert (coordinator.url, coordinator.credentials.token) == (url, token)
    for member in members:
        member.reconnect()
        member.hello(world=1, step=40)
        assert member.hear(ms.WelcomeMsg).started
    for member in members:
        member.heartbeat(1, 41)
    view = coordinator.await_view(run, status="training", world=1, world_size=3, step=41, losses=0)
    assert [m["connected"] for m in view["members"]] == [True] * 3


def test_member_lost_while_the_coordinator_was_down_expires_by_its_lease(coordinator: Coordinator) -> None:
    run = coordinator.create(1, 3, settings={**SETTINGS, "lease_s": 3.0, "reconnect_s": 0.3, "heartbeat_s": 0.2})
    members = three(coordinator, run)
    coordinator.kill()
    coordinator.restart()
    for member in members[:2]:
        member.reconnect()
        member.hello(world=1, step=40, broken=True)
    world = hear_with_heartbeats(members[:2]).world
    assert (world.number, world.step) == (2, 40)
    assert [seat.member for seat in world.seats] == ["m/0", "m/1"]


def test_views_are_rebuilt_from_the_journal(coordinator: Coordinator) -> None:
    run = coordinator.create(1, 3, settings=SETTINGS)
    members = three(coordinator, run)
    members[0].heartbeat(1, 7, loss=0.5, samples_per_s=10.0)
    coordinator.await_view(run, step=7, loss=0.5)
    members[0].say(ms.CheckpointWrittenMsg(7, "there/7", 100, 0.1))
    before = coordinator.await_view(run, checkpoint_step=7)
    story = coordinator.story(run)
    coordinator.kill()
    for file in coordinator.directory.glob("views.sqlite*"):
        file.unlink()
    coordinator.restart()
    again = coordinator.story(run)
    assert again[: len(story)] == story
    coordinator.close()
    directory = coordinator.directory
    assert sqlite_views.story(directory, run)[0].text == story[0]
    assert [(w.number, w.members) for w in sqlite_views.worlds(directory, run)] == [(1, ("m/0", "m/1", "m/2"))]
    assert sqlite_views.checkpoints(directory, run) == [(7, "there/7")]
    found = sqlite_views.runs(directory)
    assert [(r.run, r.step, r.checkpoint_path) for r in found] == [(run, before["step"], "there/7")]


def test_event_is_journaled_before_its_effect_is_visible(coordinator: Coordinator) -> None:
    run = coordinator.create(1, 1, settings=SETTINGS)
    member = FakeMember(coordinator, run, "m/0").hello()
    member.hear(ms.WelcomeMsg)
    assert [entry.kind for entry in journal.read(coordinator.directory)] == [
        "CoordinatorStarted",
        "RunCreated",
        "MemberConnected",
    ]
    member.ready()
    member.hear(ms.EnterWorldMsg)
    assert list(journal.read(coordinator.directory))[-1].kind == "MemberReady"


def test_resumed_run_starts_from_its_checkpoint(coordinator: Coordinator) -> None:
    run = coordinator.create(1, 1, settings=SETTINGS)
    member = FakeMember(coordinator, run, "m/0").hello().ready()
    member.hear(ms.EnterWorldMsg)
    status, _ = coordinator.ask("POST", f"/v1/runs/{run}/stop", {"reason": "enough"})
    assert status == 200
    stop = member.hear(ms.StopMsg)
    assert (stop.reason, stop.checkpoint, stop.exit_code) == ("enough", True, 75)
    member.say(ms.CheckpointWrittenMsg(5, "there/5", 100, 0.1))
    member.say(ms.LeftMsg(5))
    view = coordinator.await_view(run, status="stopped")
    assert (view["exit_code"], view["checkpoint_step"], view["reason"]) == (75, 5, "enough")
    member.close()
    coordinator.kill()
    coordinator.restart()
    status, view = coordinator.ask("POST", f"/v1/runs/{run}/resume")
    assert status == 200
    again = FakeMember(coordinator, run, "n/0", "2").hello().ready()
    again.hear(ms.RestoreMsg)
    again.ready(step=5, restored=True)
    world = again.hear(ms.EnterWorldMsg).world
    assert (world.number, world.step, world.fresh) == (2, 5, False)


def test_agent_and_its_members_reconnect_to_a_killed_coordinator(coordinator: Coordinator) -> None:
    agent = FakeAgent(coordinator, "lab").hello()
    run = coordinator.create(2, 2, settings=SETTINGS)
    orders = [agent.hear(agent_messages.StartMemberMsg) for _ in range(2)]
    for order in orders:
        agent.started(order)
    coordinator.await_view(run, status="starting")
    coordinator.kill()
    coordinator.restart()
    agent.reconnect()
    agent.hello(tuple((o.run, o.member, o.incarnation) for o in orders))
    agent.exited(orders[0], "infrastructure", "killed by signal 9", None)
    again = agent.hear(agent_messages.StartMemberMsg)
    assert (again.member, again.restart) == (orders[0].member, True)
    assert again.incarnation not in {o.incarnation for o in orders}


def test_long_journal_is_truncated_and_nothing_is_forgotten(coordinator: Coordinator) -> None:
    run = coordinator.create(1, 3, settings=SETTINGS)
    members = three(coordinator, run)
    members[0].say(ms.CheckpointWrittenMsg(7, "there/7", 100, 0.1))
    coordinator.await_view(run, checkpoint_step=7)
    story = coordinator.story(run)
    coordinator.kill()
    opened = journal.Journal(coordinator.directory)
    for step in range(8, 8 + compaction.MAX_EVENTS):
        opened.append(run, ev.ProgressRecorded(step), opened.last_at)
    opened.close()
    coordinator.restart()
    file = coordinator.directory / journal.FILE
    until(
        lambda: (coordinator.directory / journal.SNAPSHOT_FILE).exists() and file.stat().st_size < 10_000, "a snapshot"
    )
    coordinator.kill()
    coordinator.restart()
    assert len(list(journal.read(coordinator.directory))) < 10
    for member in members:
        member.reconnect()
        member.hello(world=1, step=40)
        assert member.hear(ms.WelcomeMsg).started
    view = coordinator.await_view(run, status="training", world=1, world_size=3, losses=0)
    assert (view["checkpoint_step"], view["step"]) == (7, 7 + compaction.MAX_EVENTS)
    assert coordinator.story(run)[: len(story)] == story
