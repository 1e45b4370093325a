from __future__ import annotations

import socket
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest
from tests.process.exchange.loopback import NEVER, pair, world_of

from shoal.testing.wait import until
from shoal.worker.transport import state_transfer
from shoal.worker.transport.exchange_broken import ExchangeBroken
from shoal.worker.transport.snapshot import Snapshot
from shoal.worker.transport.state_transfer import TransferHeader

pytestmark = pytest.mark.process


def some_state() -> list[np.ndarray]:
    random = np.random.default_rng(3)
    return [random.integers(0, 256, size).astype(np.uint8) for size in (0, 1, 5_000_000, 2 << 20, 17)]


def test_state_arrives_unchanged_at_every_reader(make_peers):
    peers = make_peers(3)
    world, state = world_of(peers), some_state()
    snapshot = Snapshot(41, b"what it is", state, readers=2)
    peers[1].offer_state(1, snapshot, ["m0", "m2"])
    with ThreadPoolExecutor(2) as pool:
        for received in pool.map(lambda peer: peer.fetch_state(world, 1, 10.0, NEVER), (peers[0], peers[2])):
            assert (received.step, received.header) == (41, b"what it is")
            for sent, arrived in zip(state, received.buffers, strict=True):
                np.testing.assert_array_equal(sent, arrived)
    peers[1].close()
    assert snapshot.finished


def test_offer_may_follow_the_request(make_peers):
    peers = make_peers(2)
    with ThreadPoolExecutor(1) as pool:
        request = pool.submit(peers[0].fetch_state, world_of(peers), 1, 10.0, NEVER)
        until(lambda: peers[1].listener._idle, "an idle connection")
        peers[1].offer_state(1, Snapshot(7, b"late", some_state(), readers=1), ["m0"])
        assert request.result(10).step == 7


def test_member_that_is_not_a_named_reader_gets_nothing(make_peers):
    peers = make_peers(3)
    peers[1].offer_state(1, Snapshot(7, b"", some_state(), readers=1), ["m2"])
    with pytest.raises(ExchangeBroken, match="sent nothing"):
        peers[0].fetch_state(world_of(peers), 1, 0.3, NEVER)


def test_request_can_be_cancelled(make_peers):
    peers = make_peers(2)
    cancelled = threading.Event()
    threading.Timer(0.1, cancelled.set).start()
    with pytest.raises(ExchangeBroken) as broken:
        peers[0].fetch_state(world_of(peers), 1, 60.0, cancelled)
    assert broken.value.suspects == ()


def test_end_of_a_world_ends_its_requests(make_peers):
    peers = make_peers(2)
    world = world_of(peers)
    with ThreadPoolExecutor(1) as pool:
        request = pool.submit(peers[0].fetch_state, world, 1, 60.0, NEVER)
        until(lambda: peers[1].listener._idle, "an idle connection")
        peers[1].end_worlds(1)
        with pytest.raises(ExchangeBroken):
            request.result(10)
    with pytest.raises(ExchangeBroken):
        peers[0].fetch_state(world, 1, 60.0, NEVER)


def test_source_that_dies_midway_is_suspected(make_peers):
    peers = make_peers(2)
    snapshot = DyingSnapshot(5, b"", some_state())
    peers[1].offer_state(1, snapshot, ["m0"])
    with pytest.raises(ExchangeBroken, match="before the state was complete") as broken:
        peers[0].fetch_state(world_of(peers), 1, 10.0, NEVER)
    assert broken.value.suspects == ("m1",)
    until(lambda: snapshot.finished, "the snapshot to be read")


def test_reader_that_dies_midway_releases_the_snapshot(make_peers):
    peers = make_peers(2)
    state = [np.zeros(40 << 20, np.uint8)]
    snapshot = SlowSnapshot(5, b"", state, readers=1)
    peers[1].offer_state(1, snapshot, ["m0"])
    cancelled = threading.Event()
    threading.Timer(0.1, cancelled.set).start()
    with pytest.raises(ExchangeBroken):
        peers[0].fetch_state(world_of(peers), 1, 10.0, cancelled)
    until(lambda: snapshot.finished, "the snapshot to be read")


def transfer_header(*sizes: int, step: int = 1) -> bytes:
    packed = msgspec.msgpack.encode(TransferHeader(step, b"", sizes))
    return state_transfer._PREFIX.pack(b"shst", len(packed), zlib.crc32(packed)) + packed


@pytest.mark.parametrize(
    ("stream", "cause"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n", "not a state"),
        (state_transfer._PREFIX.pack(b"shst", 0xFFFFFFFF, 0), "not a state"),
        (state_transfer._PREFIX.pack(b"shst", 4, 1) + b"abcd", "checksum mismatch"),
        (state_transfer._PREFIX.pack(b"shst", 4, zlib.crc32(b"abcd")) + b"abcd", "malformed"),
        (transfer_header(1 << 60), "bytes of memory"),
        (transfer_header(-5), "negative"),
        (transfer_header(8) + (zlib.crc32(b"12345678")).to_bytes(4, "big") + b"12345679", "checksum mismatch"),
        (transfer_header(8) + (0).to_bytes(4, "big") + b"1234", "before the state was complete"),
    ],
)
def test_corrupt_or_absurd_state_is_refused(stream, cause):
    ours, theirs = pair()
    theirs.sendall(stream)
    theirs.shutdown(1)
    with pytest.raises(ExchangeBroken, match=cause):
        state_transfer.receive(ours, "m1", 5.0, NEVER)
    ours.close()
    theirs.close()


class DyingSnapshot(Snapshot):
    """Snapshot whose owner dies after the first chunks."""

    def __init__(self, step, header, buffers):
        super().__init__(step, header, buffers, readers=1)

    def chunk(self, reader, index, start, stop):
        if start >= 2 << 20:
            raise ConnectionResetError("gone")
        return super().chunk(reader, index, start, stop)


class SlowSnapshot(Snapshot):
    """Snapshot that takes its time with every chunk."""

    def chunk(self, reader, index, start, stop):
        time.sleep(0.02)
        return super().chunk(reader, index, start, stop)


def test_source_may_begin_late_but_not_pause_for_long():
    ours, theirs = socket.socketpair()
    with ThreadPoolExecutor(1) as pool, ours, theirs:
        request = pool.submit(state_transfer.receive, ours, "local/1", 0.2, NEVER, 60.0)
        with pytest.raises(TimeoutError):
            request.result(0.5)
        theirs.sendall(state_transfer._PREFIX.pack(state_transfer._MAGIC, 10, 0))
        with pytest.raises(ExchangeBroken, match=r"sent nothing of the state for 0\.2 s"):
            request.result(30.0)
