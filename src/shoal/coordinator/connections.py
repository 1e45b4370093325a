"""Connections of members and agents: one open WebSocket each, with the state that goes with it.

A message that cannot be sent at once is queued by the socket. A peer that falls too far behind is disconnected, so that
a slow one holds up no other; it reconnects and reports where it stands.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import shoal
from shoal.errors import BadMessage, EventUnstorable, VersionMismatch
from shoal.wire.codec import MessageCodec
from shoal.wire.protocol import PROTOCOL, Message, RejectedMsg


class SocketLike(Protocol):
    """The part of a WebSocket that a connection uses."""

    def listen(self, on_message: Callable[[bytes | str], None], on_close: Callable[[], None]) -> None: ...
    def send_message(self, data: bytes) -> bool: ...
    def close_after_sending(self) -> None: ...


@dataclass(slots=True, eq=False)
class Connection:
    """One WebSocket. `base_url` is the coordinator's address as the peer knows it."""

    codec: MessageCodec[object]
    peer: str
    base_url: str
    socket: SocketLike
    closed: bool = False
    heard_at: float = 0.0

    def send(self, message: Message) -> None:
        self.send_encoded(self.codec.encode(message))

    def send_encoded(self, data: bytes) -> None:
        """Send a message that was encoded before, for several peers at once."""
        if not self.closed and not self.socket.send_message(data):
            self.close()

    def reject(self, code: str, what: str, why: str = "", do: str = "") -> None:
        """Send an error and close the connection."""
        self.send(RejectedMsg(code, what, why, do))
        self.close()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.socket.close_after_sending()


@dataclass(slots=True, eq=False)
class MemberConnection(Connection):
    """A member's connection; once `evicted`, it accepts only another hello."""

    run: str = ""
    member: str = ""
    incarnation: str = ""
    pid: int = 0
    evicted: bool = False


@dataclass(slots=True, eq=False)
class AgentConnection(Connection):
    """An agent's connection, with the load of its machine."""

    agent: str = ""
    pid: int = 0
    load: float = 0.0
    memory_free_bytes: int = 0


def reject_unstorable(connection: Connection, action: Callable[[], object]) -> None:
    """Handle a message; reject the peer if it holds a value that the journal cannot hold."""
    try:
        action()
    except EventUnstorable as error:
        connection.reject(BadMessage.code, error.what, error.why)


def accept_version(connection: Connection, protocol: int, version: str) -> bool:
    """Return whether the peer runs the same version of Shoal; reject it otherwise."""
    if protocol == PROTOCOL and version == shoal.__version__:
        return True
    ours = f"{shoal.__version__} (protocol {PROTOCOL})"
    what = f"the coordinator runs Shoal {ours}, this process {version} (protocol {protocol})"
    connection.reject(VersionMismatch.code, what, do=f"install Shoal {shoal.__version__} on both machines")
    return False
