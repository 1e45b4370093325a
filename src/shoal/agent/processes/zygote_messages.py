"""Messages between an agent and its zygote, over a socket pair: a length in four bytes, then MessagePack."""

from __future__ import annotations

import os
import socket
import struct
from typing import Union

import msgspec

MAX_MESSAGE_BYTES = 4 << 20
_LENGTH = struct.Struct("!I")


class ZygoteMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Base class; the tag of a message is the name of its class."""


class ForkRequest(ZygoteMessage, frozen=True):
    """Request to fork a member; `key` identifies it in all replies.

    With `cold`, the fork executes a new interpreter. `variables` is the whole environment, as bytes, because the user's
    may be in any encoding. `why_path` is where the member records its uncaught exception.
    """

    key: str
    argv: tuple[str, ...]
    module: bool
    cwd: str
    variables: dict[bytes, bytes]
    log_path: str
    why_path: str
    threads: int
    cold: bool = False

    @property
    def env(self) -> dict[str, str]:
        return {os.fsdecode(name): os.fsdecode(value) for name, value in self.variables.items()}


class ZygoteReady(ZygoteMessage, frozen=True):
    """The imports are done, in `seconds`. `tasks` is the number of threads; `failed` maps modules to their errors."""

    seconds: float
    tasks: int
    failed: dict[str, str] = {}


class ForkStarted(ZygoteMessage, frozen=True):
    """The member runs as process `pid`."""

    key: str
    pid: int


class ForkFailed(ZygoteMessage, frozen=True):
    """The fork failed; there is no member."""

    key: str
    why: str


class ChildExited(ZygoteMessage, frozen=True):
    """The member has ended; `status` is as waitpid returns it."""

    key: str
    pid: int
    status: int


FromZygote = Union[ZygoteReady, ForkStarted, ForkFailed, ChildExited]

_to_zygote = msgspec.msgpack.Decoder(ForkRequest)
_from_zygote: msgspec.msgpack.Decoder[FromZygote] = msgspec.msgpack.Decoder(FromZygote)


def pack(message: ZygoteMessage) -> bytes:
    """Return a message with its length in front; raise ValueError if it is too large."""
    body = msgspec.msgpack.encode(message)
    if len(body) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a request of {len(body)} bytes; the environment is too large")
    return _LENGTH.pack(len(body)) + body


def length_of(header: bytes) -> int:
    """Return the length that a header announces; raise ValueError above `MAX_MESSAGE_BYTES`."""
    (length,) = _LENGTH.unpack(header)
    if length > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {length} bytes")
    return int(length)


def unpack_from_zygote(body: bytes) -> FromZygote:
    return _from_zygote.decode(body)


def receive_request(channel: socket.socket) -> ForkRequest | None:
    """Return the next request to the zygote; None when the agent is gone."""
    header = _exactly(channel, _LENGTH.size)
    body = _exactly(channel, length_of(header)) if header else None
    return _to_zygote.decode(body) if body else None


def _exactly(channel: socket.socket, count: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        try:
            data = channel.recv(count - len(parts))
        except ConnectionError:
            return None
        if not data:
            return None
        parts += data
    return bytes(parts)
