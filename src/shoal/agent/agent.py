"""Agent: connects the members of one machine with the coordinator, and outlives losing either.

What it owns. One agent per machine (or allocation) owns a directory with logs and project files, the warm process, and
every process below that. No other process starts or ends members: the coordinator only sends instructions
(`StartMemberMsg`, `StopMemberMsg`, `ShutDownMsg`), and decides about restarts from the exits that the agent reports.

While the coordinator is away. Members train on without it, so the agent keeps them and reconnects with growing pauses.
Whatever happens meanwhile waits in the `Outbox` and is sent after the reconnect: exits always, log lines as far as they
fit. On reconnect the agent lists the members it has, so that both sides agree again. There are limits: without
members, the agent exits after `idle_s` (sooner if it never found the coordinator, since the machine may cost
money); with members, it ends them after `orphan_timeout_s`, if that is set.

How members are ended for sure. Every way to end leads through the same steps: SIGTERM to each member, the grace period
in which it hands over, SIGKILL to its process tree, and at last SIGKILL to everything below the agent. Each layer
covers the failure of the one before:

- A member ignores SIGTERM: its tree is killed after the grace period.
- A member dies and leaves processes: the zygote kills them, as it is their new parent.
- The zygote dies: the kernel kills its members, and the agent kills what is left, as it is the next subreaper.
- The agent is killed: the zygote sees its socket close and kills everything.
- Both are killed: the next agent in this directory finds what is left by a mark in the environment.
- The process that started the agent disappears: the lifeline, a pipe from it, closes, and the agent ends everything.

Ways to end: SIGTERM, SIGINT or SIGHUP (another one, at least a second later, skips the grace period), the lifeline,
`ShutDownMsg`, and a coordinator that stays away for too long.

Notices. A notice source (`notices`) or a signal announces the end of the machine. The coordinator is told, and lets the
members leave between two steps; only if it cannot be reached does the agent signal them itself.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from websockets.exceptions import WebSocketException

import shoal
from shoal.agent import machine_info
from shoal.agent.member_processes import AgentContext, MemberProcesses
from shoal.agent.notices import source as notices
from shoal.agent.outbox import Outbox
from shoal.agent.processes import orphan_cleanup
from shoal.agent.uplink import AgentUplink
from shoal.core import addresses
from shoal.core.nouns import counted
from shoal.errors import CoordinatorUnreachable, HomeUnusable, MembershipError, NoCoordinatorAddress, ShoalError
from shoal.wire import connect_errors, credentials
from shoal.wire.agent_messages import (
    AgentHelloMsg,
    AgentWelcomeMsg,
    CheckResultMsg,
    MachineNoticeMsg,
    RunCheckMsg,
    ShutDownMsg,
    StartMemberMsg,
    StopMemberMsg,
    ToAgent,
)
from shoal.wire.protocol import PROTOCOL, RejectedMsg

if TYPE_CHECKING:
    from shoal.agent.machine_check import MachineCheck

log = logging.getLogger("shoal.agent")

_RETRY_MIN_S = 0.1
_RETRY_MAX_S = 2.0
_LOG_EVERY_S = 30.0
_ORPHAN_GRACE_S = 2.0
_FIRST_CONNECT_S = 180.0
_FLUSH_S = 2.0
_ONE_REQUEST_S = 1.0


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """Settings of an agent.

    `url` may be several addresses of the coordinator, separated by commas: the first that answers is used. Without
    members, the agent looks for a lost coordinator for `idle_s`; with members for `orphan_timeout_s`, None for no
    limit. `apart` says that this machine does not share the disk of the machine that started the run. `lifeline` is the
    descriptor of a pipe whose end ends the agent.
    """

    url: str
    token_file: str
    name: str
    directory: Path
    slots: int | None = None
    interface: str = ""
    grace_s: float = 30.0
    idle_s: float = 600.0
    orphan_timeout_s: float | None = None
    apart: bool = False
    connect_timeout_s: float = 5.0
    lifeline: int | None = None
    notice_source: str = ""
    notice_url: str = ""
    preload: tuple[str, ...] = ()


class Agent:
    """The agent of one machine; `run` returns the exit code of its process."""

    def __init__(self, settings: AgentSettings, environ: dict[str, str]) -> None:
        self._settings = settings
        self._outbox = Outbox()
        urls = addresses.split_list(settings.url)
        self._uplink = AgentUplink(urls, settings.token_file, settings.connect_timeout_s, self._outbox)
        self._source = (
            notices.open_source(settings.notice_source, settings.notice_url) if settings.notice_source else None
        )
        context = AgentContext(
            url=self._uplink.url,
            token_file=os.path.abspath(settings.token_file),
            directory=settings.directory,
            slots=settings.slots,
            interface=settings.interface,
            environ={**environ, orphan_cleanup.MARK: str(settings.directory)},
            cache=_shoal_home(environ, settings.directory) / "cache" / "blobs",
            apart=settings.apart,
            grace_s=settings.grace_s,
        )
        self._members = MemberProcesses(context, settings.preload, self._outbox)
        self._machine_check: MachineCheck | None = None
        self._ending = asyncio.Event()
        self._second_signal = asyncio.Event()
        self._signalled_at = float("-inf")
        self._grace_s = settings.grace_s
        self._end_reason = ""
        self._connects = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._random = random.Random()

    async def run(self) -> int:
        """Serve until told to end, or until the coordinator stays away for too long; return the exit code."""
        self._make_directory()
        # Held until this process ends: the agent that gets it next knows that it alone ends what is left of us.
        if orphan_cleanup.hold(self._settings.directory) is not None:
            await orphan_cleanup.clean_up_after(self._settings.directory)
        self._machine = machine_info.machine(self._settings.name)
        self._members.open()
        self._install_signal_handlers()
        uplink = asyncio.create_task(self._stay_connected())
        self._start_task(self._members.follow_logs())
        self._start_task(self._members.watch_memory())
        if self._source is not None:
            self._start_task(self._watch_for_notices(self._source))
        ending = asyncio.create_task(self._ending.wait())
        try:
            await asyncio.wait({uplink, ending}, return_when=asyncio.FIRST_COMPLETED)
            if uplink.done():
                uplink.result()
            await self._await_members()
            await self._flush_outbox()
        finally:
            await self._members.stop_all(0.0, "the agent ends")
            await self._members.warm.close()
            if self._machine_check is not None:
                self._machine_check.close()
            for task in (uplink, ending, *self._tasks):
                task.cancel()
        return 0

    def _make_directory(self) -> None:
        try:
            (self._settings.directory / "logs").mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise HomeUnusable(
                "the agent cannot create its log directory",
                where=str(self._settings.directory),
                why=str(error),
                do="use another --dir",
            ) from error

    # --- ways to end

    def _install_signal_handlers(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number == signal.SIGTERM or signal.getsignal(number) != signal.SIG_IGN:
                loop.add_signal_handler(number, self._on_signal, number)
        if self._settings.lifeline is not None:
            os.set_inheritable(self._settings.lifeline, False)
            loop.add_reader(self._settings.lifeline, self._on_lifeline, self._settings.lifeline)

    def _on_signal(self, number: int) -> None:
        now = time.monotonic()
        if self._ending.is_set():
            # `timeout` and batch systems signal a process and then its group: that is one request.
            if now - self._signalled_at >= _ONE_REQUEST_S:
                self._second_signal.set()
            return
        self._signalled_at = now
        name = signal.Signals(number).name
        self._outbox.put(MachineNoticeMsg(self._settings.grace_s, name, f"the agent received {name}"))
        self._members.notice_all()
        self._end(f"{name}", self._settings.grace_s)

    def _on_lifeline(self, descriptor: int) -> None:
        if os.read(descriptor, 4096):
            return
        asyncio.get_running_loop().remove_reader(descriptor)
        self._members.notice_all()
        self._end("the process that started this agent has ended", min(_ORPHAN_GRACE_S, self._settings.grace_s))

    def _end(self, why: str, grace_s: float) -> None:
        log.info("ending: %s", why)
        self._end_reason = why
        self._grace_s = grace_s
        self._ending.set()

    async def _await_members(self) -> None:
        """Wait for the members to hand over, at most the grace period or until a second signal; then kill them."""
        all_ended = asyncio.create_task(self._members.all_ended(self._grace_s))
        second_signal = asyncio.create_task(self._second_signal.wait())
        await asyncio.wait({all_ended, second_signal}, return_when=asyncio.FIRST_COMPLETED)
        for task in (all_ended, second_signal):
            task.cancel()
        await self._members.stop_all(0.0, f"the agent ends: {self._end_reason}")

    async def _flush_outbox(self) -> None:
        """Wait until everything is sent, at most `_FLUSH_S` seconds."""
        deadline = time.monotonic() + _FLUSH_S
        while self._uplink.connected and len(self._outbox) and time.monotonic() < deadline:
            await asyncio.sleep(0.02)

    async def _watch_for_notices(self, source: notices.NoticeSource) -> None:
        async for notice in source.notices():
            log.warning("notice from %s: %s, within %.0f s", notice.source, notice.detail, notice.within_s)
            self._outbox.put(MachineNoticeMsg(notice.within_s, notice.source, notice.detail))
            if not self._uplink.connected:
                self._members.notice_all()

    def _start_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a task of the agent failed", exc_info=error)

    # --- the coordinator

    async def _stay_connected(self) -> None:
        """Reconnect for as long as members live, or until an idle agent has waited long enough; then raise."""
        # Not the wall clock, which may jump: an agent that gives up takes its members with it.
        away_since = time.monotonic()
        pause_s = _RETRY_MIN_S
        log_at = 0.0
        while True:
            connects = self._connects
            why = await self._connect_once()
            if self._ending.is_set():
                await asyncio.Event().wait()
            if self._connects > connects:
                away_since, pause_s, log_at = time.monotonic(), _RETRY_MIN_S, 0.0
            # An agent that never found the coordinator most likely never will, and its machine may cost money.
            longest_s = self._settings.idle_s if self._connects else min(self._settings.idle_s, _FIRST_CONNECT_S)
            until = max(away_since, self._members.last_exit) + longest_s
            if not len(self._members) and time.monotonic() > until:
                several = "," in self._settings.url
                where = "at any of its addresses" if several else f"at {self._settings.url}"
                raise (NoCoordinatorAddress if several else CoordinatorUnreachable)(
                    f"the coordinator did not answer {where} for {longest_s:.0f} s",
                    why=why,
                    do="start it again; or open its port for this machine, or set address to one that reaches it",
                )
            if (
                self._settings.orphan_timeout_s is not None
                and time.monotonic() > away_since + self._settings.orphan_timeout_s
            ):
                self._members.notice_all()
                self._end(f"no coordinator answered for {self._settings.orphan_timeout_s:g} s", self._settings.grace_s)
                continue
            if time.monotonic() >= log_at:
                self._log_waiting(away_since, until, why)
                log_at = time.monotonic() + _LOG_EVERY_S
            await asyncio.sleep(pause_s * self._random.uniform(0.7, 1.3))
            pause_s = min(pause_s * 1.6, _RETRY_MAX_S)

    async def _connect_once(self) -> str:
        """Serve one connection; return why it ended. Raise if the first one is rejected: retrying would not help."""
        try:
            await self._uplink.serve(self._hello(), self._on_welcome, self._carry_out)
        except (OSError, TimeoutError, WebSocketException) as error:
            return connect_errors.describe(error)
        except MembershipError as error:
            if not self._connects and not len(self._members):
                raise
            return error.what
        return "it closed the connection"

    def _log_waiting(self, since: float, until: float, why: str) -> None:
        living = len(self._members)
        end = f"until its {counted(living, 'member')} ended" if living else f"until {_clock(until)}"
        log.warning("waiting for the coordinator at %s since %s, %s (%s)", self._settings.url, _clock(since), end, why)

    def _on_welcome(self, welcome: AgentWelcomeMsg) -> None:
        log.info("connected to coordinator %s at %s", welcome.coordinator, self._uplink.url)
        self._members.use_url(self._uplink.url)
        self._connects += 1

    def _hello(self) -> AgentHelloMsg:
        return AgentHelloMsg(
            protocol=PROTOCOL,
            version=shoal.__version__,
            agent=self._settings.name,
            machine=self._machine,
            pid=os.getpid(),
            slots=self._settings.slots,
            members=self._members.names,
        )

    def _carry_out(self, message: ToAgent) -> None:
        match message:
            case StartMemberMsg():
                if not self._ending.is_set():
                    self._start_task(self._members.start(message))
            case StopMemberMsg():
                name = (message.run, message.member, message.incarnation)
                self._start_task(self._members.stop(name, message.grace_s, message.reason))
            case ShutDownMsg():
                self._start_task(self._shut_down(message.reason))
            case RunCheckMsg():
                self._start_task(self._run_check(message, time.time()))
            case AgentWelcomeMsg() | RejectedMsg():
                pass

    async def _run_check(self, request: RunCheckMsg, received: float) -> None:
        """Check this machine in a thread, while members go on, and report the result."""
        self._machine_check = self._machine_check or self._new_machine_check()
        result = await self._machine_check.run(request.question, received, self._uplink.round_trips)
        self._outbox.put(CheckResultMsg(request.number, result))

    def _new_machine_check(self) -> MachineCheck:
        # Imported late: few agents are ever checked, and NumPy would delay the start of all of them.
        from shoal.agent.machine_check import MachineCheck

        return MachineCheck(
            credentials.read(self._settings.token_file).token,
            self._settings.name,
            self._settings.directory,
            lambda interface: machine_info.hosts_to_announce(self._uplink.url, interface or self._settings.interface),
        )

    async def _shut_down(self, reason: str) -> None:
        await self._members.stop_all(self._settings.grace_s, reason)
        self._end(reason, 0.0)


def _shoal_home(environ: dict[str, str], directory: Path) -> Path:
    """Return the directory that agents of this user share; the agent's own if the user has no home."""
    try:
        return Path(environ.get("SHOAL_HOME") or Path.home() / ".shoal")
    except RuntimeError:
        return directory


def _clock(at: float) -> str:
    """Return a time of the monotonic clock as the wall clock shows it."""
    return time.strftime("%H:%M:%S", time.localtime(time.time() + at - time.monotonic()))


def run(settings: AgentSettings, environ: dict[str, str]) -> int:
    """Run an agent; return its exit code. An error that ends it early is logged, and its exit code returned."""
    try:
        return asyncio.run(_run(settings, environ))
    except ShoalError as error:
        log.error("%s", error)
        return error.exit_code


async def _run(settings: AgentSettings, environ: dict[str, str]) -> int:
    return await Agent(settings, environ).run()
