"""Minimal coordinator, and a real agent that talks to it."""

from __future__ import annotations

import contextlib
import ssl
import subprocess
import threading
from pathlib import Path
from typing import Any

import psutil
from websockets.exceptions import ConnectionClosed
from websockets.sync.server import ServerConnection, serve

from shoal.testing.wait import TIMEOUT_S, until
from shoal.wire import agent_messages, codec

TOKEN = "a-token-for-tests"


class Coordinator:
    """Coordinator that welcomes agents and records their messages."""

    def __init__(self) -> None:
        self.received: list[agent_messages.FromAgent] = []
        self.hellos: list[agent_messages.AgentHelloMsg] = []
        self._connections: list[ServerConnection] = []
        self._server: Any = None
        self.port = 0

    def open(self, tls: ssl.SSLContext | None = None) -> None:
        self._server = serve(self._handle, "127.0.0.1", self.port, process_request=self._check, ssl=tls)
        self.port = self._server.socket.getsockname()[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.socket.shutdown(2)
        self._connections.clear()

    def _check(self, connection: ServerConnection, request: Any) -> Any:
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return connection.respond(401, "no\n")
        return None

    def _handle(self, connection: ServerConnection) -> None:
        hello = codec.from_agent.decode(connection.recv(timeout=TIMEOUT_S))
        assert isinstance(hello, agent_messages.AgentHelloMsg)
        connection.send(codec.to_agent.encode(agent_messages.AgentWelcomeMsg(0.2, "test")))
        self._connections.append(connection)
        self.hellos.append(hello)
        with contextlib.suppress(ConnectionClosed):
            for data in connection:
                self.received.append(codec.from_agent.decode(data))

    def send(self, message: agent_messages.ToAgent) -> None:
        until(lambda: self._connections, "an agent is connected")
        self._connections[-1].send(codec.to_agent.encode(message))

    def start(
        self, script: Path, *arguments: str, member: str = "lab/0", incarnation: str = "first", **more: Any
    ) -> None:
        env = {"SHOAL_SETTINGS": "{}", **more.pop("env", {})}
        argv = (str(script), *arguments)
        self.send(agent_messages.StartMemberMsg("run", member, incarnation, argv, str(script.parent), env, **more))

    def stop(self, grace_s: float, member: str = "lab/0", incarnation: str = "first") -> None:
        self.send(agent_messages.StopMemberMsg("run", member, incarnation, grace_s, "stopped by the test"))

    def exits(self) -> list[agent_messages.MemberExitedMsg]:
        return [message for message in self.received if isinstance(message, agent_messages.MemberExitedMsg)]

    def exit_of(self, member: str = "lab/0", incarnation: str = "first") -> agent_messages.MemberExitedMsg:
        def find() -> agent_messages.MemberExitedMsg | None:
            return next((e for e in self.exits() if (e.member, e.incarnation) == (member, incarnation)), None)

        return until(find, f"{member} {incarnation} exited")

    def pid_of(self, member: str = "lab/0", incarnation: str = "first") -> int:
        def find() -> int | None:
            started = [message for message in self.received if isinstance(message, agent_messages.MemberStartedMsg)]
            return next((s.pid for s in started if (s.member, s.incarnation) == (member, incarnation)), None)

        return until(find, f"{member} {incarnation} started")

    def lines(self, member: str = "lab/0") -> list[str]:
        messages = [message for message in self.received if isinstance(message, agent_messages.LogLinesMsg)]
        return [line for message in messages if message.member == member for line in message.lines]

    def line(self, start: str, member: str = "lab/0") -> str:
        return until(lambda: next((x for x in self.lines(member) if x.startswith(start)), None), f"a line {start!r}")


class RunningAgent:
    """Process of an agent, and all processes that it ever started."""

    def __init__(self, process: subprocess.Popen[bytes], directory: Path, log: Path) -> None:
        self.process = process
        self.directory = directory
        self.log = log
        self._processes: set[psutil.Process] = set()

    def zygote(self) -> psutil.Process:
        return until(lambda: next(iter(psutil.Process(self.process.pid).children()), None), "a warm process")

    def remember(self) -> set[psutil.Process]:
        """Record and return all descendants of the agent so far."""
        self._processes |= set(psutil.Process(self.process.pid).children(recursive=True))
        return self._processes

    def all_ended(self) -> bool:
        return not [process for process in self._processes if _alive(process)]

    def stop(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            self.remember()
        self.process.kill()
        self.process.wait()
        for process in self._processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
