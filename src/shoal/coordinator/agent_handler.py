"""Agent handler: turns the messages of agents into events of the fleet.

An agent says in its hello which members run under it, so that the fleet can compare. If two agents have the same name,
the older connection is kept while it is alive; a new process of the same agent replaces it.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable
from functools import partial
from itertools import count

from shoal.coordinator.connections import AgentConnection, accept_version, reject_unstorable
from shoal.coordinator.service import CoordinatorService
from shoal.core import addresses
from shoal.core.fleet import events as fe
from shoal.core.runs.decide import Instructions
from shoal.core.runs.events import MachineReported
from shoal.errors import BadMessage, MachineCheckFailed, NameTaken
from shoal.wire import agent_messages as am
from shoal.wire import member_messages as ms
from shoal.wire.machine_check import CheckRequest, CheckResult

HEARTBEAT_S = 1.0
HEARTBEATS_PER_S = 200
SILENT_S = 10.0
CHECK_TIMEOUT_S = 40.0
MAX_NAME = 100


class AgentHandler:
    """Handles the messages and connections of all agents."""

    def __init__(self, service: CoordinatorService) -> None:
        self._service = service
        self._agents = service.live.agents
        self._looked_at = 0.0
        self._check_numbers = count(1)
        self._checks: dict[int, asyncio.Future[CheckResult]] = {}

    async def check(self, agent: str, request: CheckRequest) -> CheckResult:
        """Have an agent check its machine and return the result; raise MachineCheckFailed."""
        connection = self._agents.get(agent)
        if connection is None:
            raise MachineCheckFailed(f"agent {agent} is not connected", do="shoal nodes lists the connected agents")
        number, timeout_s = next(self._check_numbers), CHECK_TIMEOUT_S + request.lasting_s
        reply = self._checks[number] = asyncio.get_running_loop().create_future()
        connection.send(am.RunCheckMsg(number, request))
        try:
            return await asyncio.wait_for(reply, timeout_s)
        except TimeoutError:
            raise MachineCheckFailed(
                f"agent {agent} did not reply within {timeout_s:g} s",
                do="see agent.log in the directory of its allocation",
            ) from None
        finally:
            del self._checks[number]

    def on_message(self, connection: AgentConnection, message: am.FromAgent) -> None:
        self._service.live.received(connection)
        match message:
            case am.AgentHelloMsg():
                self._attempt(connection, partial(self._on_hello, connection, message))
            case _ if not connection.agent:
                connection.reject(BadMessage.code, "the first message was not a hello")
            case am.AgentHeartbeatMsg():
                connection.load, connection.memory_free_bytes = message.load, message.memory_free_bytes
            case am.CheckResultMsg():
                reply = self._checks.get(message.number)
                if reply is not None and not reply.done():
                    reply.set_result(message.finding)
            case am.LogLinesMsg():
                self._on_log_lines(message)
            case _:
                self._attempt(connection, partial(self._on_event, connection, message))

    def _attempt(self, connection: AgentConnection, action: Callable[[], None]) -> None:
        self._service.attempt(partial(reject_unstorable, connection, action))

    def on_close(self, connection: AgentConnection) -> None:
        self._service.live.closed(connection)
        if connection.agent and self._agents.get(connection.agent) is connection:
            del self._agents[connection.agent]
            self._service.attempt(partial(self._service.handle, "", fe.AgentDisconnected(connection.agent)))

    def close_silent(self, now: float) -> None:
        """Close connections on which nothing has arrived for ten seconds; called on every tick."""
        if now - self._looked_at < HEARTBEAT_S:
            return
        self._looked_at = now
        for connection in list(self._agents.values()):
            if now - connection.heard_at > SILENT_S:
                connection.close()
                self.on_close(connection)

    def _on_hello(self, connection: AgentConnection, hello: am.AgentHelloMsg) -> None:
        if connection.closed or not accept_version(connection, hello.protocol, hello.version):
            return
        old = self._agents.get(hello.agent)
        if old is not None and old is not connection:
            heartbeat_s = _heartbeat_s(len(self._agents))
            if old.pid != hello.pid and self._service.clock.now() - old.heard_at < 3 * heartbeat_s:
                what, do = f"an agent named {hello.agent} is already connected", "choose another name with --name"
                connection.reject(NameTaken.code, what, do=do)
                return
            old.close()
        if not re.fullmatch(r"[\w.:-]+", hello.agent) or len(hello.agent) > MAX_NAME:
            connection.reject(BadMessage.code, "invalid agent name", why=repr(hello.agent[:80]))
            return
        instructions = self._record_agent(connection, hello)
        connection.agent, connection.pid = hello.agent, hello.pid
        self._agents[hello.agent] = connection
        connection.send(am.AgentWelcomeMsg(_heartbeat_s(len(self._agents)), self._service.name))
        self._service.carry_out(instructions)

    def _record_agent(self, connection: AgentConnection, hello: am.AgentHelloMsg) -> Instructions:
        state = self._service.state
        previous = state.machines.get(hello.agent)
        report = MachineReported(hello.agent, hello.machine, hello.pid)
        if previous != report:
            self._service.handle("", report)
        allocation = state.provisioning.allocations.get(hello.agent)
        connected = fe.AgentConnected(
            hello.agent,
            hello.slots,
            _peer_address(connection, hello),
            hello.members,
            previous is not None and previous.pid != hello.pid,
            allocation.pool if allocation is not None else "",
            state.slot_size(hello.agent),
        )
        return self._service.record("", connected)

    def _on_event(self, connection: AgentConnection, message: am.FromAgent) -> None:
        match message:
            case am.MemberStartedMsg(run, member, incarnation, pid, warm):
                self._service.handle(run, fe.ProcessStarted(run, member, incarnation, pid, warm))
            case am.MemberExitedMsg():
                if self._is_alive(message):
                    self._service.handle(message.run, _exit_event(message))
            case am.MachineNoticeMsg():
                self._on_notice(connection, message)

    def _is_alive(self, message: am.MemberExitedMsg) -> bool:
        """Return whether the fleet takes this process to be alive: after a reconnect, agents repeat old exits."""
        process = self._service.state.fleet.processes.get((message.run, message.member))
        return process is not None and process.incarnation == message.incarnation and process.alive

    def _on_notice(self, connection: AgentConnection, message: am.MachineNoticeMsg) -> None:
        cause = f"{message.source}: {message.detail}" if message.detail else message.source
        instructions = self._service.record("", fe.AgentNotice(connection.agent, message.within_s, cause))
        for process in self._service.state.fleet.processes.values():
            member = self._service.live.run(process.run).connections.get(process.member)
            if process.agent == connection.agent and process.alive and member is not None:
                member.send(ms.LeavingMsg(message.within_s, cause))
        self._service.carry_out(instructions)

    def _on_log_lines(self, message: am.LogLinesMsg) -> None:
        if message.run in self._service.state.runs:
            # The agent keeps the whole file on its machine; these lines are a copy.
            with contextlib.suppress(OSError):
                self._service.logs.append(message.run, message.member, message.lines)


def _heartbeat_s(agents: int) -> float:
    """Return the seconds between heartbeats of one of so many agents: at most 200 a second arrive from all."""
    return min(max(HEARTBEAT_S, agents / HEARTBEATS_PER_S), SILENT_S / 4)


def _exit_event(message: am.MemberExitedMsg) -> fe.ProcessExited:
    return fe.ProcessExited(
        message.run,
        message.member,
        message.incarnation,
        message.cause,
        message.detail,
        message.exit_code,
        message.signal,
    )


def _peer_address(connection: AgentConnection, hello: am.AgentHelloMsg) -> str:
    """Return the address of the agent's machine for other machines: not loopback, if there may be any."""
    if not addresses.is_loopback(connection.peer):
        return connection.peer
    outward = [address for address in hello.machine.addresses if addresses.is_shareable(address)]
    return outward[0] if outward and connection.base_url.startswith("https:") else "127.0.0.1"
