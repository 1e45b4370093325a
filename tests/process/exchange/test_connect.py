"""Connecting to a member with several addresses: some refuse, some are silent, some belong to another process."""

from __future__ import annotations

import socket
import threading

import pytest
from tests.process.exchange.loopback import NEVER, TOKEN

from shoal.core.world import Address, Seat
from shoal.worker.transport import connect
from shoal.worker.transport.exchange_broken import ExchangeBroken
from shoal.worker.transport.handshake import CALL
from shoal.worker.transport.peers import Peers

pytestmark = pytest.mark.process


class CountingPeer:
    """A member that connects, and one that counts the connections it gets."""

    def __init__(self) -> None:
        self.caller = Peers(TOKEN, "run", "m0", "first", "127.0.0.1")
        self.called = Peers(TOKEN, "run", "m1", "first", "127.0.0.1")
        self.arrivals = threading.Semaphore(0)
        self.accepted: list[socket.socket] = []
        self.called.serve(CALL, self._arrived)
        self._number = 0

    def _arrived(self, _hello: object, sock: socket.socket) -> None:
        self.accepted.append(sock)
        self.arrivals.release()

    @property
    def port(self) -> int:
        return self.called.address.port

    def connect(self, *hosts: str, timeout_s: float = 5.0) -> socket.socket:
        self._number += 1
        seat = Seat("m1", "first", Address(hosts[0], self.port, hosts[1:]))
        return self.caller.connect(CALL, self._number, seat, timeout_s, NEVER)

    def close(self) -> None:
        for sock in self.accepted:
            sock.close()
        self.caller.close()
        self.called.close()


@pytest.fixture
def pair():
    made = CountingPeer()
    yield made
    made.close()


def test_address_that_refuses_is_skipped(pair):
    with pair.connect("127.0.0.2", "127.0.0.1") as sock:
        assert sock.getpeername()[0] == "127.0.0.1"


def test_silent_address_is_skipped_and_the_working_one_remembered(pair, monkeypatch):
    monkeypatch.setattr(connect, "PROOF_S", 0.1)
    with socket.create_server(("127.0.0.2", pair.port)) as mute:
        for _ in range(2):
            with pair.connect("127.0.0.2", "127.0.0.1", timeout_s=10.0) as sock:
                assert sock.getpeername()[0] == "127.0.0.1"
                assert pair.arrivals.acquire(timeout=5)
        mute.settimeout(5)
        mute.accept()[0].close()
        mute.setblocking(False)
        with pytest.raises(BlockingIOError):
            mute.accept()
    assert len(pair.accepted) == 2, "the member saw a connection that was not meant"


@pytest.mark.parametrize(("token", "name"), [(b"another token", "m1"), (TOKEN, "m2")], ids=["token", "member"])
def test_address_of_another_process_is_skipped(pair, token, name):
    ports = range(pair.port, pair.port + 1)
    other = Peers(token, "run", name, "first", "127.0.0.2", ports)
    try:
        with pair.connect("127.0.0.2", "127.0.0.1") as sock:
            assert sock.getpeername()[0] == "127.0.0.1"
    finally:
        other.close()


def test_unreachable_member_is_suspected_with_every_address_tried(pair):
    with pytest.raises(ExchangeBroken, match=r"cannot reach m1 at 127\.0\.0\.2.*127\.0\.0\.3") as broken:
        pair.connect("127.0.0.2", "127.0.0.3")
    assert broken.value.suspects == ("m1",)


def test_refusal_at_the_known_address_ends_the_attempt_at_once(pair, monkeypatch):
    pair.connect("127.0.0.1", "127.0.0.2").close()
    port = pair.port
    pair.called.close()
    monkeypatch.setattr(connect, "SILENT_S", 3600.0)
    with socket.create_server(("127.0.0.2", port)) as mute:
        mute.settimeout(0)
        with pytest.raises(ExchangeBroken, match="connection refused"):
            pair.connect("127.0.0.1", "127.0.0.2", timeout_s=3600.0)
        with pytest.raises(BlockingIOError):
            mute.accept()


def test_member_with_several_addresses_listens_on_all_of_them():
    peer = Peers(TOKEN, "run", "m1", "first", "127.0.0.1", others=("127.0.0.9", "::1"))
    caller = Peers(TOKEN, "run", "m0", "first", "127.0.0.1")
    try:
        for number, host in enumerate(peer.address.hosts):
            seat = Seat("m1", "first", Address(host, peer.address.port))
            caller.connect(CALL, number, seat, 5.0, NEVER).close()
    finally:
        caller.close()
        peer.close()
