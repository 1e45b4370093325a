"""What agents say, as events of the fleet."""

from __future__ import annotations

import asyncio
import re
from functools import partial
from itertools import count

from shoal.coordinator.connections import AgentConnection, same_version
from shoal.coordinator.service import CoordinatorService
from shoal.core import addresses
from shoal.core.fleet import events as fe
from shoal.core.runs import events as runs_events
from shoal.errors import BadMessage, MachineCheckFailed, NameTaken
from shoal.wire import agent_messages
from shoal.wire import member_messages as ms
from shoal.wire.machine_check import CheckRequest, CheckResult

BEAT_S = 1.0
BEATS_PER_S = 200
SILENT_S = 10.0
EXAMINED_WITHIN_S = 40.0


class AgentHandler:
    """The agents' side of the coordinator."""

    def __init__(self, service: CoordinatorService) -> None:
        self._service = service
        self._looked_at = 0.0
        service.at_every_tick(self.drop_the_silent)
        self._numbers = count(1)
        self._asked: dict[int, asyncio.Future[CheckResult]] = {}

    async def examine(self, agent: str, question: CheckRequest) -> CheckResult:
        """Ask an agent to look at its machine; what it found."""
        link = self._service.agents.get(agent)
        if link is None:
            raise MachineCheckFailed(f"{agent} is not connected", do="shoal nodes lists who is")
        number = next(self._numbers)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        link.send(agent_messages.RunCheckMsg(number, question))
        try:
            return await asyncio.wait_for(answer, EXAMINED_WITHIN_S + question.lasting_s)
        except TimeoutError:
            raise MachineCheckFailed(
                f"{agent} did not answer within {EXAMINED_WITHIN_S + question.lasting_s:g} s",
                do="look at its log, agent.log in the directory of the hire",
            ) from None
        finally:
            del self._asked[number]

    def said(self, link: AgentConnection, message: agent_messages.FromAgent) -> None:
        link.heard_at = self._service.heard_at = self._service.clock.now()
        if isinstance(message, agent_messages.AgentHelloMsg):
            self._service.attempt(partial(self._hello, link, message))
        elif not link.agent:
            link.refuse(BadMessage.code, "the first message was not a hello")
        elif isinstance(message, agent_messages.AgentHeartbeatMsg):
            link.load, link.memory_free_bytes = message.load, message.memory_free_bytes
        elif isinstance(message, agent_messages.CheckResultMsg):
            answer = self._asked.get(message.number)
            if answer is not None and not answer.done():
                answer.set_result(message.finding)
        elif isinstance(message, agent_messages.LogLinesMsg):
            self._log(message)
        else:
            self._service.attempt(partial(self._event, link, message))

    def _hello(self, link: AgentConnection, hello: agent_messages.AgentHelloMsg) -> None:
        if link.closed or not same_version(link, hello.protocol, hello.version):
            return
        old = self._service.agents.get(hello.agent)
        if old is not None and old is not link:
            if old.pid != hello.pid and self._service.clock.now() - old.heard_at < 3 * _beat_s(
                len(self._service.agents)
            ):
                do = "give this one another name with --name"
                link.refuse(NameTaken.code, f"an agent named {hello.agent} is already connected", do=do)
                return
            old.close()
        if not re.fullmatch(r"[\w.:-]+", hello.agent) or len(hello.agent) > 100:
            link.refuse(BadMessage.code, "the name of the agent cannot be used", why=repr(hello.agent[:80]))
            return
        host = _host_of(link, hello)
        known = self._service.runs.machines.get(hello.agent)
        told = runs_events.MachineReported(hello.agent, hello.machine, hello.pid)
        successor = known is not None and known.pid != hello.pid
        hire = self._service.runs.supply.allocations.get(hello.agent)
        pool = hire.pool if hire is not None else ""
        joined = fe.AgentConnected(
            hello.agent, hello.slots, host, hello.members, successor, pool, self._service.runs.size_of(hello.agent)
        )
        if known != told:
            self._service.handle("", told)
        asked = self._service.record("", joined)
        link.agent, link.pid = hello.agent, hello.pid
        self._service.agents[hello.agent] = link
        link.send(agent_messages.AgentWelcomeMsg(_beat_s(len(self._service.agents)), self._service.name))
        self._service.carry_out(asked)

    def _event(self, link: AgentConnection, message: agent_messages.FromAgent) -> None:
        if isinstance(message, agent_messages.MemberStartedMsg):
            started = fe.ProcessStarted(message.run, message.member, message.incarnation, message.pid, message.warm)
            self._service.handle(message.run, started)
        elif isinstance(message, agent_messages.MemberExitedMsg):
            if self._is_news(message):
                self._service.handle(message.run, _exited(message))
        elif isinstance(message, agent_messages.MachineNoticeMsg):
            self._notice(link, message)

    def _is_news(self, message: agent_messages.MemberExitedMsg) -> bool:
        """Agents tell exits again after a reconnect; the second telling is not worth a line."""
        process = self._service.runs.fleet.processes.get((message.run, message.member))
        return process is not None and process.incarnation == message.incarnation and process.alive

    def _notice(self, link: AgentConnection, message: agent_messages.MachineNoticeMsg) -> None:
        cause = f"{message.source}: {message.detail}" if message.detail else message.source
        asked = self._service.record("", fe.AgentNotice(link.agent, message.within_s, cause))
        for process in self._service.runs.fleet.processes.values():
            member = self._service.live(process.run).links.get(process.member)
            if process.agent == link.agent and process.alive and member is not None:
                member.send(ms.LeavingMsg(message.within_s, cause))
        self._service.carry_out(asked)

    def _log(self, message: agent_messages.LogLinesMsg) -> None:
        if message.run in self._service.runs.runs:
            try:
                self._service.logs.append(message.run, message.member, message.lines)
            except OSError:
                # The agent keeps the full file on its machine; here the lines are only a copy.
                return

    def gone(self, link: AgentConnection) -> None:
        self._service.hung_up(link)
        if link.agent and self._service.agents.get(link.agent) is link:
            del self._service.agents[link.agent]
            self._service.attempt(partial(self._service.handle, "", fe.AgentDisconnected(link.agent)))

    def drop_the_silent(self, now: float) -> None:
        """A connection on which nothing comes any more is as good as closed."""
        if now - self._looked_at < BEAT_S:
            return
        self._looked_at = now
        for link in list(self._service.agents.values()):
            if now - link.heard_at > SILENT_S:
                link.close()
                self.gone(link)


def _beat_s(agents: int) -> float:
    """How often one of so many agents beats: the more there are the more rarely, but still well within its silence."""
    return min(max(BEAT_S, agents / BEATS_PER_S), SILENT_S / 4)


def _exited(message: agent_messages.MemberExitedMsg) -> fe.ProcessExited:
    return fe.ProcessExited(
        message.run,
        message.member,
        message.incarnation,
        message.cause,
        message.detail,
        message.exit_code,
        message.signal,
    )


def _host_of(link: AgentConnection, hello: agent_messages.AgentHelloMsg) -> str:
    """The address of an agent's machine for others: not loopback, if they may be elsewhere."""
    if not addresses.is_loopback(link.peer):
        return link.peer
    outer = [one for one in hello.machine.addresses if addresses.is_shareable(one)]
    return outer[0] if outer and link.base_url.startswith("https:") else "127.0.0.1"
