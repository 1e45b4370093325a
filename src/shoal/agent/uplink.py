"""Uplink: the agent's WebSocket connection to the coordinator.

The agent says hello, the coordinator welcomes or rejects it; then both send until the connection breaks. Reconnecting
is up to the agent. The coordinator may have several addresses, which are tried by `happy_eyeballs`.
"""

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
    """Connection to one coordinator; `connected` says whether it is up.

    Of several addresses, `url` is the one that was used last, or will be tried first.
    """

    def __init__(self, urls: Sequence[str], token_file: str, connect_timeout_s: float, outbox: Outbox) -> None:
        self._targets = {url: _websocket_url(url) for url in urls}
        if not self._targets:
            raise CoordinatorUnreachable("--url is empty", do="use --url http://host:port")
        self.url = next(iter(self._targets))
        self._token_file = token_file
        self._connect_s = connect_timeout_s
        self._outbox = outbox
        self._credentials = credentials.read(token_file, *self._targets)
        self._tls = credentials.ssl_context(self._credentials)
        self.connected = False
        self._connection: ClientConnection | None = None

    async def serve(
        self, hello: AgentHelloMsg, on_welcome: Callable[[AgentWelcomeMsg], None], on_message: Callable[[ToAgent], None]
    ) -> None:
        """Serve one connection until it breaks; then queue messages again that may not have arrived."""
        async with self._connected() as link:
            await link.send(codec.from_agent.encode(hello))
            welcome = codec.to_agent.decode(await asyncio.wait_for(link.recv(decode=False), self._connect_s))
            if isinstance(welcome, RejectedMsg):
                raise rejection_error(welcome)
            if not isinstance(welcome, AgentWelcomeMsg):
                raise MembershipError(f"the coordinator replied to the hello with {type(welcome).__name__}")
            self.connected, self._connection = True, link
            on_welcome(welcome)
            try:
                await _first_of(
                    self._send_heartbeats(welcome.heartbeat_s), self._send_all(link), _receive_all(link, on_message)
                )
            finally:
                self.connected, self._connection = False, None
                self._outbox.connection_lost(time.monotonic())

    async def round_trips(self, count: int) -> list[float]:
        """Return `count` round-trip times to the coordinator, in seconds; none while there is no connection."""
        link = self._connection
        return [await (await link.ping()) for _ in range(count)] if link is not None else []

    @contextlib.asynccontextmanager
    async def _connected(self) -> AsyncIterator[ClientConnection]:
        urls = sorted(self._targets, key=lambda url: url != self.url)
        try:
            self.url, link = await happy_eyeballs.first(urls, self._open, ClientConnection.close)
        except happy_eyeballs.NoUrlReachable as error:
            raise _unreachable_error(error) from error
        try:
            yield link
        finally:
            await link.close()

    async def _open(self, url: str, on_answer: Callable[[], None]) -> ClientConnection:
        """Connect to a URL; raise if the certificate is not the coordinator's, or our token is rejected."""
        target = self._targets[url]
        async with asyncio.timeout(self._connect_s):
            sock = await _connect(target)
        on_answer()
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
                "the coordinator rejected this token",
                where=url,
                do=f"use the coordinator's own token file with --token-file instead of {self._token_file}",
            ) from error

    async def _send_heartbeats(self, every_s: float) -> None:
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


async def _receive_all(link: ClientConnection, on_message: Callable[[ToAgent], None]) -> None:
    async for data in link:
        message = codec.to_agent.decode(data)
        if isinstance(message, RejectedMsg):
            raise rejection_error(message)
        on_message(message)


async def _first_of(*work: Coroutine[Any, Any, None]) -> None:
    """Run until the first of the coroutines ends, then cancel the others; raise its error."""
    tasks = [asyncio.create_task(coroutine) for coroutine in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _connect(url: str) -> socket.socket:
    """Return a socket that is connected to the first address of the URL's host that accepts."""
    parts, loop = urlsplit(url), asyncio.get_running_loop()
    port = parts.port or (443 if parts.scheme == "wss" else 80)
    failure: OSError | None = None
    for family, kind, protocol, _, address in await loop.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setblocking(False)
            await loop.sock_connect(sock, address)
        except OSError as error:
            sock.close()
            failure = error
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    raise failure or OSError(f"{parts.hostname} has no address")


def _unreachable_error(error: happy_eyeballs.NoUrlReachable) -> Exception:
    """Return one error for all addresses: a rejected token if any, since only the coordinator can reject it."""
    failures = error.failures
    rejected = next((failure for failure in failures.values() if isinstance(failure, WrongToken)), None)
    if rejected is not None or len(failures) == 1:
        return rejected or next(iter(failures.values()))
    return ConnectionError(connect_errors.describe_all(failures))


def rejection_error(message: RejectedMsg) -> MembershipError:
    """Return the error that the coordinator's rejection names."""
    kinds: dict[str, type[MembershipError]] = {kind.code: kind for kind in (WrongToken, VersionMismatch, NameTaken)}
    return kinds.get(message.code, MembershipError)(message.what, why=message.why, do=message.do)


def _websocket_url(url: str) -> str:
    """Return the WebSocket address of the coordinator at this URL; raise `CoordinatorUnreachable` if malformed."""
    try:
        parts = urlsplit(url)
        valid = bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    scheme = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}.get(parts.scheme, "") if valid else ""
    if not scheme:
        raise CoordinatorUnreachable(f"invalid URL of a coordinator: {url!r}", do="use http://host:port")
    return urlunsplit((scheme, parts.netloc, parts.path.rstrip("/") + "/v1/agent", "", ""))
