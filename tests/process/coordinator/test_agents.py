"""Agents are told what to start and end, and runs end as they should."""

from __future__ import annotations

import json

import pytest
from tests.process.coordinator.fakes import Coordinator, FakeAgent, FakeMember

from shoal.wire import agent_messages
from shoal.wire import member_messages as ms

pytestmark = pytest.mark.process
SETTINGS = {"regroup_s": 60.0, "lease_s": 60.0, "backoff_s": 0.0}


def test_run_is_started_trained_and_done(coordinator: Coordinator) -> None:
    agent = FakeAgent(coordinator, "lab").hello()
    run = coordinator.create(2, 2, settings=SETTINGS, env={"A": "b"})
    orders = [agent.hear(agent_messages.StartMemberMsg) for _ in range(2)]
    assert [order.member for order in orders] == ["lab/0", "lab/1"]
    env = orders[0].env
    assert (env["A"], env["SHOAL_RUN"], env["SHOAL_MEMBER"]) == ("b", run, "lab/0")
    assert (env["SHOAL_URL"], env["SHOAL_INCARNATION"]) == (coordinator.url, orders[0].incarnation)
    assert json.loads(env["SHOAL_SETTINGS"])["lease_s"] == SETTINGS["lease_s"]
    assert env["SHOAL_RUN_DIR"].endswith(f"runs/{run}")
    members = []
    for order in orders:
        agent.started(order)
        members.append(FakeMember(coordinator, run, order.member, order.incarnation).hello().ready())
    for member in members:
        member.hear(ms.EnterWorldMsg)
    agent.say(agent_messages.LogLinesMsg(run, "lab/0", ("one", "two")))
    for member, order in zip(members, orders, strict=True):
        member.say(ms.DoneMsg(100))
        member.close()
        agent.exited(order, "done")
    view = coordinator.await_view(run, status="done")
    assert (view["exit_code"], view["step"], view["losses"]) == (0, 100, 0)
    _, page = coordinator.ask("GET", f"/v1/runs/{run}/logs")
    assert page["lines"] == [["lab/0", "one"], ["lab/0", "two"]]
    _, rest = coordinator.ask("GET", f"/v1/runs/{run}/logs?after={page['next']}")
    assert rest["lines"] == []
    status, problem = coordinator.ask("POST", f"/v1/runs/{run}/stop")
    assert (status, problem["code"]) == (400, "S120")


def test_script_that_always_raises_fails_the_run_with_its_exception(coordinator: Coordinator) -> None:
    agent = FakeAgent(coordinator, "lab").hello()
    run = coordinator.create(1, 1, settings={**SETTINGS, "restarts.user": 1})
    for _ in range(2):
        order = agent.hear(agent_messages.StartMemberMsg)
        member = FakeMember(coordinator, run, order.member, order.incarnation).hello()
        member.say(ms.ExceptionRaisedMsg("ValueError", "no such column", 'File "train.py", line 3', step=5))
        member.hear(ms.WelcomeMsg)
        member.close()
        agent.exited(order, "user", "ValueError: no such column", 1)
    view = coordinator.await_view(run, status="failed")
    assert view["exit_code"] == 1
    assert view["reason"] == "lab/0 raised ValueError: no such column"
    assert "lab/0 raised ValueError: no such column" in coordinator.story(run)


def test_scaling_down_stops_the_last_members_and_scaling_up_starts_others(coordinator: Coordinator) -> None:
    agent = FakeAgent(coordinator, "lab").hello()
    run = coordinator.create(1, 2, settings=SETTINGS)
    orders = [agent.hear(agent_messages.StartMemberMsg) for _ in range(2)]
    status, view = coordinator.ask("POST", f"/v1/runs/{run}/scale", {"min": 1, "max": 1})
    assert (status, view["members_max"]) == (200, 1)
    end = agent.hear(agent_messages.StopMemberMsg)
    assert end.member == "lab/1"
    assert end.grace_s > 1.0
    agent.exited(orders[1], "asked")
    coordinator.ask("POST", f"/v1/runs/{run}/scale", {"min": 1, "max": 3})
    assert sorted(agent.hear(agent_messages.StartMemberMsg).member for _ in range(2)) == ["lab/1", "lab/2"]


