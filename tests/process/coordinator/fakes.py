"""A real coordinator process, and members and agents that speak its language but train nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, TypeVar

from websockets.sync.client import ClientConnection, connect

import shoal
from shoal.core.runs.spec import MachineInfo
from shoal.core.world import Address
from shoal.wire import agent_messages, codec, credentials
from shoal.wire import member_messages as ms
from shoal.wire.protocol import PROTOCOL, Message

M = TypeVar("M")
# Only against hangs: on a busy machine a coordinator takes long to start.
WAIT_S = 120.0


class Coordinator:
    """`python -m shoal.coordinator` on a directory; `prefix` is a command that runs it."""

    def __init__(self, directory: Path, *options: str, prefix: tuple[str, ...] = ()) -> None:
        self.directory = directory
        self.options, self.prefix = options, prefix
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        (self.directory / "pid").unlink(missing_ok=True)
        command = [*self.prefix, sys.executable, "-m", "shoal.coordinator", "--dir", str(self.directory), *self.options]
        process = subprocess.Popen(command, stderr=subprocess.PIPE)
        deadline = time.monotonic() + WAIT_S
        while True:
            pid = self.directory / "pid"
            if pid.exists() and pid.read_text().strip() == str(process.pid) and (self.directory / "url").exists():
                return process
            assert process.poll() is None, process.stderr.read().decode()
            assert time.monotonic() < deadline, "the coordinator did not start"
            time.sleep(0.02)

    @property
    def url(self) -> str:
        return (self.directory / "url").read_text().strip()

    @property
    def credentials(self) -> credentials.Credentials:
        return credentials.read(self.directory / "token")

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(WAIT_S)

    def restart(self) -> None:
        self.process = self._start()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(WAIT_S)
        self.process.stderr.close()

    def ask(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        data = json.dumps(body).encode() if body is not None else None
        given = self.credentials.headers if headers is None else headers
        request = urllib.request.Request(self.url + path, data=data, method=method, headers=given)
        try:
            with urllib.request.urlopen(
                request, timeout=WAIT_S, context=credentials.ssl_context(self.credentials)
            ) as r:
                return r.status, json.loads(r.read() or b"null")
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read() or b"null")

    def create(self, low: int = 1, high: int = 1, **fields: Any) -> str:
        spec = {"name": "train", "argv": ["train.py"], "cwd": "/tmp", "members": [low, high], **fields}
        status, view = self.ask("POST", "/v1/runs", spec)
        assert status == 200, view
        return str(view["run"])

    def view(self, run: str) -> dict[str, Any]:
        status, view = self.ask("GET", f"/v1/runs/{run}")
        assert status == 200, view
        return dict(view)

    def story(self, run: str) -> list[str]:
        status, lines = self.ask("GET", f"/v1/runs/{run}/story?limit=10000")
        assert status == 200, lines
        return [line["text"] for line in lines]

    def await_view(self, run: str, **wanted: Any) -> dict[str, Any]:
        deadline = time.monotonic() + WAIT_S
        while True:
            view = self.view(run)
            if all(view[key] == value for key, value in wanted.items()):
                return view
            assert time.monotonic() < deadline, (wanted, view)
            time.sleep(0.02)

    def open(self, path: str, headers: dict[str, str] | None = None) -> ClientConnection:
        given = self.credentials.headers if headers is None else headers
        url = self.url.replace("http", "ws", 1) + path
        context = credentials.ssl_context(self.credentials)
        return connect(url, additional_headers=given, ssl=context, open_timeout=WAIT_S, proxy=None).__enter__()


class Fake:
    """One socket to the coordinator."""

    codec: codec.MessageCodec[Any]

    def __init__(self, coordinator: Coordinator, path: str) -> None:
        self.coordinator = coordinator
        self.path = path
        self.socket = coordinator.open(path)

    def say(self, message: Message) -> None:
        self.socket.send(self.codec.encode(message))

    def hear(self, kind: type[M], within_s: float = WAIT_S) -> M:
        """The next message of this kind; others are passed over."""
        deadline = time.monotonic() + within_s
        while True:
            message = self.codec.decode(self.socket.recv(timeout=max(0.01, deadline - time.monotonic())))
            if isinstance(message, kind):
                return message

    def reconnect(self) -> None:
        self.socket.close()
        self.socket = self.coordinator.open(self.path)

    def close(self) -> None:
        self.socket.close()


class FakeMember(Fake):
    codec = codec.to_member

    def __init__(self, coordinator: Coordinator, run: str, name: str, incarnation: str = "1") -> None:
        super().__init__(coordinator, "/v1/member")
        self.run, self.name, self.incarnation = run, name, incarnation

    def hello(self, pid: int = 1, **fields: Any) -> FakeMember:
        given = {"protocol": PROTOCOL, "version": shoal.__version__, "run": self.run, **fields}
        address = Address("127.0.0.1", 1000)
        self.say(ms.MemberHelloMsg(member=self.name, incarnation=self.incarnation, address=address, pid=pid, **given))
        return self

    def ready(self, step: int | None = None, restored: bool = False) -> FakeMember:
        self.say(ms.ReadyMsg("model", step, restored))
        return self

    def heartbeat(self, world: int | None, step: int | None, **fields: Any) -> None:
        self.say(ms.HeartbeatMsg(world, step, "compute", 0.0, **fields))


class FakeAgent(Fake):
    codec = codec.to_agent

    def __init__(self, coordinator: Coordinator, name: str, slots: int | None = None) -> None:
        super().__init__(coordinator, "/v1/agent")
        self.name, self.slots = name, slots

    def hello(self, members: tuple[tuple[str, str, str], ...] = ()) -> FakeAgent:
        machine = MachineInfo(self.name, 2, 1 << 30)
        self.say(
            agent_messages.AgentHelloMsg(
                PROTOCOL, shoal.__version__, self.name, machine, os.getpid(), self.slots, members
            )
        )
        self.hear(agent_messages.AgentWelcomeMsg)
        return self

    def started(self, order: agent_messages.StartMemberMsg) -> None:
        self.say(agent_messages.MemberStartedMsg(order.run, order.member, order.incarnation, 4711, True))

    def exited(
        self, order: agent_messages.StartMemberMsg, cause: str, detail: str = "", exit_code: int | None = 0
    ) -> None:
        self.say(
            agent_messages.MemberExitedMsg(order.run, order.member, order.incarnation, exit_code, None, cause, detail)
        )
