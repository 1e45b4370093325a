"""A coordinator of the simplest kind, and a real agent that talks to it, for the tests here."""

from __future__ import annotations

import contextlib
import ssl
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from websockets.exceptions import ConnectionClosed
from websockets.sync.server import ServerConnection, serve

from shoal.wire import agent_messages, codec

WAIT_S = 30.0
TOKEN = "a-token-for-tests"


def until(true: Callable[[], Any], what: str = "", within_s: float = WAIT_S) -> Any:
    """Wait until something holds, and return it."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if found := true():
            return found
        time.sleep(0.02)
    raise AssertionError(f"not within {within_s} s: {what or true}")


class Coordinator:
    """Welcomes agents and remembers what they say."""

    def __init__(self) -> None:
        self.heard: list[agent_messages.FromAgent] = []
        self.hellos: list[agent_messages.AgentHelloMsg] = []
        self._links: list[ServerConnection] = []
        self._server: Any = None
        self.port = 0

    def open(self, tls: ssl.SSLContext | None = None) -> None:
        self._server = serve(self._handle, "127.0.0.1", self.port, process_request=self._check, ssl=tls)
        self.port = self._server.socket.getsockname()[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        for link in self._links:
            with contextlib.suppress(OSError):
                link.socket.shutdown(2)
        self._links.clear()

    def _check(self, link: ServerConnection, request: Any) -> Any:
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return link.respond(401, "no\n")
        return None

    def _handle(self, link: ServerConnection) -> None:
        hello = codec.from_agent.decode(link.recv(timeout=WAIT_S))
        assert isinstance(hello, agent_messages.AgentHelloMsg)
        link.send(codec.to_agent.encode(agent_messages.AgentWelcomeMsg(0.2, "test")))
        self._links.append(link)
        self.hellos.append(hello)
        with contextlib.suppress(ConnectionClosed):
            for data in link:
                self.heard.append(codec.from_agent.decode(data))

    def tell(self, message: agent_messages.ToAgent) -> None:
        until(lambda: self._links, "an agent is linked")
        self._links[-1].send(codec.to_agent.encode(message))

    def start(
        self, script: Path, *arguments: str, member: str = "lab/0", incarnation: str = "one", **more: Any
    ) -> None:
        env = {"SHOAL_SETTINGS": "{}", **more.pop("env", {})}
        argv = (str(script), *arguments)
        self.tell(agent_messages.StartMemberMsg("run", member, incarnation, argv, str(script.parent), env, **more))

    def end(self, grace_s: float, member: str = "lab/0", incarnation: str = "one") -> None:
        self.tell(agent_messages.StopMemberMsg("run", member, incarnation, grace_s, "a test wants it"))

    def exits(self) -> list[agent_messages.MemberExitedMsg]:
        return [message for message in self.heard if isinstance(message, agent_messages.MemberExitedMsg)]

    def exit_of(self, member: str = "lab/0", incarnation: str = "one") -> agent_messages.MemberExitedMsg:
        def find() -> agent_messages.MemberExitedMsg | None:
            return next((e for e in self.exits() if (e.member, e.incarnation) == (member, incarnation)), None)

        return until(find, f"{member} {incarnation} exited")

    def pid_of(self, member: str = "lab/0", incarnation: str = "one") -> int:
        def find() -> int | None:
            started = [message for message in self.heard if isinstance(message, agent_messages.MemberStartedMsg)]
            return next((s.pid for s in started if (s.member, s.incarnation) == (member, incarnation)), None)

        return until(find, f"{member} {incarnation} started")

    def lines(self, member: str = "lab/0") -> list[str]:
        told = [message for message in self.heard if isinstance(message, agent_messages.LogLinesMsg)]
        return [line for message in told if message.member == member for line in message.lines]

    def line(self, start: str, member: str = "lab/0") -> str:
        return until(lambda: next((x for x in self.lines(member) if x.startswith(start)), None), f"a line {start!r}")


class RunningAgent:
    """`python -m shoal.agent` and all that it ever started."""

    def __init__(self, process: subprocess.Popen[bytes], directory: Path, log: Path) -> None:
        self.process = process
        self.directory = directory
        self.log = log
        self._seen: set[psutil.Process] = set()

    def zygote(self) -> psutil.Process:
        return until(lambda: next(iter(psutil.Process(self.process.pid).children()), None), "a warm process")

    def remember(self) -> set[psutil.Process]:
        """All that is below the agent now."""
        self._seen |= set(psutil.Process(self.process.pid).children(recursive=True))
        return self._seen

    def all_gone(self) -> bool:
        return not [process for process in self._seen if _alive(process)]

    def stop(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            self.remember()
        self.process.kill()
        self.process.wait()
        for process in self._seen:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
