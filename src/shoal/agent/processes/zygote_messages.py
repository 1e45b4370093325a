"""What an agent and its warm process tell each other over their socket pair."""

from __future__ import annotations

import os
import socket
import struct
from typing import Union

import msgspec

MAX_ORDER_BYTES = 4 << 20
_LENGTH = struct.Struct("!I")


class ZygoteMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Base of all of them; the tag is the class name."""


class ForkRequest(ZygoteMessage, frozen=True):
    """Fork a member; `cold` executes a new interpreter in the fork.

    `variables` are its whole environment, as bytes, because the user's may be in any encoding.
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
    """The imports are done. `failed` maps a module that could not be imported to why."""

    seconds: float
    tasks: int
    failed: dict[str, str] = {}


class ForkStarted(ZygoteMessage, frozen=True):
    key: str
    pid: int


class ForkFailed(ZygoteMessage, frozen=True):
    key: str
    why: str


class ChildExited(ZygoteMessage, frozen=True):
    """A member is gone; `status` is what waitpid gave."""

    key: str
    pid: int
    status: int


FromZygote = Union[ZygoteReady, ForkStarted, ForkFailed, ChildExited]

_to_zygote = msgspec.msgpack.Decoder(ForkRequest)
_from_zygote: msgspec.msgpack.Decoder[FromZygote] = msgspec.msgpack.Decoder(FromZygote)


def pack(order: ZygoteMessage) -> bytes:
    """An order as it travels; ValueError if it cannot."""
    body = msgspec.msgpack.encode(order)
    if len(body) > MAX_ORDER_BYTES:
        raise ValueError(f"an order of {len(body)} bytes; the environment is too large")
    return _LENGTH.pack(len(body)) + body


def length_of(header: bytes) -> int:
    """The length that a header announces; ValueError if nobody of ours would send that much."""
    (length,) = _LENGTH.unpack(header)
    if length > MAX_ORDER_BYTES:
        raise ValueError(f"an order of {length} bytes")
    return int(length)


def unpack_from_zygote(body: bytes) -> FromZygote:
    return _from_zygote.decode(body)


def receive_start(channel: socket.socket) -> ForkRequest | None:
    """The next order to the warm process; None when the agent is gone."""
    header = _exactly(channel, _LENGTH.size)
    body = _exactly(channel, length_of(header)) if header else None
    return _to_zygote.decode(body) if body else None


def _exactly(channel: socket.socket, count: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        try:
            piece = channel.recv(count - len(parts))
        except ConnectionError:
            return None
        if not piece:
            return None
        parts += piece
    return bytes(parts)
