"""The agent: joins members and coordinator together, and outlives losing either.

Members go on while the coordinator is away; what happens meanwhile is told when it is back.
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
_SAY_EVERY_S = 30.0
_ORPHAN_GRACE_S = 2.0
_FIRST_S = 180.0
_LAST_WORDS_S = 2.0


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """How to run an agent. `idle_s` is how long one without members looks for a lost coordinator.

    `url` may name several, with commas: the first that answers as the coordinator is taken.
    `orphan_timeout_s` is how long one with members does, before it ends them and itself: for ever, if it is None.
    `apart` says that this machine does not see the disk of who started the run.
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
    """One per machine; `live` returns the exit code of the process."""

    def __init__(self, settings: AgentSettings, environ: dict[str, str]) -> None:
        self._settings = settings
        self._outbox = Outbox()
        urls = addresses.split_list(settings.url)
        self._link = AgentUplink(urls, settings.token_file, settings.connect_timeout_s, self._outbox)
        self._source = notices.source(settings.notice_source, settings.notice_url) if settings.notice_source else None
        home = AgentContext(
            url=self._link.url,
            token_file=os.path.abspath(settings.token_file),
            directory=settings.directory,
            slots=settings.slots,
            interface=settings.interface,
            environ={**environ, orphan_cleanup.MARK: str(settings.directory)},
            cache=_home(environ) / "cache" / "blobs",
            apart=settings.apart,
            grace_s=settings.grace_s,
        )
        self._members = MemberProcesses(home, settings.preload, self._outbox)
        self._examination: MachineCheck | None = None
        self._ending = asyncio.Event()
        self._end_now = asyncio.Event()
        self._grace_s = settings.grace_s
        self._why_ending = ""
        self._conversations = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._random = random.Random()

    async def live(self) -> int:
        """Until told to go, or the coordinator stays away for too long."""
        self._make_directory()
        # Held until this process is gone: whoever gets it then knows that nobody else ends what is left of us.
        if orphan_cleanup.hold(self._settings.directory) is not None:
            await orphan_cleanup.clean_up_after(self._settings.directory)
        self._machine = machine_info.machine(self._settings.name)
        self._members.open()
        self._listen_to_signals()
        link = asyncio.create_task(self._stay_linked())
        self._in_background(self._members.follow_logs())
        self._in_background(self._members.watch_memory())
        if self._source is not None:
            self._in_background(self._watch_for_notices(self._source))
        ending = asyncio.create_task(self._ending.wait())
        try:
            await asyncio.wait({link, ending}, return_when=asyncio.FIRST_COMPLETED)
            if link.done():
                link.result()
            await self._leave()
            await self._tell_the_rest()
        finally:
            await self._members.end_all(0.0, "the agent ends")
            await self._members.warm.close()
            if self._examination is not None:
                self._examination.close()
            for task in (link, ending, *self._tasks):
                task.cancel()
        return 0

    def _make_directory(self) -> None:
        try:
            (self._settings.directory / "logs").mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise HomeUnusable(
                "the agent cannot keep logs",
                where=str(self._settings.directory),
                why=str(error),
                do="give another --dir",
            ) from error

    # --- ways to be told to go

    def _listen_to_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number == signal.SIGTERM or signal.getsignal(number) != signal.SIG_IGN:
                loop.add_signal_handler(number, self._on_signal, number)
        if self._settings.lifeline is not None:
            os.set_inheritable(self._settings.lifeline, False)
            loop.add_reader(self._settings.lifeline, self._on_lifeline, self._settings.lifeline)

    def _on_signal(self, number: int) -> None:
        if self._ending.is_set():
            self._end_now.set()
            return
        name = signal.Signals(number).name
        self._outbox.put(MachineNoticeMsg(self._settings.grace_s, name, f"the agent received {name}"))
        self._members.notice_all()
        self._end(f"{name}", self._settings.grace_s)

    def _on_lifeline(self, descriptor: int) -> None:
        if os.read(descriptor, 4096):
            return
        asyncio.get_running_loop().remove_reader(descriptor)
        self._members.notice_all()
        self._end("the process that started this agent is gone", min(_ORPHAN_GRACE_S, self._settings.grace_s))

    def _end(self, why: str, grace_s: float) -> None:
        log.info("ending: %s", why)
        self._why_ending = why
        self._grace_s = grace_s
        self._ending.set()

    async def _leave(self) -> None:
        """Give the members their time to hand over, unless told a second time."""
        gone = asyncio.create_task(self._members.all_gone(self._grace_s))
        hurry = asyncio.create_task(self._end_now.wait())
        await asyncio.wait({gone, hurry}, return_when=asyncio.FIRST_COMPLETED)
        for task in (gone, hurry):
            task.cancel()
        await self._members.end_all(0.0, f"the agent ends: {self._why_ending}")

    async def _tell_the_rest(self) -> None:
        deadline = time.monotonic() + _LAST_WORDS_S
        while self._link.linked and len(self._outbox) and time.monotonic() < deadline:
            await asyncio.sleep(0.02)

    async def _watch_for_notices(self, source: notices.NoticeSource) -> None:
        async for notice in source.notices():
            log.warning("notice from %s: %s, within %.0f s", notice.source, notice.detail, notice.within_s)
            self._outbox.put(MachineNoticeMsg(notice.within_s, notice.source, notice.detail))
            if not self._link.linked:
                self._members.notice_all()

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a task of the agent failed", exc_info=error)

    # --- the coordinator

    async def _stay_linked(self) -> None:
        """Connect again and again, for as long as members live or the patience of an idle agent lasts."""
        away_since = time.time()
        pause_s = _RETRY_MIN_S
        say_at = 0.0
        while True:
            conversations = self._conversations
            why = await self._link_once()
            if self._ending.is_set():
                await asyncio.Event().wait()
            if self._conversations > conversations:
                away_since, pause_s, say_at = time.time(), _RETRY_MIN_S, 0.0
            # Who never found the coordinator most likely never will, and somebody may pay for the machine.
            patience_s = self._settings.idle_s if self._conversations else min(self._settings.idle_s, _FIRST_S)
            until = max(away_since, self._members.last_exit) + patience_s
            if not len(self._members) and time.time() > until:
                several = "," in self._settings.url
                where = "at any of its addresses" if several else f"at {self._settings.url}"
                raise (NoCoordinatorAddress if several else CoordinatorUnreachable)(
                    f"the coordinator did not answer {where} for {patience_s:.0f} s",
                    why=why,
                    do="start it again; or open its port for this machine, or set address to one that leads to it",
                )
            if (
                self._settings.orphan_timeout_s is not None
                and time.time() > away_since + self._settings.orphan_timeout_s
            ):
                self._members.notice_all()
                self._end(f"no coordinator answered for {self._settings.orphan_timeout_s:g} s", self._settings.grace_s)
                continue
            if time.time() >= say_at:
                self._say_waiting(away_since, until, why)
                say_at = time.time() + _SAY_EVERY_S
            await asyncio.sleep(pause_s * self._random.uniform(0.7, 1.3))
            pause_s = min(pause_s * 1.6, _RETRY_MAX_S)

    async def _link_once(self) -> str:
        """One conversation; says why it ended. Who is refused the first time need not try again."""
        try:
            await self._link.converse(self._hello(), self._welcomed, self._obey)
        except (OSError, TimeoutError, WebSocketException) as error:
            return connect_errors.in_words(error)
        except MembershipError as error:
            if not self._conversations and not len(self._members):
                raise
            return error.what
        return "it closed the connection"

    def _say_waiting(self, since: float, until: float, why: str) -> None:
        living = len(self._members)
        end = f"for as long as {living} members live" if living else f"until {_clock(until)}"
        log.warning("waiting for the coordinator at %s since %s, %s (%s)", self._settings.url, _clock(since), end, why)

    def _welcomed(self, welcome: AgentWelcomeMsg) -> None:
        log.info("linked to coordinator %s at %s", welcome.coordinator, self._link.url)
        self._members.reached(self._link.url)
        self._conversations += 1

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

    def _obey(self, message: ToAgent) -> None:
        match message:
            case StartMemberMsg():
                if not self._ending.is_set():
                    self._in_background(self._members.start(message))
            case StopMemberMsg():
                name = (message.run, message.member, message.incarnation)
                self._in_background(self._members.end(name, message.grace_s, message.reason))
            case ShutDownMsg():
                self._in_background(self._shut_down(message.reason))
            case RunCheckMsg():
                self._in_background(self._examine(message, time.time()))
            case AgentWelcomeMsg() | RejectedMsg():
                pass

    async def _examine(self, asked: RunCheckMsg, received: float) -> None:
        """Look, in a thread, and tell; what is examined goes on."""
        self._examination = self._examination or self._examiner()
        finding = await self._examination.answer(asked.question, received, self._link.round_trips)
        self._outbox.put(CheckResultMsg(asked.number, finding))

    def _examiner(self) -> MachineCheck:
        # Few agents are ever examined, and it needs what members need: NumPy is not to hold up the start of all.
        from shoal.agent.machine_check import MachineCheck

        return MachineCheck(
            credentials.read(self._settings.token_file).token,
            self._settings.name,
            self._settings.directory,
            lambda interface: machine_info.hosts_to_announce(self._link.url, interface or self._settings.interface),
        )

    async def _shut_down(self, reason: str) -> None:
        await self._members.end_all(self._settings.grace_s, reason)
        self._end(reason, 0.0)


def _home(environ: dict[str, str]) -> Path:
    return Path(environ.get("SHOAL_HOME") or Path.home() / ".shoal")


def _clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))


def run(settings: AgentSettings, environ: dict[str, str]) -> int:
    """Live until told to go; what ends the agent early is said on stderr, with the exit code of the error."""
    try:
        return asyncio.run(_live(settings, environ))
    except ShoalError as error:
        log.error("%s", error)
        return error.exit_code


async def _live(settings: AgentSettings, environ: dict[str, str]) -> int:
    return await Agent(settings, environ).live()
