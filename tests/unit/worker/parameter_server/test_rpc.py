"""Frames between members and servers, over a real socket."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import numpy as np
import pytest

from shoal.core.parameter_server.ticket_ledger import Ticket
from shoal.worker.parameter_server import rpc
from shoal.worker.parameter_server.rpc import MalformedFrame, PushGradients, ServerReply

PUSH = PushGradients(1, 2, Ticket(3, 4, 8), 5, 4, 3, b"layout")


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    theirs.settimeout(10.0)
    yield ours, theirs
    ours.close()
    theirs.close()


def test_call_and_reply_arrive_with_their_bytes(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    rpc.send(ours, PUSH, [b"abc", np.arange(4, dtype=np.uint8), b""])
    call, body = rpc.receive_call(theirs)
    assert call == PUSH
    assert bytes(body) == b"abc\x00\x01\x02\x03"
    rpc.send(ours, ServerReply("done", version=7))
    assert rpc.receive_reply(theirs)[0] == ServerReply("done", version=7)


@pytest.mark.parametrize(
    "frame",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        rpc._PREFIX.pack(rpc._MAGIC, rpc.HEADER_LIMIT_BYTES + 1, 0),
        rpc._PREFIX.pack(rpc._MAGIC, 1, 1 << 62),
        rpc._PREFIX.pack(rpc._MAGIC, 3, 0) + b"\xc1\xff\x00",
        rpc._PREFIX.pack(rpc._MAGIC, 5, 0) + b"\x81\xa4type"[:5],
        rpc._PREFIX.pack(rpc._MAGIC, 8, 0) + b"\x81\xa4type\xa1\xff",
    ],
    ids=["no frame", "long header", "long body", "no msgpack", "cut short", "no text"],
)
def test_bytes_that_are_no_frame_are_an_error_of_the_connection(
    pair: tuple[socket.socket, socket.socket], frame: bytes
) -> None:
    ours, theirs = pair
    ours.sendall(frame)
    with pytest.raises(MalformedFrame):
        rpc.receive_call(theirs)


def test_connection_that_ends_in_a_frame_is_an_error_of_the_connection(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    ours.sendall(rpc._PREFIX.pack(rpc._MAGIC, 100, 0) + b"half")
    ours.shutdown(socket.SHUT_WR)
    with pytest.raises(ConnectionResetError):
        rpc.receive_call(theirs)


def test_body_is_split_by_its_sizes_only() -> None:
    body = memoryview(b"abcdef")
    assert [bytes(part) for part in rpc.split_body(body, (2, 0, 4))] == [b"ab", b"", b"cdef"]
    with pytest.raises(MalformedFrame):
        rpc.split_body(body, (2, 3))
