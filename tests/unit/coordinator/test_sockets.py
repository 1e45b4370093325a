"""What comes in as bytes, however it is cut, is heard as it was said; what goes out waits for its turn."""

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

from shoal.coordinator.server.websocket import MAX_WAITING, SCOPE, DirectSocket

REQUEST = (
    b"GET / HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
LIMIT_BYTES = 70_000


class Wire:
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


class Ear:
    """Who listens: an application that is done with a connection as soon as it is accepted."""

    def __init__(self) -> None:
        self.heard: list[bytes | str] = []
        self.gone = 0

    async def __call__(self, scope: dict[str, Any], receive: Callable[[], Any], send: Callable[[Any], Any]) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        self.socket: DirectSocket = scope[SCOPE]
        self.socket.listen(self.heard.append, self.over)

    def over(self) -> None:
        self.gone += 1


def talk(conversation: Callable[[DirectSocket, Wire, Ear], None]) -> tuple[Wire, Ear]:
    """A conversation on an open connection, and what came of it."""
    wire, ear = Wire(), Ear()

    async def held() -> None:
        config = Config(ear, ws=DirectSocket, ws_max_size=LIMIT_BYTES, lifespan="off", log_config=None)
        config.load()
        socket = DirectSocket(config, ServerState(), {})
        socket.connection_made(wire)  # type: ignore[arg-type]
        socket.data_received(REQUEST)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        wire.written.clear()
        conversation(socket, wire, ear)
        await asyncio.sleep(0)
        socket.stop_keepalive()
        if socket.close_timer is not None:
            socket.close_timer.cancel()

    asyncio.run(held())
    return wire, ear


def frame(data: bytes, opcode: Opcode = Opcode.BINARY, fin: bool = True) -> bytes:
    return Frame(opcode, data, fin).serialize(mask=True)


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    ends = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[a:b] for a, b in pairwise(ends)]


SIZES = st.sampled_from([0, 1, 125, 126, 127, 300, 65_535, 65_536, LIMIT_BYTES])
SAID = st.lists(st.tuples(SIZES, st.sampled_from(["whole", "whole", "ping", "pong", "parts", "text"])), max_size=8)


@settings(max_examples=60)
@given(said=SAID, cuts=st.lists(st.integers(0, 1 << 20), max_size=6))
def test_whatever_is_said_is_heard_in_order_however_it_is_cut(said: list[tuple[int, str]], cuts: list[int]) -> None:
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

    def conversation(socket: DirectSocket, _wire: Wire, _ear: Ear) -> None:
        for piece in pieces(sent, cuts):
            socket.data_received(piece)

    wire, ear = talk(conversation)
    assert ear.heard == expected
    assert b"".join(wire.written) == b"".join(Frame(Opcode.PONG, data).serialize(mask=False) for data in pongs)
    assert ear.gone == 0


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
def test_what_breaks_the_rules_closes_the_connection(bad: bytes) -> None:
    wire, ear = talk(lambda socket, _wire, _ear: socket.data_received(frame(b"good") + bad))
    assert ear.heard == [b"good"]
    assert wire.closed


@pytest.mark.parametrize("size", [0, 125, 126, 65_535, 65_536])
def test_what_is_said_goes_out_as_one_frame(size: int) -> None:
    wire, _ = talk(lambda socket, _wire, _ear: socket.say(b"x" * size))
    assert b"".join(wire.written) == Frame(Opcode.BINARY, b"x" * size).serialize(mask=False)


def test_nothing_overtakes_what_waits_and_the_good_bye_comes_last() -> None:
    def conversation(socket: DirectSocket, wire: Wire, _ear: Ear) -> None:
        socket.pause_writing()
        assert socket.say(b"one")
        assert socket.say(b"two")
        socket.hang_up()
        assert wire.written == []
        socket.resume_writing()

    wire, ear = talk(conversation)
    said = [Frame(Opcode.BINARY, data) for data in (b"one", b"two")] + [Frame(Opcode.CLOSE, b"\x03\xe8")]
    assert b"".join(wire.written) == b"".join(one.serialize(mask=False) for one in said)
    assert ear.gone == 1


def test_who_takes_nothing_for_too_long_is_said_to() -> None:
    def conversation(socket: DirectSocket, _wire: Wire, _ear: Ear) -> None:
        socket.pause_writing()
        assert all(socket.say(b"x") for _ in range(MAX_WAITING))
        assert not socket.say(b"x")

    talk(conversation)


def test_the_end_is_told_once_and_not_in_the_middle_of_something() -> None:
    def conversation(socket: DirectSocket, _wire: Wire, ear: Ear) -> None:
        socket.data_received(frame(b"\x03\xe8", Opcode.CLOSE))
        assert ear.gone == 0
        socket.connection_lost(None)

    _, ear = talk(conversation)
    assert ear.gone == 1
