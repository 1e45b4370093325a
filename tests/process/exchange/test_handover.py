from __future__ import annotations

import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest
from tests.process.exchange.meeting import NEVER, pair, world_of

from shoal.worker.collectives.exchange import ExchangeBroken
from shoal.worker.transport import state_transfer
from shoal.worker.transport.snapshot import Snapshot
from shoal.worker.transport.state_transfer import TransferHeader

pytestmark = pytest.mark.process


def some_state() -> list[np.ndarray]:
    random = np.random.default_rng(3)
    return [random.integers(0, 256, size).astype(np.uint8) for size in (0, 1, 5_000_000, 2 << 20, 17)]


def test_the_state_arrives_as_it_was(make_ports):
    ports = make_ports(3)
    world, state = world_of(ports), some_state()
    snapshot = Snapshot(41, b"what it is", state, readers=2)
    ports[1].offer(1, snapshot, ["m0", "m2"])
    with ThreadPoolExecutor(2) as pool:
        for received in pool.map(lambda port: port.fetch(world, 1, 10.0, NEVER), (ports[0], ports[2])):
            assert (received.step, received.header) == (41, b"what it is")
            for sent, arrived in zip(state, received.buffers, strict=True):
                np.testing.assert_array_equal(sent, arrived)
    ports[1].close()
    assert snapshot.finished


def test_an_offer_may_come_after_the_request(make_ports):
    ports = make_ports(2)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ports[0].fetch, world_of(ports), 1, 10.0, NEVER)
        wait_until(lambda: ports[1]._door._guests)
        ports[1].offer(1, Snapshot(7, b"late", some_state(), readers=1), ["m0"])
        assert asked.result(10).step == 7


def test_only_the_named_readers_get_the_state(make_ports):
    ports = make_ports(3)
    ports[1].offer(1, Snapshot(7, b"", some_state(), readers=1), ["m2"])
    with pytest.raises(ExchangeBroken, match="sent nothing"):
        ports[0].fetch(world_of(ports), 1, 0.3, NEVER)


def test_a_request_can_be_cancelled(make_ports):
    ports = make_ports(2)
    cancelled = threading.Event()
    threading.Timer(0.1, cancelled.set).start()
    with pytest.raises(ExchangeBroken) as broken:
        ports[0].fetch(world_of(ports), 1, 60.0, cancelled)
    assert broken.value.suspects == ()


def test_a_withdrawn_world_ends_its_requests(make_ports):
    ports = make_ports(2)
    world = world_of(ports)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ports[0].fetch, world, 1, 60.0, NEVER)
        wait_until(lambda: ports[1]._door._guests)
        ports[1].withdraw(1)
        with pytest.raises(ExchangeBroken):
            asked.result(10)
    with pytest.raises(ExchangeBroken):
        ports[0].fetch(world, 1, 60.0, NEVER)


def test_a_source_that_dies_midway_is_suspected(make_ports):
    ports = make_ports(2)
    snapshot = Mortal(5, b"", some_state())
    ports[1].offer(1, snapshot, ["m0"])
    with pytest.raises(ExchangeBroken, match="before the state was complete") as broken:
        ports[0].fetch(world_of(ports), 1, 10.0, NEVER)
    assert broken.value.suspects == ("m1",)
    wait_until(lambda: snapshot.finished)


def test_a_reader_that_dies_midway_does_not_hold_the_snapshot(make_ports):
    ports = make_ports(2)
    state = [np.zeros(40 << 20, np.uint8)]
    snapshot = Slow(5, b"", state, readers=1)
    ports[1].offer(1, snapshot, ["m0"])
    cancelled = threading.Event()
    threading.Timer(0.1, cancelled.set).start()
    with pytest.raises(ExchangeBroken):
        ports[0].fetch(world_of(ports), 1, 10.0, cancelled)
    wait_until(lambda: snapshot.finished)


def contents(*sizes: int, step: int = 1) -> bytes:
    packed = msgspec.msgpack.encode(TransferHeader(step, b"", sizes))
    return state_transfer._PREFIX.pack(b"shst", len(packed), zlib.crc32(packed)) + packed


@pytest.mark.parametrize(
    ("stream", "cause"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n", "no state"),
        (state_transfer._PREFIX.pack(b"shst", 0xFFFFFFFF, 0), "no state"),
        (state_transfer._PREFIX.pack(b"shst", 4, 1) + b"abcd", "damaged"),
        (state_transfer._PREFIX.pack(b"shst", 4, zlib.crc32(b"abcd")) + b"abcd", "malformed"),
        (contents(1 << 60), "more than"),
        (contents(-5), "negative"),
        (contents(8) + (zlib.crc32(b"12345678")).to_bytes(4, "big") + b"12345679", "damaged"),
        (contents(8) + (0).to_bytes(4, "big") + b"1234", "before the state was complete"),
    ],
)
def test_a_damaged_or_absurd_state_is_refused(stream, cause):
    ours, theirs = pair()
    theirs.sendall(stream)
    theirs.shutdown(1)
    with pytest.raises(ExchangeBroken, match=cause):
        state_transfer.receive(ours, "m1", 5.0, NEVER)
    ours.close()
    theirs.close()


class Mortal(Snapshot):
    """Its owner vanishes after the first pieces."""

    def __init__(self, step, header, buffers):
        super().__init__(step, header, buffers, readers=1)

    def piece(self, reader, index, start, stop):
        if start >= 2 << 20:
            raise ConnectionResetError("gone")
        return super().piece(reader, index, start, stop)


class Slow(Snapshot):
    """Its owner has little time to copy."""

    def piece(self, reader, index, start, stop):
        time.sleep(0.02)
        return super().piece(reader, index, start, stop)


def wait_until(condition, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
