"""Messages of agents become events of the fleet."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.coordinator.stage import agent_connection, agent_hello, create_run, open_service, sent

from shoal.coordinator.agent_handler import SILENT_S, AgentHandler, _heartbeat_s
from shoal.coordinator.service import CoordinatorService
from shoal.coordinator.storage import logs
from shoal.errors import MachineCheckFailed
from shoal.wire import agent_messages as am
from shoal.wire.machine_check import CheckRequest, CheckResult


@pytest.fixture
def service(tmp_path: Path) -> Iterator[CoordinatorService]:
    service = open_service(tmp_path)
    yield service
    service.close()


def test_agent_is_welcomed_and_starts_the_members_of_a_waiting_run(service: CoordinatorService) -> None:
    create_run(service, low=1, high=2)
    connection = agent_connection()
    AgentHandler(service).on_message(connection, agent_hello())
    welcome, *orders = sent(connection)
    assert isinstance(welcome, am.AgentWelcomeMsg)
    assert {order.member for order in orders} == {"local/0", "local/1"}
    assert orders[0].env["SHOAL_URL"] == "http://127.0.0.1:1"


def test_second_agent_of_a_name_is_rejected_while_the_first_is_alive(service: CoordinatorService) -> None:
    handler, first, second = AgentHandler(service), agent_connection(), agent_connection()
    handler.on_message(first, agent_hello(pid=1))
    handler.on_message(second, agent_hello(pid=2))
    assert (second.closed, first.closed) == (True, False)
    assert sent(second)[0].code == "S205"


@pytest.mark.parametrize("name", ["a b", "a/b", "x" * 101, "a\n"])
def test_invalid_agent_name_is_rejected(service: CoordinatorService, name: str) -> None:
    connection = agent_connection()
    AgentHandler(service).on_message(connection, agent_hello(name))
    assert connection.closed
    assert name not in service.live.agents


def test_repeated_exit_of_a_member_is_counted_once(service: CoordinatorService) -> None:
    create_run(service, low=1, high=1)
    handler, connection = AgentHandler(service), agent_connection()
    handler.on_message(connection, agent_hello())
    order = sent(connection)[1]
    exited = am.MemberExitedMsg(order.run, order.member, order.incarnation, 1, None, "user")
    handler.on_message(connection, exited)
    process = service.state.fleet.processes[order.run, order.member]
    handler.on_message(connection, exited)
    assert service.state.fleet.processes[order.run, order.member] == process


def test_log_lines_are_kept_for_known_runs_only(service: CoordinatorService) -> None:
    create_run(service)
    handler, connection = AgentHandler(service), agent_connection()
    handler.on_message(connection, agent_hello())
    handler.on_message(connection, am.LogLinesMsg("r-1", "local/0", ("hello",)))
    handler.on_message(connection, am.LogLinesMsg("../r-2", "local/0", ("hello",)))
    assert logs.page(service.directory, "r-1").lines == (("local/0", "hello"),)
    assert not (service.directory / "r-2").exists()


def test_silent_agent_is_disconnected(service: CoordinatorService) -> None:
    handler, connection = AgentHandler(service), agent_connection()
    handler.on_message(connection, agent_hello())
    handler.close_silent(service.clock.now())
    assert not connection.closed
    handler.close_silent(service.clock.now() + SILENT_S + 1)
    assert connection.closed
    assert not service.live.agents


def test_check_returns_the_answer_of_its_number(service: CoordinatorService) -> None:
    handler, connection = AgentHandler(service), agent_connection()
    handler.on_message(connection, agent_hello())

    async def check() -> CheckResult:
        task = asyncio.create_task(handler.check("local", CheckRequest()))
        await asyncio.sleep(0)
        number = sent(connection)[-1].number
        handler.on_message(connection, am.CheckResultMsg(number + 1, CheckResult(0.0, 0.0)))
        handler.on_message(connection, am.CheckResultMsg(number, CheckResult(1.0, 2.0)))
        return await task

    assert asyncio.run(check()) == CheckResult(1.0, 2.0)
    with pytest.raises(MachineCheckFailed, match="not connected"):
        asyncio.run(handler.check("elsewhere", CheckRequest()))


def test_heartbeats_of_all_agents_together_are_bounded() -> None:
    assert (_heartbeat_s(1), _heartbeat_s(400), _heartbeat_s(10_000)) == (1.0, 2.0, SILENT_S / 4)
