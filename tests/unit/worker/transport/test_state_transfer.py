from __future__ import annotations

import socket
import struct
import threading
import zlib
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from shoal.worker.transport import state_transfer
from shoal.worker.transport.exchange_broken import ExchangeBroken
from shoal.worker.transport.snapshot import Snapshot

NEVER = threading.Event()
Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    here, there = socket.socketpair()
    yield here, there
    here.close()
    there.close()


def frame(header: bytes, magic: bytes = b"shst", checksum: int | None = None) -> bytes:
    return struct.pack("!4sII", magic, len(header), zlib.crc32(header) if checksum is None else checksum) + header


def announce(step: int, sizes: list[int]) -> bytes:
    return frame(msgspec.msgpack.encode([step, b"header", sizes]))


def receive(sock: socket.socket) -> state_transfer.ReceivedState:
    return state_transfer.receive(sock, "m0", 30.0, NEVER)


def test_state_arrives_in_chunks_as_it_was(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_transfer, "CHUNK_BYTES", 7)
    buffers = [np.arange(100, dtype=np.uint8), np.empty(0, np.uint8), np.full(3, 9, np.uint8)]
    snapshot = Snapshot(5, b"header", buffers, 1)
    sender = threading.Thread(target=state_transfer.send, args=(pair[0], snapshot, "m1", 30.0))
    sender.start()
    received = receive(pair[1])
    sender.join()
    assert (received.step, received.header) == (5, b"header")
    assert [buffer.tolist() for buffer in received.buffers] == [buffer.tolist() for buffer in buffers]
    assert snapshot.finished


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (frame(b"", magic=b"http"), "not a state"),
        (struct.pack("!4sII", b"shst", 1 << 31, 0), "not a state"),
        (frame(b"header", checksum=1), "checksum mismatch"),
        (frame(b"\x93\x01\xc4\x00\xa4\xff\xff\xff\xff"), "malformed header"),
        (frame(b"\x91" * 3000), "malformed header"),
        (announce(-1, [1]), "negative size"),
        (announce(1, [-1]), "negative size"),
        (announce(1, [1 << 60]), "bytes of memory"),
        (announce(1, [4]) + struct.pack("!I", 1) + b"abcd", "corrupt chunk"),
    ],
)
def test_damaged_state_is_refused_and_suspects_no_member(pair: Pair, data: bytes, problem: str) -> None:
    pair[0].sendall(data)
    with pytest.raises(ExchangeBroken, match=problem) as broken:
        receive(pair[1])
    assert broken.value.suspects == ()


def test_source_that_closes_or_falls_silent_is_suspected(pair: Pair) -> None:
    with pytest.raises(ExchangeBroken, match=r"m0 sent nothing of the state for 0\.01 s") as broken:
        state_transfer.receive(pair[1], "m0", 0.01, NEVER)
    assert broken.value.suspects == ("m0",)
    pair[0].close()
    with pytest.raises(ExchangeBroken, match="m0 closed the connection") as broken:
        receive(pair[1])
    assert broken.value.suspects == ("m0",)


def test_cancelled_reader_stops_waiting(pair: Pair) -> None:
    cancelled = threading.Event()
    cancelled.set()
    with pytest.raises(ExchangeBroken, match="no longer needs the state"):
        state_transfer.receive(pair[1], "m0", 30.0, cancelled)


def test_limit_of_months_does_not_wrap_around_to_a_fraction_of_a_second(pair: Pair) -> None:
    limits: list[float | None] = []

    class Recorded(Snapshot):
        def chunk(self, reader: str, index: int, start: int, stop: int) -> memoryview:
            limits.append(pair[0].gettimeout())
            return super().chunk(reader, index, start, stop)

    snapshot = Recorded(5, b"header", [np.arange(3, dtype=np.uint8)], 1)
    sender = threading.Thread(target=state_transfer.send, args=(pair[0], snapshot, "m1", 2**32 / 1000 + 0.1))
    sender.start()
    receive(pair[1])
    sender.join()
    assert limits == [state_transfer.MAX_TIMEOUT_S]
    assert limits[0] * 1000 < 1 << 31
