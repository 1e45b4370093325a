"""Being seen: connected to whoever was named last, again when the connection is lost, and never through two doors."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable

import pytest

from shoal.core.world import Address, Seat
from shoal.testing.wait import until
from shoal.worker.parameter_server.liveness import LivenessConnection
from shoal.worker.transport.exchange_broken import ExchangeBroken
from shoal.worker.transport.handshake import CALL, PeerHello
from shoal.worker.transport.peers import Peers

pytestmark = [pytest.mark.process, pytest.mark.timeout(60)]


class Watcher:
    """A port, and who is connected to it."""

    def __init__(self, port: Peers, name: str) -> None:
        self.seat = Seat(name, "first", port.address)
        self.socks: list[socket.socket] = []
        self.most = 0
        self._lock = threading.Lock()
        port.serve(CALL, self._serve)

    def _serve(self, _hello: PeerHello, sock: socket.socket) -> None:
        with self._lock:
            self.socks.append(sock)
            self.most = max(self.most, len(self.socks))
        with contextlib.suppress(OSError):
            sock.recv(1)
        with self._lock:
            self.socks.remove(sock)
        sock.close()


@pytest.fixture
def watchers(make_peers: Callable[..., list[Peers]]) -> tuple[LivenessConnection, Watcher, Watcher]:
    me, *others = make_peers(3)
    presence = LivenessConnection(lambda seat: me.connect(CALL, 0, seat, 2.0, threading.Event()))
    return presence, Watcher(others[0], "m1"), Watcher(others[1], "m2")


def test_however_often_the_same_member_is_named_there_is_one_connection(
    watchers: tuple[LivenessConnection, Watcher, Watcher],
) -> None:
    presence, first, second = watchers
    for _ in range(20):
        presence.connect_to(first.seat)
    until(lambda: first.socks, "the connections to change")
    kept = first.socks[0]
    for _ in range(20):
        presence.connect_to(first.seat)
    time.sleep(0.3)
    assert first.socks == [kept]
    assert first.most == 1
    presence.connect_to(second.seat)
    until(lambda: second.socks and not first.socks, "the connections to change")
    presence.connect_to(None)
    until(lambda: not second.socks, "the connections to change")
    presence.close()


def test_a_lost_connection_is_made_anew(watchers: tuple[LivenessConnection, Watcher, Watcher]) -> None:
    presence, first, _ = watchers
    presence.connect_to(first.seat)
    until(lambda: first.socks, "the connections to change")
    lost = first.socks[0]
    lost.shutdown(socket.SHUT_RDWR)
    until(lambda: first.socks and first.socks[0] is not lost, "the connections to change")
    presence.close()
    until(lambda: not first.socks, "the connections to change")


def test_whoever_cannot_be_reached_is_tried_again() -> None:
    refusals = iter(range(5))
    mine, its = socket.socketpair()

    def call(_seat: Seat) -> socket.socket:
        if next(refusals, None) is not None:
            raise ExchangeBroken("not yet")
        return mine

    presence = LivenessConnection(call)
    presence.connect_to(Seat("m1", "first", Address("127.0.0.1", 1)))
    until(lambda: presence._open is not None, "the connections to change")
    presence.close()
    assert its.recv(1) == b"", "it hears that we are gone"
    its.close()
