"""A member has several addresses: some refuse, some are mute, some are somebody else's, and one leads to it."""

from __future__ import annotations

import socket
import threading

import pytest
from tests.process.exchange.meeting import NEVER, TOKEN

from shoal.core.world import Address, Seat
from shoal.worker.collectives.exchange import ExchangeBroken
from shoal.worker.transport import connect
from shoal.worker.transport.handshake import CALL
from shoal.worker.transport.peers import Peers

pytestmark = pytest.mark.process


class Town:
    """One who calls, and one who is called and counts who came."""

    def __init__(self) -> None:
        self.caller = Peers(TOKEN, "run", "m0", "first", "127.0.0.1")
        self.called = Peers(TOKEN, "run", "m1", "first", "127.0.0.1")
        self.came = threading.Semaphore(0)
        self.guests: list[socket.socket] = []
        self.called.serve(CALL, self._arrived)
        self._number = 0

    def _arrived(self, _hello: object, sock: socket.socket) -> None:
        self.guests.append(sock)
        self.came.release()

    @property
    def port(self) -> int:
        return self.called.address.port

    def call(self, *hosts: str, timeout_s: float = 5.0) -> socket.socket:
        self._number += 1
        seat = Seat("m1", "first", Address(hosts[0], self.port, hosts[1:]))
        return self.caller.call(CALL, self._number, seat, timeout_s, NEVER)

    def close(self) -> None:
        for sock in self.guests:
            sock.close()
        self.caller.close()
        self.called.close()


@pytest.fixture
def town():
    made = Town()
    yield made
    made.close()


def test_an_address_that_refuses_is_passed_over(town):
    with town.call("127.0.0.2", "127.0.0.1") as sock:
        assert sock.getpeername()[0] == "127.0.0.1"


def test_an_address_that_says_nothing_is_passed_over_and_the_one_that_answers_is_remembered(town, monkeypatch):
    monkeypatch.setattr(connect, "PROOF_S", 0.1)
    with socket.create_server(("127.0.0.2", town.port)) as mute:
        for _ in range(2):
            with town.call("127.0.0.2", "127.0.0.1", timeout_s=10.0) as sock:
                assert sock.getpeername()[0] == "127.0.0.1"
                assert town.came.acquire(timeout=5)
        mute.settimeout(5)
        mute.accept()[0].close()
        mute.setblocking(False)
        with pytest.raises(BlockingIOError):
            mute.accept()
    assert len(town.guests) == 2, "the member saw a connection that was not meant"


@pytest.mark.parametrize(("token", "name"), [(b"another token", "m1"), (TOKEN, "m2")], ids=["token", "member"])
def test_somebody_else_at_the_first_address_is_passed_over(town, token, name):
    ports = range(town.port, town.port + 1)
    other = Peers(token, "run", name, "first", "127.0.0.2", ports)
    try:
        with town.call("127.0.0.2", "127.0.0.1") as sock:
            assert sock.getpeername()[0] == "127.0.0.1"
    finally:
        other.close()


def test_a_member_that_is_found_nowhere_is_suspected_with_all_that_was_tried(town):
    with pytest.raises(ExchangeBroken, match=r"cannot reach m1 at 127\.0\.0\.2.*127\.0\.0\.3") as broken:
        town.call("127.0.0.2", "127.0.0.3")
    assert broken.value.suspects == ("m1",)


def test_who_refuses_where_it_once_answered_is_gone_at_once(town, monkeypatch):
    town.call("127.0.0.1", "127.0.0.2").close()
    port = town.port
    town.called.close()
    monkeypatch.setattr(connect, "SILENT_S", 3600.0)
    with socket.create_server(("127.0.0.2", port)) as mute:
        mute.settimeout(0)
        with pytest.raises(ExchangeBroken, match="nobody listens"):
            town.call("127.0.0.1", "127.0.0.2", timeout_s=3600.0)
        with pytest.raises(BlockingIOError):
            mute.accept()


def test_a_member_of_several_addresses_listens_at_all_of_them():
    port = Peers(TOKEN, "run", "m1", "first", "127.0.0.1", others=("127.0.0.9", "::1"))
    caller = Peers(TOKEN, "run", "m0", "first", "127.0.0.1")
    try:
        for number, host in enumerate(port.address.hosts):
            seat = Seat("m1", "first", Address(host, port.address.port))
            caller.call(CALL, number, seat, 5.0, NEVER).close()
    finally:
        caller.close()
        port.close()
