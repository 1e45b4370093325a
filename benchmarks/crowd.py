"""Many agents and members in one process, each with a connection of its own, that speak the real protocol.

python -m benchmarks.crowd URL TOKEN_FILE       reads commands and writes replies, one line of JSON each; see `Crowd`

Agents use the real `AgentUplink`. A member sends and answers the messages of a real one at the same intervals, but does
not train and has no threads: two thousand real members do not fit on the machine that is measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import socket
import ssl
import struct
import sys
import time
from base64 import b64encode
from collections import Counter, deque
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from websockets.exceptions import WebSocketException

import shoal
from shoal.agent import machine_info
from shoal.agent.outbox import Outbox
from shoal.agent.uplink import AgentUplink
from shoal.core.world import Address, World
from shoal.wire import agent_messages, codec, credentials
from shoal.wire import member_messages as ms
from shoal.wire.protocol import PROTOCOL, Message
from shoal.worker.session.uplink import OPEN_TIMEOUT_S, PINGS_PER_SILENCE, RETRY_S

CONNECTING_AT_ONCE = 16
AGENT_CONNECT_S = 5.0
STEP_S = 0.5
BACK_AFTER_S = 3.0
LOOK_S = 0.01


class Socket(asyncio.Protocol):
    """A minimal WebSocket client: it receives unfragmented frames and sends frames with an empty mask."""

    def __init__(self, request: bytes, member: Member) -> None:
        self._request, self._member = request, member
        self._open = False
        self._read = b""
        self.open: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._socket = transport.get_extra_info("socket")
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._read += data
        if not self._open:
            head, found, rest = self._read.partition(b"\r\n\r\n")
            if not found:
                return
            if b" 101 " not in head.partition(b"\r\n")[0]:
                raise RuntimeError(head.decode())
            self._open, self._read = True, rest
            if self.open.cancelled():
                self.transport.abort()
                return
            self.open.set_result(None)
            self._member.opened(self)
        while (frame := self._next()) is not None:
            self._member.got(*frame)

    def _next(self) -> tuple[int, bytes] | None:
        """Return the opcode and payload of the next complete frame, or None."""
        read = self._read
        if len(read) < 2:
            return None
        size, begins = read[1], 2
        if size == 126 and len(read) >= 4:
            size, begins = int.from_bytes(read[2:4], "big"), 4
        elif size == 127 and len(read) >= 10:
            size, begins = int.from_bytes(read[2:10], "big"), 10
        elif size >= 126:
            return None
        if len(read) < begins + size:
            return None
        self._read = read[begins + size :]
        return read[0] & 15, read[begins : begins + size]

    def send(self, *frames: tuple[int, bytes]) -> None:
        """Send frames, each an opcode and a payload, in one packet, as `worker.session.uplink` does."""
        if len(frames) > 1:
            self._cork(1)
        for opcode, data in frames:
            self.transport.write(_framed(opcode, data))
        if len(frames) > 1:
            self._cork(0)

    def _cork(self, on: int) -> None:
        with contextlib.suppress(OSError):
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, on)

    def connection_lost(self, _exc: Exception | None) -> None:
        if self.open.done() and not self.open.cancelled():
            self._member.hung_up()
        elif not self.open.done():
            self.open.set_exception(ConnectionResetError())


def _framed(opcode: int, data: bytes) -> bytes:
    size = bytes((128 | len(data),)) if len(data) < 126 else b"\xfe" + struct.pack("!H", len(data))
    return bytes((128 | opcode,)) + size + b"\0\0\0\0" + data


class Member:
    """A member's messages: hello, ready, heartbeats with pings, and an answer to every change of the world."""

    def __init__(self, crowd: Crowd, order: agent_messages.StartMemberMsg) -> None:
        self.crowd, self.order = crowd, order
        self.world: World | None = None
        self.ended = False
        self.socket: Socket | None = None
        self._sends_heartbeats = False
        self._answered_at = 0.0
        number = len(crowd.members)
        self._address = Address(f"10.{number >> 8 & 255}.{number & 255}.7", random.randrange(32_768, 61_000))
        self._settings = json.loads(order.env["SHOAL_SETTINGS"])
        self.heartbeat_s = float(self._settings["heartbeat_s"])

    async def connect(self) -> None:
        """Connect to the coordinator; retry with growing pauses, as `worker.session.uplink` does."""
        loop, (host, port) = asyncio.get_running_loop(), self.crowd.place
        for attempt in itertools.count():
            try:
                async with asyncio.timeout(OPEN_TIMEOUT_S):
                    _, protocol = await loop.create_connection(
                        lambda: Socket(self.crowd.request, self), host, port, ssl=self.crowd.tls
                    )
                    await protocol.open
                return
            except (OSError, TimeoutError):
                await asyncio.sleep(RETRY_S[min(attempt, len(RETRY_S) - 1)])

    def opened(self, socket: Socket) -> None:
        self.socket = socket
        order, world = self.order, self.world
        address = (order.run, order.member, order.incarnation, self._address, os.getpid())
        where = (world.number, self.crowd.step) if world is not None else (None, None)
        self.send(ms.MemberHelloMsg(PROTOCOL, shoal.__version__, *address, *where))
        if world is None:
            self.send(
                ms.ReadyMsg("layers=12;width=768;optimizer=adamw;data=0f3a9c", None, speed=random.uniform(3e4, 5e4))
            )
        if self._sends_heartbeats:
            return
        self._sends_heartbeats = True
        # Spread the heartbeats, as those of processes that start independently are.
        asyncio.get_running_loop().call_later(self.heartbeat_s * (hash(order.member) % 997) / 997, self._send_heartbeat)

    def _send_heartbeat(self) -> None:
        if self.ended:
            return
        asyncio.get_running_loop().call_later(self.heartbeat_s, self._send_heartbeat)
        world, step = self.world, self.crowd.step
        if self.socket is None:
            return
        heartbeat = ms.HeartbeatMsg(
            *(world.number if world else None, step if world else None, "compute", 0.1, STEP_S),
            total_steps=100_000,
            share=8,
            loss=2.5,
            samples_per_s=16_000.0,
            metrics={"accuracy": 0.5},
            spent=ms.StepTimes(0.01, 0.4, 0.05, 0.04),
            batch=8192,
        )
        pings = time.monotonic() - self._answered_at > float(self._settings["lease_s"]) / PINGS_PER_SILENCE
        ping_frames = [(9, step.to_bytes(4, "big"))] if pings else []
        self.socket.send((2, codec.from_member.encode(heartbeat)), *ping_frames)
        self.crowd.counts["HeartbeatMsg"] += 1
        self.crowd.counts["pings"] += pings

    def send(self, message: Message) -> None:
        self.crowd.counts[type(message).__name__] += 1
        if self.socket is not None:
            self.socket.send((2, codec.from_member.encode(message)))

    def got(self, opcode: int, data: bytes) -> None:
        if opcode == 10:
            self.crowd.counts["pongs"] += 1
            self._answered_at = time.monotonic()
        elif opcode == 9 and self.socket is not None:
            self.socket.send((10, data))
        elif opcode == 2:
            message = self.crowd.decoded(data)
            self.crowd.received(message, len(data))
            self._answer(message)

    def _answer(self, message: Any) -> None:
        me = self.order.member
        if isinstance(message, ms.WelcomeMsg):
            self.heartbeat_s = message.heartbeat_s
        elif isinstance(message, ms.EnterWorldMsg):
            self.world = message.world
        elif isinstance(message, ms.PrepareWorldMsg) and message.world.rank_of(me) is not None:
            if self.world is None or self.world.number < message.world.number:
                self.world = message.world
                self.send(ms.WorldEnteredMsg(message.world.number, self.crowd.step))
        elif isinstance(message, ms.DissolveWorldMsg) and self.world is not None:
            self.send(ms.WorldBrokenMsg(self.world.number, self.crowd.step))
            self.world = None

    def hung_up(self) -> None:
        self.socket = None
        if not self.ended:
            self.crowd.counts["hung up"] += 1
            self.crowd.in_background(self.connect())

    def crash(self) -> None:
        self.ended = True
        if self.socket is not None:
            self.socket.transport.abort()


