"""WebSockets: messages arrive whole and in order, and queued ones are sent before the close."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from uvicorn import Config
from uvicorn.server import ServerState
from websockets.frames import Frame, Opcode

from shoal.coordinator.server.websocket import MAX_UNSENT, SCOPE, DirectSocket

REQUEST = (
    b"GET / HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
LIMIT_BYTES = 70_000


class FakeTransport:
    """The other side of a socket."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def close(self) -> None:
        self.closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.closed

    def get_extra_info(self, _name: str) -> None:
        return None

    def pause_reading(self) -> None:
        raise AssertionError("a direct socket is always read")


class Listener:
    """An ASGI application that is done with a connection as soon as it listens."""

    def __init__(self) -> None:
        self.messages: list[bytes | str] = []
        self.closed = 0

    async def __call__(self, scope: dict[str, Any], receive: Callable[[], Any], send: Callable[[Any], Any]) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        self.socket: DirectSocket = scope[SCOPE]
        self.socket.listen(self.messages.append, self.on_close)

    def on_close(self) -> None:
        self.closed += 1


def talk(conversation: Callable[[DirectSocket, FakeTransport, Listener], None]) -> tuple[FakeTransport, Listener]:
    """Run a conversation on an open connection; return its transport and listener."""
    transport, listener = FakeTransport(), Listener()

    async def held() -> None:
        config = Config(listener, ws=DirectSocket, ws_max_size=LIMIT_BYTES, lifespan="off", log_config=None)
        config.load()
        socket = DirectSocket(config, ServerState(), {})
        socket.connection_made(transport)  # type: ignore[arg-type]
        socket.data_received(REQUEST)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        transport.written.clear()
        conversation(socket, transport, listener)
        await asyncio.sleep(0)
        socket.stop_keepalive()
        if socket.close_timer is not None:
            socket.close_timer.cancel()

    asyncio.run(held())
    return transport, listener


def frame(data: bytes, opcode: Opcode = Opcode.BINARY, fin: bool = True) -> bytes:
    return Frame(opcode, data, fin).serialize(mask=True)


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    ends = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[a:b] for a, b in pairwise(ends)]


SIZES = st.sampled_from([0, 1, 125, 126, 127, 300, 65_535, 65_536, LIMIT_BYTES])
SAID = st.lists(st.tuples(SIZES, st.sampled_from(["whole", "whole", "ping", "pong", "parts", "text"])), max_size=8)


@settings(max_examples=60)
@given(said=SAID, cuts=st.lists(st.integers(0, 1 << 20), max_size=6))
def test_messages_arrive_in_order_however_the_bytes_are_cut(said: list[tuple[int, str]], cuts: list[int]) -> None:
    sent, expected, pongs = b"", [], []
    for number, (size, how) in enumerate(said):
        data = bytes([97 + number]) * size
        if how == "ping":
            sent, pongs = sent + frame(data[:125], Opcode.PING), [*pongs, data[:125]]
        elif how == "pong":
            sent += frame(data[:125], Opcode.PONG)
        elif how == "parts":
            sent += frame(data[:7], fin=False) + frame(b"", Opcode.PING) + frame(data[7:], Opcode.CONT)
            expected, pongs = [*expected, data], [*pongs, b""]
        else:
            sent += frame(data, Opcode.TEXT if how == "text" else Opcode.BINARY)
            expected.append(data.decode() if how == "text" else data)

    def conversation(socket: DirectSocket, _transport: FakeTransport, _listener: Listener) -> None:
        for piece in pieces(sent, cuts):
            socket.data_received(piece)

    transport, listener = talk(conversation)
    assert listener.messages == expected
    assert b"".join(transport.written) == b"".join(Frame(Opcode.PONG, data).serialize(mask=False) for data in pongs)
    assert listener.closed == 0


@pytest.mark.parametrize(
    "bad",
    [
        frame(b"x" * (LIMIT_BYTES + 1)),
        Frame(Opcode.BINARY, b"not masked").serialize(mask=False),
        b"\x83\x80\0\0\0\0",
        b"\x89\xfe\0\x7e\0\0\0\0" + b"x" * 126,
    ],
    ids=["too large", "not masked", "no such kind", "a long ping"],
)
def test_invalid_frame_closes_the_connection(bad: bytes) -> None:
    transport, listener = talk(lambda socket, _transport, _listener: socket.data_received(frame(b"good") + bad))
    assert listener.messages == [b"good"]
    assert transport.closed


@pytest.mark.parametrize("size", [0, 125, 126, 65_535, 65_536])
def test_message_is_sent_as_one_frame(size: int) -> None:
    transport, _ = talk(lambda socket, _transport, _listener: socket.send_message(b"x" * size))
    assert b"".join(transport.written) == Frame(Opcode.BINARY, b"x" * size).serialize(mask=False)


def test_queued_messages_keep_their_order_and_close_comes_last() -> None:
    def conversation(socket: DirectSocket, transport: FakeTransport, _listener: Listener) -> None:
        socket.pause_writing()
        assert socket.send_message(b"one")
        assert socket.send_message(b"two")
        socket.close_after_sending()
        assert transport.written == []
        socket.resume_writing()

    transport, listener = talk(conversation)
    said = [Frame(Opcode.BINARY, data) for data in (b"one", b"two")] + [Frame(Opcode.CLOSE, b"\x03\xe8")]
    assert b"".join(transport.written) == b"".join(one.serialize(mask=False) for one in said)
    assert listener.closed == 1


def test_slow_reader_is_reported_when_its_queue_is_full() -> None:
    def conversation(socket: DirectSocket, _transport: FakeTransport, _listener: Listener) -> None:
        socket.pause_writing()
        assert all(socket.send_message(b"x") for _ in range(MAX_UNSENT))
        assert not socket.send_message(b"x")

    talk(conversation)


def test_close_is_reported_once_and_not_during_an_event() -> None:
    def conversation(socket: DirectSocket, _transport: FakeTransport, listener: Listener) -> None:
        socket.data_received(frame(b"\x03\xe8", Opcode.CLOSE))
        assert listener.closed == 0
        socket.connection_lost(None)

    _, listener = talk(conversation)
    assert listener.closed == 1
