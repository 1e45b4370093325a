"""Calls between members and servers on the wire: a prefix, a small header, then as many raw bytes as it announces."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Sequence
from typing import Annotated, Any, Union

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from shoal.core.parameter_server.ticket_ledger import Ticket, TicketGranted
from shoal.wire.limits import MAX_FILES, Bytes, Count, Integer, Seconds
from shoal.wire.malformed import MALFORMED

HEADER_LIMIT_BYTES = 64 << 20
_PREFIX = struct.Struct("!4sIQ")
_MAGIC = b"shfr"

Sizes = Annotated[tuple[Bytes, ...], Meta(max_length=MAX_FILES)]
Raw = Union[bytes, bytearray, memoryview, NDArray[np.uint8]]


class ServerCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Base of all calls; `generation` is that of the state which the caller means."""

    generation: Count


class TicketRequest(ServerCall, frozen=True):
    """Reports a finished ticket, if any, and asks for the next one, if `wants`.

    `number` is that of the newest placement which the trainer knows.
    """

    number: Count
    done: Ticket | None
    seconds: Seconds
    wants: bool


class PushGradients(ServerCall, frozen=True):
    """Gradient of a ticket for one part; `layout` is the framework's description of the bytes that follow."""

    part: Count
    ticket: Ticket
    clock: Count
    low: Count
    settled: Count
    layout: bytes


class PullParameters(ServerCall, frozen=True):
    """Asks for the parameters of a part, unless their version is still `version`."""

    part: Count
    version: Integer


class FetchPart(ServerCall, frozen=True):
    """Asks for a copy of a part, for a checkpoint."""

    part: Count


class InstallReplica(ServerCall, frozen=True):
    """Copy of a part from its primary; updates follow."""

    part: Count
    number: Count
    version: Count
    meta: bytes
    sizes: Sizes


class ReplicateUpdate(ServerCall, frozen=True):
    """Update of a part that its primary makes; `update` is the argument of `ReplicatedPart.apply`."""

    part: Count
    number: Count
    version: Count
    update: bytes


class Disconnect(ServerCall, frozen=True):
    """A trainer leaves, and holds no ticket."""


class ServerReply(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Reply of a server.

    | kind    | meaning                                                                       |
    | ------- | ----------------------------------------------------------------------------- |
    | done    | the call took effect, or had done so before                                   |
    | granted | `granted` is the next ticket                                                  |
    | wait    | no ticket now; ask again (`reason`, `whom`: the trainers that are waited for) |
    | over    | every ticket is finished                                                      |
    | same    | the parameters still have the version that the trainer has                    |
    | moved   | another server is the primary; ask that one                                   |
    | void    | the generation is over; drop the ticket                                       |
    | stale   | the gradient is too old; drop the ticket                                      |
    | refused | the call makes no sense here                                                  |
    """

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
_replies = msgspec.msgpack.Decoder(ServerReply)


class MalformedFrame(OSError):  # noqa: N818 - the peer's fault, not ours
    """The peer sent bytes that are not a frame; the connection cannot be used any further."""


def send(sock: socket.socket, header: msgspec.Struct, buffers: Sequence[Raw] = ()) -> None:
    """Send one frame; the buffers follow the header without gaps."""
    packed = _encoder.encode(header)
    views = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]  # type: ignore[arg-type]
    total_bytes = sum(len(view) for view in views)
    sock.sendall(_PREFIX.pack(_MAGIC, len(packed), total_bytes) + packed, socket.MSG_MORE if views else 0)
    for view in views:
        sock.sendall(view)


def receive_call(sock: socket.socket) -> tuple[AnyCall, memoryview]:
    """Block for the next call; return it with its bytes."""
    packed, body = _receive(sock)
    return _decode(_calls, packed), body


def receive_reply(sock: socket.socket) -> tuple[ServerReply, memoryview]:
    """Block for the reply to a call; return it with its bytes."""
    packed, body = _receive(sock)
    return _decode(_replies, packed), body


def split_body(body: memoryview, sizes: Sequence[int]) -> list[memoryview]:
    """Return the consecutive buffers of a body; raise MalformedFrame if their sizes do not add up to it."""
    if sum(sizes) != len(body):
        raise MalformedFrame(f"expected {sum(sizes)} bytes, got {len(body)}")
    buffers, start = [], 0
    for size in sizes:
        buffers.append(body[start : start + size])
        start += size
    return buffers


def _receive(sock: socket.socket) -> tuple[memoryview, memoryview]:
    magic, header_bytes, body_bytes = _PREFIX.unpack(_receive_exactly(sock, _PREFIX.size))
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if magic != _MAGIC or header_bytes > HEADER_LIMIT_BYTES or body_bytes > memory_bytes:
        raise MalformedFrame("invalid frame prefix")
    return _receive_exactly(sock, header_bytes), _receive_exactly(sock, body_bytes)


def _receive_exactly(sock: socket.socket, count: int) -> memoryview:
    data = memoryview(bytearray(count))
    filled = 0
    while filled < count:
        received = sock.recv_into(data[filled:])
        if received == 0:
            raise ConnectionResetError("the peer closed the connection")
        filled += received
    return data


def _decode(decoder: Any, packed: memoryview) -> Any:
    try:
        return decoder.decode(packed)
    except MALFORMED as error:
        raise MalformedFrame(f"invalid frame header: {error}") from error