class Crowd:
    """All agents and members of this process."""

    def __init__(self, url: str, token_file: str) -> None:
        self._url, self._token_file = url, token_file
        access = credentials.read(token_file)
        parts = urlsplit(url)
        self.place = (parts.hostname or "", parts.port or 0)
        self.tls: ssl.SSLContext | None = credentials.ssl_context(access) if parts.scheme == "https" else None
        key = b64encode(os.urandom(16)).decode()
        lines = [f"GET /v1/member HTTP/1.1\r\nHost: {parts.netloc}", "Upgrade: websocket", "Connection: Upgrade"]
        lines += [f"Sec-WebSocket-Key: {key}", "Sec-WebSocket-Version: 13"]
        lines += [f"{name}: {value}" for name, value in access.headers.items()]
        self.request = ("\r\n".join(lines) + "\r\n\r\n").encode()
        self.members: dict[str, Member] = {}
        self.counts: Counter[str] = Counter()
        self.sizes: Counter[str] = Counter()
        self._outboxes: dict[str, Outbox] = {}
        self._linked = 0
        self._held: deque[agent_messages.StartMemberMsg] = deque()
        self._hold = 0
        self._connecting = asyncio.Semaphore(CONNECTING_AT_ONCE)
        self._tasks: set[asyncio.Task[None]] = set()
        self._began = time.monotonic()
        self._last: tuple[bytes, Any] = (b"", None)

    @property
    def step(self) -> int:
        return int((time.monotonic() - self._began) / STEP_S)

    # --- agents

    async def _agent(self, name: str) -> None:
        outbox = self._outboxes[name] = Outbox()
        link = AgentUplink([self._url], self._token_file, AGENT_CONNECT_S, outbox)
        machine = replace(self._machine, name=name)
        pause_s = 0.0
        while True:
            hello = agent_messages.AgentHelloMsg(
                PROTOCOL, shoal.__version__, name, machine, os.getpid(), 1, self._under(name)
            )
            with contextlib.suppress(OSError, TimeoutError, WebSocketException):
                await link.serve(hello, self._welcomed, lambda order: self._obey(name, order))
            pause_s = min(1.6 * pause_s, 2.0) if pause_s else 0.1
            await asyncio.sleep(pause_s * random.uniform(0.7, 1.3))

    def _under(self, agent: str) -> tuple[tuple[str, str, str], ...]:
        member = self.members.get(f"{agent}/0")
        living = member is not None and not member.ended
        return ((member.order.run, member.order.member, member.order.incarnation),) if member and living else ()

    def _welcomed(self, _welcome: agent_messages.AgentWelcomeMsg) -> None:
        self._linked += 1

    def _obey(self, agent: str, order: agent_messages.ToAgent) -> None:
        self.received(order, 0)
        if not isinstance(order, agent_messages.StartMemberMsg):
            return
        restarted = order.member in self.members
        self._outboxes[agent].put(
            agent_messages.MemberStartedMsg(order.run, order.member, order.incarnation, os.getpid(), warm=True)
        )
        if restarted:
            asyncio.get_running_loop().call_later(BACK_AFTER_S, self._start, order)
        elif self._hold:
            self._hold -= 1
            self._held.append(order)
        else:
            self._start(order)

    def _start(self, order: agent_messages.StartMemberMsg) -> None:
        member = self.members[order.member] = Member(self, order)
        self.in_background(self._connect(member))

    async def _connect(self, member: Member) -> None:
        async with self._connecting:
            await member.connect()

    async def _start_agents(self, names: list[str]) -> None:
        """Start agents, a few at a time, as machines start."""
        for name in names:
            async with self._connecting:
                self.in_background(self._agent(name))
                await asyncio.sleep(0)
            while self._linked < len(self._outboxes) - CONNECTING_AT_ONCE:
                await asyncio.sleep(LOOK_S)

    def in_background(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.counts["failed"] += 1
            sys.stderr.write(f"{error!r}\n")

    # --- messages to members

    def decoded(self, data: bytes) -> Any:
        """Return the decoded message; a broadcast is decoded only once, because real members have a machine each."""
        if data != self._last[0]:
            self._last = (data, codec.to_member.decode(data))
        return self._last[1]

    def received(self, message: object, size_bytes: int) -> None:
        kind = type(message).__name__
        self.counts[kind] += 1
        self.sizes[kind] += size_bytes

    # --- commands

    async def execute(self, command: dict[str, Any]) -> object:
        """Execute one command and return the counters afterwards."""
        match command:
            case {"do": "agents", "names": names, "hold": hold}:
                self._machine = machine_info.machine("")
                self._hold = hold
                before = self._linked
                await self._start_agents(names)
                await self._until(lambda: self._linked >= before + len(names))
            case {"do": "release"}:
                self._start(self._held.popleft())
            case {"do": "crash", "member": name}:
                order = self.members[name].order
                self.members[name].crash()
                exited = (order.run, order.member, order.incarnation, None, 9, "infrastructure", "killed by SIGKILL")
                self._outboxes[name.partition("/")[0]].put(agent_messages.MemberExitedMsg(*exited))
            case {"do": "hello", "count": count, "agents": agents}:
                await self._until(lambda: self.counts["WelcomeMsg"] >= count and self._linked >= agents)
            case {"do": "told", "kind": kind, "count": count}:
                await self._until(lambda: self.counts[kind] >= count)
            case {"do": "world", "size": size}:
                await self._until(lambda: all(m.world and m.world.size == size for m in self.members.values()))
            case {"do": "end"}:
                for task in self._tasks:
                    task.cancel()
        return {"counts": self.counts, "sizes": self.sizes, "members": len(self.members), "agents": self._linked}

    async def _until(self, condition: Any) -> None:
        while not condition():
            if self.counts["failed"]:
                raise RuntimeError("a connection failed")
            await asyncio.sleep(LOOK_S)


async def main(url: str, token_file: str) -> None:
    """Execute commands from standard input, one per line, until it ends."""
    crowd, loop = Crowd(url, token_file), asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        print(json.dumps(await crowd.execute(json.loads(line))), flush=True)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main(*sys.argv[1:]))
