"""The open sockets of members and agents; what cannot be sent at once waits, so that a slow one holds up nobody."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import shoal
from shoal.errors import VersionMismatch
from shoal.wire.codec import MessageCodec
from shoal.wire.protocol import PROTOCOL, Message, RejectedMsg


class SocketLike(Protocol):
    """What a link needs of a connection."""

    def listen(self, hear: Callable[[bytes | str], None], gone: Callable[[], None]) -> None: ...
    def say(self, data: bytes) -> bool: ...
    def hang_up(self) -> None: ...


@dataclass(slots=True, eq=False)
class Connection:
    """One socket, as long as it is open."""

    codec: MessageCodec[object]
    peer: str
    base_url: str
    socket: SocketLike
    closed: bool = False
    heard_at: float = 0.0

    def send(self, message: Message) -> None:
        self.post(self.codec.encode(message))

    def post(self, data: bytes) -> None:
        """Send a message that is encoded already."""
        if not self.closed and not self.socket.say(data):
            self.close()

    def refuse(self, code: str, what: str, why: str = "", do: str = "") -> None:
        self.send(RejectedMsg(code, what, why, do))
        self.close()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.socket.hang_up()


@dataclass(slots=True, eq=False)
class MemberConnection(Connection):
    """A member's socket; `expelled` means that only a new hello is listened to."""

    run: str = ""
    member: str = ""
    incarnation: str = ""
    pid: int = 0
    expelled: bool = False


@dataclass(slots=True, eq=False)
class AgentConnection(Connection):
    agent: str = ""
    pid: int = 0
    load: float = 0.0
    memory_free_bytes: int = 0


def same_version(link: Connection, protocol: int, version: str) -> bool:
    if protocol == PROTOCOL and version == shoal.__version__:
        return True
    ours = f"{shoal.__version__} (protocol {PROTOCOL})"
    what = f"the coordinator runs Shoal {ours}, this process {version} (protocol {protocol})"
    link.refuse(VersionMismatch.code, what, do=f"install Shoal {shoal.__version__} on both machines")
    return False
