"""A service on a real journal, with connections that keep what they were sent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import shoal
from shoal.coordinator.connections import AgentConnection, MemberConnection
from shoal.coordinator.service import CoordinatorService
from shoal.core.runs.events import RunCreated
from shoal.core.runs.spec import MachineInfo, RunSpec
from shoal.core.world import Address
from shoal.store.journal import Journal
from shoal.store.sqlite_views import SqliteViews
from shoal.wire import agent_messages as am
from shoal.wire import codec
from shoal.wire import member_messages as ms
from shoal.wire.protocol import PROTOCOL


def open_service(path: Path) -> CoordinatorService:
    """Return the service of a new coordinator."""
    return CoordinatorService(path, Journal(path), SqliteViews(path), "c")


def create_run(service: CoordinatorService, run: str = "r-1", low: int = 1, high: int = 2) -> None:
    """Record a run without TensorBoard files."""
    service.handle(run, RunCreated(RunSpec("r", ("train.py",), "/", (low, high)), {"tensorboard": False}))


class FakeSocket:
    """Keeps every sent frame; with `room` 0 it takes no more, as for a peer that does not read."""

    def __init__(self, room: int = 1000) -> None:
        self.frames: list[bytes] = []
        self.room, self.closed = room, False

    def listen(self, on_message: Callable[[bytes | str], None], on_close: Callable[[], None]) -> None: ...

    def send_message(self, data: bytes) -> bool:
        self.frames.append(data)
        return len(self.frames) <= self.room

    def close_after_sending(self) -> None:
        self.closed = True


def member_connection(room: int = 1000) -> MemberConnection:
    """Return a member's connection that keeps what it was sent."""
    return MemberConnection(codec.to_member, "127.0.0.1", "http://127.0.0.1:1", FakeSocket(room))  # type: ignore[arg-type]


def agent_connection() -> AgentConnection:
    """Return an agent's connection that keeps what it was sent."""
    return AgentConnection(codec.to_agent, "127.0.0.1", "http://127.0.0.1:1", FakeSocket())  # type: ignore[arg-type]


def sent(connection: MemberConnection | AgentConnection) -> list[Any]:
    """Return the messages that a connection was sent, decoded."""
    socket: Any = connection.socket
    return [connection.codec.decode(frame) for frame in socket.frames]


def member_hello(member: str = "local/0", **fields: Any) -> ms.MemberHelloMsg:
    """Return the hello of a new member of run r-1."""
    given: dict[str, Any] = {"version": shoal.__version__, "run": "r-1", "incarnation": "1", **fields}
    return ms.MemberHelloMsg(protocol=PROTOCOL, member=member, address=Address("127.0.0.1", 1000), pid=7, **given)


def agent_hello(agent: str = "local", **fields: Any) -> am.AgentHelloMsg:
    """Return the hello of an agent on a small machine."""
    given: dict[str, Any] = {"pid": 7, "slots": 2, "machine": MachineInfo(agent, 2, 1 << 30), **fields}
    return am.AgentHelloMsg(PROTOCOL, shoal.__version__, agent, **given)
