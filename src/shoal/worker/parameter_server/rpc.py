"""Calls between members and servers, as they travel: a small header, then as many raw bytes as it announces."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Sequence
from typing import Any, Union

import msgspec
import numpy as np
from numpy.typing import NDArray

from shoal.core.parameter_server.ticket_ledger import Ticket, TicketGranted

HEADER_LIMIT_BYTES = 64 << 20
_PREFIX = struct.Struct("!4sIQ")
_MAGIC = b"shfr"

Raw = Union[bytes, bytearray, memoryview, NDArray[np.uint8]]


class ServerCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Base of all calls. `life` is the life of the state that the caller means."""

    life: int


class TicketRequest(ServerCall, frozen=True):
    """A trainer has finished a ticket, or not, and wants another, or not. `number` is the placement that it knows."""

    number: int
    done: Ticket | None
    seconds: float
    wants: bool


class PushGradients(ServerCall, frozen=True):
    """The gradient of a ticket, for one part; `how` is the framework's own description of the bytes that follow."""

    part: int
    ticket: Ticket
    clock: int
    low: int
    settled: int
    how: bytes


class PullParameters(ServerCall, frozen=True):
    """Asks for the parameters of a part, unless they are still those of `version`."""

    part: int
    version: int


class FetchPart(ServerCall, frozen=True):
    """Asks for a copy of a part, for a checkpoint."""

    part: int


class InstallReplica(ServerCall, frozen=True):
    """A copy of a part from its primary; what follows is entries."""

    part: int
    number: int
    version: int
    meta: bytes
    sizes: tuple[int, ...]


class ReplicateUpdate(ServerCall, frozen=True):
    """One change of a part, which its primary has made or is about to make; `what` is what `Part.apply` takes."""

    part: int
    number: int
    version: int
    what: bytes


class Disconnect(ServerCall, frozen=True):
    """A trainer goes, and holds no ticket."""


class ServerReply(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a server answers. `kind` is done, granted, wait, over, same, moved, void, stale or refused."""

    kind: str
    reason: str = ""
    version: int = 0
    number: int = 0
    granted: TicketGranted | None = None
    clock: int = 0
    low: int = 0
    finished_samples: int = 0
    whom: tuple[str, ...] = ()
    meta: bytes = b""
    sizes: tuple[int, ...] = ()


AnyCall = Union[TicketRequest, PushGradients, PullParameters, FetchPart, InstallReplica, ReplicateUpdate, Disconnect]

_encoder = msgspec.msgpack.Encoder()
_calls = msgspec.msgpack.Decoder(AnyCall)
_answers = msgspec.msgpack.Decoder(ServerReply)


class MalformedFrame(OSError):  # noqa: N818 - the peer's fault, not ours
    """The peer sent something that is no frame; the connection is of no use any more."""


def send(sock: socket.socket, header: msgspec.Struct, parts: Sequence[Raw] = ()) -> None:
    """Send one frame; the parts follow each other without gaps."""
    packed = _encoder.encode(header)
    views = [memoryview(part).cast("B") for part in parts if len(part)]  # type: ignore[arg-type]
    total_bytes = sum(len(view) for view in views)
    sock.sendall(_PREFIX.pack(_MAGIC, len(packed), total_bytes) + packed, socket.MSG_MORE if views else 0)
    for view in views:
        sock.sendall(view)


def receive_call(sock: socket.socket) -> tuple[AnyCall, memoryview]:
    """The next call and its bytes."""
    packed, body = _receive(sock)
    return _decode(_calls, packed), body


def receive_answer(sock: socket.socket) -> tuple[ServerReply, memoryview]:
    """The answer to a call and its bytes."""
    packed, body = _receive(sock)
    return _decode(_answers, packed), body


def slices(body: memoryview, sizes: Sequence[int]) -> list[memoryview]:
    """The parts of a body."""
    if sum(sizes) != len(body):
        raise MalformedFrame(f"{len(body)} bytes where {sum(sizes)} were announced")
    found, start = [], 0
    for size in sizes:
        found.append(body[start : start + size])
        start += size
    return found


def _receive(sock: socket.socket) -> tuple[memoryview, memoryview]:
    magic, header_bytes, body_bytes = _PREFIX.unpack(_exactly(sock, _PREFIX.size))
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if magic != _MAGIC or header_bytes > HEADER_LIMIT_BYTES or body_bytes > memory_bytes:
        raise MalformedFrame("a frame that is none")
    return _exactly(sock, header_bytes), _exactly(sock, body_bytes)


def _exactly(sock: socket.socket, count: int) -> memoryview:
    data = memoryview(bytearray(count))
    got = 0
    while got < count:
        received = sock.recv_into(data[got:])
        if received == 0:
            raise ConnectionResetError("the peer closed the connection")
        got += received
    return data


def _decode(decoder: Any, packed: memoryview) -> Any:
    try:
        return decoder.decode(packed)
    except (msgspec.MsgspecError, ValueError) as error:
        raise MalformedFrame(f"a malformed frame: {error}") from error
