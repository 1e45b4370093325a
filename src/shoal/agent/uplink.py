"""One conversation with the coordinator: connect, say hello, then send and listen until the link breaks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus

from shoal.agent import happy_eyeballs, machine_info
from shoal.agent.outbox import Outbox
from shoal.errors import CoordinatorUnreachable, MembershipError, NameTaken, VersionMismatch, WrongToken
from shoal.wire import codec, connect_errors, credentials
from shoal.wire.agent_messages import AgentHeartbeatMsg, AgentHelloMsg, AgentWelcomeMsg, ToAgent
from shoal.wire.protocol import RejectedMsg


class AgentUplink:
    """The way to one coordinator; `linked` says whether there is a conversation now.

    It may have several URLs; `url` is the one that was taken last, or would be tried first.
    """

    def __init__(self, urls: Sequence[str], token_file: str, connect_timeout_s: float, outbox: Outbox) -> None:
        self._ways = {url: _websocket_url(url) for url in urls}
        if not self._ways:
            raise CoordinatorUnreachable("no URL of a coordinator was given", do="give it with --url http://host:port")
        self.url = next(iter(self._ways))
        self._token_file = token_file
        self._connect_s = connect_timeout_s
        self._outbox = outbox
        self._credentials = credentials.read(token_file)
        self._tls = credentials.ssl_context(self._credentials)
        self.linked = False
        self._connection: ClientConnection | None = None

    async def converse(
        self, hello: AgentHelloMsg, welcomed: Callable[[AgentWelcomeMsg], None], obey: Callable[[ToAgent], None]
    ) -> None:
        """Until the link breaks; then what may not have arrived is due again."""
        async with self._connected() as link:
            await link.send(codec.from_agent.encode(hello))
            welcome = codec.to_agent.decode(await asyncio.wait_for(link.recv(decode=False), self._connect_s))
            if isinstance(welcome, RejectedMsg):
                raise refusal(welcome)
            if not isinstance(welcome, AgentWelcomeMsg):
                raise MembershipError(f"the coordinator answered {type(welcome).__name__} to a hello")
            self.linked, self._connection = True, link
            welcomed(welcome)
            try:
                await _any_of(self._beat(welcome.heartbeat_s), self._send_all(link), _listen(link, obey))
            finally:
                self.linked, self._connection = False, None
                self._outbox.connection_lost(time.monotonic())

    async def round_trips(self, count: int) -> list[float]:
        """How long the coordinator takes to answer, in seconds, so many times; none while there is no conversation."""
        link = self._connection
        return [await (await link.ping()) for _ in range(count)] if link is not None else []

    @contextlib.asynccontextmanager
    async def _connected(self) -> AsyncIterator[ClientConnection]:
        ways = sorted(self._ways, key=lambda url: url != self.url)
        try:
            self.url, link = await happy_eyeballs.first(ways, self._open, ClientConnection.close)
        except happy_eyeballs.NoUrlReachable as none:
            raise _unreached(none) from none
        try:
            yield link
        finally:
            await link.close()

    async def _open(self, url: str, answered: Callable[[], None]) -> ClientConnection:
        """A connection to whoever has the coordinator's certificate, and accepts our token."""
        target = self._ways[url]
        async with asyncio.timeout(self._connect_s):
            sock = await _connect(target)
        answered()
        try:
            return await connect(
                target,
                sock=sock,
                additional_headers=self._credentials.headers,
                ssl=self._tls if target.startswith("wss") else None,
                open_timeout=self._connect_s,
                close_timeout=1.0,
                max_size=codec.MAX_MESSAGE_BYTES,
                ping_interval=5.0,
                ping_timeout=15.0,
                proxy=None,
            )
        except InvalidStatus as error:
            if error.response.status_code not in (401, 403):
                raise
            raise WrongToken(
                "the coordinator does not accept this token",
                where=url,
                do=f"give the coordinator's own file with --token-file, not {self._token_file}",
            ) from error

    async def _beat(self, every_s: float) -> None:
        while True:
            self._outbox.put(AgentHeartbeatMsg(os.getloadavg()[0], machine_info.memory_free_bytes()))
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


async def _listen(link: ClientConnection, obey: Callable[[ToAgent], None]) -> None:
    async for data in link:
        message = codec.to_agent.decode(data)
        if isinstance(message, RejectedMsg):
            raise refusal(message)
        obey(message)


async def _any_of(*work: Coroutine[Any, Any, None]) -> None:
    """Until the first of these ends; its error is ours."""
    jobs = [asyncio.create_task(part) for part in work]
    try:
        done, _ = await asyncio.wait(jobs, return_when=asyncio.FIRST_COMPLETED)
        for job in done:
            job.result()
    finally:
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)


async def _connect(url: str) -> socket.socket:
    """A socket that is connected to where a URL leads: to the first of its addresses that takes it."""
    parts, loop = urlsplit(url), asyncio.get_running_loop()
    port = parts.port or (443 if parts.scheme == "wss" else 80)
    failure: OSError | None = None
    for family, kind, protocol, _, where in await loop.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setblocking(False)
            await loop.sock_connect(sock, where)
        except OSError as error:
            sock.close()
            failure = error
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    raise failure or OSError(f"{parts.hostname} has no address")


def _unreached(none: happy_eyeballs.NoUrlReachable) -> Exception:
    """One error for all ways that failed: whoever knows that the token is wrong is the coordinator."""
    failures = none.failures
    told = next((error for error in failures.values() if isinstance(error, WrongToken)), None)
    if told is not None or len(failures) == 1:
        return told or next(iter(failures.values()))
    return ConnectionError(connect_errors.listed(failures))


def refusal(refused: RejectedMsg) -> MembershipError:
    """What the coordinator refused, as the error that it named."""
    kinds: dict[str, type[MembershipError]] = {kind.code: kind for kind in (WrongToken, VersionMismatch, NameTaken)}
    return kinds.get(refused.code, MembershipError)(refused.what, why=refused.why, do=refused.do)


def _websocket_url(url: str) -> str:
    try:
        parts = urlsplit(url)
        known = bool(parts.hostname) and parts.port != 0
    except ValueError:
        known = False
    scheme = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}.get(parts.scheme, "") if known else ""
    if not scheme:
        raise CoordinatorUnreachable(f"{url!r} is not the URL of a coordinator", do="give it as http://host:port")
    return urlunsplit((scheme, parts.netloc, parts.path.rstrip("/") + "/v1/agent", "", ""))
