"""The agent: joins members and coordinator together, and outlives losing either.

Members go on while the coordinator is away; what happens meanwhile is told when it is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus, WebSocketException

import shoal
from shoal.agent import notices, probe
from shoal.agent.members import Home, Members
from shoal.agent.outbox import Outbox
from shoal.errors import CoordinatorUnreachable, MembershipError, ShoalError, VersionMismatch, WrongToken
from shoal.wire import codec, credentials
from shoal.wire.messages import (
    PROTOCOL,
    AgentBeat,
    AgentHello,
    AgentWelcome,
    EndMember,
    MachineNotice,
    Refused,
    ShutDown,
    StartMember,
    ToAgent,
)

log = logging.getLogger("shoal.agent")

_RETRY_MIN_S = 0.1
_RETRY_MAX_S = 2.0
_SAY_EVERY_S = 30.0
_ORPHAN_GRACE_S = 2.0
_LAST_WORDS_S = 2.0


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """How to run an agent. `idle_s` is how long one without members looks for a lost coordinator."""

    url: str
    token_file: str
    name: str
    directory: Path
    slots: int | None = None
    interface: str = ""
    grace_s: float = 30.0
    idle_s: float = 600.0
    connect_s: float = 5.0
    lifeline: int | None = None
    notice_source: str = ""
    notice_url: str = ""
    preload: tuple[str, ...] = ()


class Agent:
    """One per machine; `live` returns the exit code of the process."""

    def __init__(self, settings: AgentSettings, environ: dict[str, str]) -> None:
        self._settings = settings
        self._credentials = credentials.read(settings.token_file)
        self._tls = credentials.ssl_context(self._credentials)
        self._outbox = Outbox()
        home = Home(
            url=settings.url,
            token_file=os.path.abspath(settings.token_file),
            directory=settings.directory,
            slots=settings.slots,
            interface=settings.interface,
            environ=environ,
        )
        self._members = Members(home, settings.preload, self._outbox)
        self._ending = asyncio.Event()
        self._end_now = asyncio.Event()
        self._grace_s = settings.grace_s
        self._why_ending = ""
        self._connected = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._random = random.Random()

    async def live(self) -> int:
        """Until told to go, or the coordinator stays away for too long."""
        self._settings.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._machine = probe.machine(self._settings.name)
        self._members.warm.open()
        self._listen_to_signals()
        link = asyncio.create_task(self._stay_linked())
        self._in_background(self._members.follow_logs())
        if self._settings.notice_source:
            source = notices.source(self._settings.notice_source, self._settings.notice_url)
            self._in_background(self._watch_for_notices(source))
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
            for task in (link, ending, *self._tasks):
                task.cancel()
        return 0

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
        self._outbox.put(MachineNotice(self._settings.grace_s, name, f"the agent received {name}"))
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
        while self._connected and len(self._outbox) and time.monotonic() < deadline:
            await asyncio.sleep(0.02)

    async def _watch_for_notices(self, source: notices.Source) -> None:
        async for notice in source.notices():
            log.warning("notice from %s: %s, within %.0f s", notice.source, notice.detail, notice.within_s)
            self._outbox.put(MachineNotice(notice.within_s, notice.source, notice.detail))
            if not self._connected:
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
        met = False
        pause_s = _RETRY_MIN_S
        say_at = 0.0
        while True:
            try:
                async with self._link() as link:
                    await self._converse(link)
                    why = "it closed the connection"
            except (OSError, TimeoutError, WebSocketException) as error:
                why = f"{type(error).__name__}: {error}"
            except MembershipError as error:
                if not (met or self._connected or len(self._members)):
                    raise
                why = error.what
            if self._connected:
                met, self._connected = True, False
                self._outbox.connection_lost(time.monotonic())
                away_since, pause_s, say_at = time.time(), _RETRY_MIN_S, 0.0
            if self._ending.is_set():
                await asyncio.Event().wait()
            until = away_since + self._settings.idle_s
            if not len(self._members) and time.time() > until:
                raise CoordinatorUnreachable(
                    f"the coordinator at {self._settings.url} did not answer for {self._settings.idle_s:.0f} s",
                    why=why,
                    do="start it again, or check its URL",
                )
            if time.time() >= say_at:
                self._say_waiting(away_since, until, why)
                say_at = time.time() + _SAY_EVERY_S
            await asyncio.sleep(pause_s * self._random.uniform(0.7, 1.3))
            pause_s = min(pause_s * 1.6, _RETRY_MAX_S)

    def _say_waiting(self, since: float, until: float, why: str) -> None:
        end = (
            f"until {_clock(until)}" if not len(self._members) else f"for as long as {len(self._members)} members live"
        )
        log.warning("waiting for the coordinator at %s since %s, %s (%s)", self._settings.url, _clock(since), end, why)

    @contextlib.asynccontextmanager
    async def _link(self) -> AsyncIterator[ClientConnection]:
        url = _websocket_url(self._settings.url)
        try:
            link = await connect(
                url,
                additional_headers=self._credentials.headers,
                ssl=self._tls if url.startswith("wss") else None,
                open_timeout=self._settings.connect_s,
                close_timeout=1.0,
                max_size=codec.MAX_MESSAGE_BYTES,
                ping_interval=5.0,
                ping_timeout=15.0,
                proxy=None,
            )
        except InvalidStatus as error:
            if error.response.status_code in (401, 403):
                raise WrongToken(
                    "the coordinator does not accept this token",
                    where=self._settings.url,
                    do=f"give the coordinator's own file with --token-file, not {self._settings.token_file}",
                ) from error
            raise
        try:
            yield link
        finally:
            await link.close()

    async def _converse(self, link: ClientConnection) -> None:
        await link.send(codec.from_agent.encode(self._hello()))
        welcome = codec.to_agent.decode(await asyncio.wait_for(link.recv(decode=False), self._settings.connect_s))
        if isinstance(welcome, Refused):
            raise _refusal(welcome)
        if not isinstance(welcome, AgentWelcome):
            raise MembershipError(f"the coordinator answered {type(welcome).__name__} to a hello")
        log.info("linked to coordinator %s at %s", welcome.coordinator, self._settings.url)
        self._connected = True
        work = (self._beat(welcome.beat_s), self._send_all(link), self._listen(link))
        jobs = [asyncio.create_task(part) for part in work]
        try:
            done, _ = await asyncio.wait(jobs, return_when=asyncio.FIRST_COMPLETED)
            for job in done:
                job.result()
        finally:
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)

    async def _listen(self, link: ClientConnection) -> None:
        async for data in link:
            self._obey(codec.to_agent.decode(data))

    def _hello(self) -> AgentHello:
        return AgentHello(
            protocol=PROTOCOL,
            version=shoal.__version__,
            agent=self._settings.name,
            machine=self._machine,
            pid=os.getpid(),
            slots=self._settings.slots,
            members=self._members.names,
        )

    async def _beat(self, every_s: float) -> None:
        while True:
            self._outbox.put(AgentBeat(os.getloadavg()[0], probe.memory_free_bytes()))
            await asyncio.sleep(every_s)

    async def _send_all(self, link: ClientConnection) -> None:
        while True:
            await self._outbox.wait()
            while (message := self._outbox.take()) is not None:
                try:
                    await link.send(codec.from_agent.encode(message))
                except BaseException:
                    self._outbox.put_back(message)
                    raise
                self._outbox.sent(message, time.monotonic())

    def _obey(self, message: ToAgent) -> None:
        match message:
            case StartMember():
                if not self._ending.is_set():
                    self._in_background(self._members.start(message))
            case EndMember():
                name = (message.run, message.member, message.incarnation)
                self._in_background(self._members.end(name, message.grace_s, message.reason))
            case ShutDown():
                self._in_background(self._shut_down(message.reason))
            case Refused():
                raise _refusal(message)
            case AgentWelcome():
                pass

    async def _shut_down(self, reason: str) -> None:
        await self._members.end_all(self._settings.grace_s, reason)
        self._end(reason, 0.0)


def _refusal(refused: Refused) -> MembershipError:
    kinds: dict[str, type[MembershipError]] = {kind.code: kind for kind in (WrongToken, VersionMismatch)}
    kind = kinds.get(refused.code, MembershipError)
    return kind(refused.what, why=refused.why, do=refused.do)


def _websocket_url(url: str) -> str:
    parts = urlsplit(url)
    scheme = {"http": "ws", "https": "wss"}.get(parts.scheme, parts.scheme)
    return urlunsplit((scheme, parts.netloc, parts.path.rstrip("/") + "/v1/agent", "", ""))


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