def test_notice_of_a_machine_reaches_its_members_and_blocks_starts_there(coordinator: Coordinator) -> None:
    first, second = FakeAgent(coordinator, "lab", slots=1).hello(), FakeAgent(coordinator, "spot", slots=1).hello()
    run = coordinator.create(1, 2, settings=SETTINGS)
    orders = [agent.hear(agent_messages.StartMemberMsg) for agent in (first, second)]
    members = [FakeMember(coordinator, run, o.member, o.incarnation).hello().ready() for o in orders]
    for member in members:
        assert member.hear(ms.EnterWorldMsg).world.size == 2
    second.say(agent_messages.MachineNoticeMsg(120.0, "aws", "spot interruption"))
    told = members[1].hear(ms.LeavingMsg)
    assert (told.within_s, told.cause) == (120.0, "aws: spot interruption")
    proposal = members[0].hear(ms.PrepareWorldMsg)
    assert [seat.member for seat in proposal.world.seats] == ["lab/0"]
    members[0].say(ms.WorldEnteredMsg(proposal.world.number, 12))
    members[1].say(ms.LeftMsg(12))
    second.exited(orders[1], "preempted", exit_code=75)
    view = coordinator.await_view(run, world=2, world_size=1)
    assert view["losses"] == 0
    assert [m["member"] for m in view["members"]] == ["lab/0"]
    _, agents = coordinator.ask("GET", "/v1/agents")
    assert [a["notice"] for a in agents] == ["", "aws: spot interruption"]


def test_process_exit_loses_the_member_at_once(coordinator: Coordinator) -> None:
    agent = FakeAgent(coordinator, "lab").hello()
    run = coordinator.create(1, 2, settings=SETTINGS)
    orders = [agent.hear(agent_messages.StartMemberMsg) for _ in range(2)]
    members = [FakeMember(coordinator, run, o.member, o.incarnation).hello().ready() for o in orders]
    for member in members:
        member.hear(ms.EnterWorldMsg)
    agent.exited(orders[1], "infrastructure", "killed by signal 9", None)
    members[0].hear(ms.DissolveWorldMsg)
    members[0].say(ms.WorldBrokenMsg(1, 8))
    world = members[0].hear(ms.EnterWorldMsg).world
    assert (world.size, world.step) == (1, 8)
    again = agent.hear(agent_messages.StartMemberMsg)
    assert (again.member, again.restart) == ("lab/1", True)
    joiner = FakeMember(coordinator, run, again.member, again.incarnation).hello().ready()
    assert joiner.hear(ms.PrepareWorldMsg).world.size == 2


def test_torchrun_script_is_restarted_as_a_group(coordinator: Coordinator) -> None:
    agent = FakeAgent(coordinator, "lab").hello()
    run = coordinator.create(2, 2, settings=SETTINGS, compat="torchrun")
    orders = [agent.hear(agent_messages.StartMemberMsg) for _ in range(2)]
    assert [o.env["RANK"] for o in orders] == ["0", "1"]
    assert {o.env["WORLD_SIZE"] for o in orders} == {"2"}
    assert {o.env["SHOAL_COMPAT"] for o in orders} == {"1"}
    assert {o.env["TORCHELASTIC_RESTART_COUNT"] for o in orders} == {"0"}
    agent.exited(orders[0], "infrastructure", "killed by signal 9", None)
    end = agent.hear(agent_messages.StopMemberMsg)
    assert end.member == orders[1].member
    assert "lab/0 ended: killed by signal 9" in end.reason
    agent.exited(orders[1], "asked")
    again = [agent.hear(agent_messages.StartMemberMsg) for _ in range(2)]
    assert {o.env["TORCHELASTIC_RESTART_COUNT"] for o in again} == {"1"}
    for order in again:
        agent.exited(order, "done")
    assert coordinator.await_view(run, status="done")["exit_code"] == 0


def test_prometheus_metrics_are_served(coordinator: Coordinator) -> None:
    import urllib.request

    run = coordinator.create(1, 2, settings=SETTINGS)
    request = urllib.request.Request(f"{coordinator.url}/metrics", headers=coordinator.credentials.headers)
    text = urllib.request.urlopen(request, timeout=60).read().decode()
    assert f'shoal_run_step{{name="train",run="{run}"}} 0.0' in text


def test_shutdown_ends_the_agents_and_leaves_the_run_resumable(coordinator: Coordinator) -> None:
    agent = FakeAgent(coordinator, "lab").hello()
    run = coordinator.create(1, 1, settings=SETTINGS)
    order = agent.hear(agent_messages.StartMemberMsg)
    assert coordinator.ask("POST", "/v1/shutdown")[0] == 200
    agent.hear(agent_messages.ShutDownMsg)
    agent.exited(order, "asked")
    assert coordinator.process.wait(180) == 0
    coordinator.restart()
    view = coordinator.view(run)
    assert (view["status"], view["exit_code"]) == ("resumable", 75)
