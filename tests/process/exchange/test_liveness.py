"""A liveness connection leads to the member named last, is restored when it is lost, and is never doubled."""

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

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]


class Watcher:
    """A member that records the connections to it."""

    def __init__(self, peers: Peers, name: str) -> None:
        self.seat = Seat(name, "first", peers.address)
        self.socks: list[socket.socket] = []
        self.most = 0
        self._lock = threading.Lock()
        peers.serve(CALL, self._serve)

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
    own, *others = make_peers(3)
    liveness = LivenessConnection(lambda seat: own.connect(CALL, 0, seat, 2.0, threading.Event()))
    return liveness, Watcher(others[0], "m1"), Watcher(others[1], "m2")


def test_naming_the_same_member_again_keeps_one_connection(
    watchers: tuple[LivenessConnection, Watcher, Watcher],
) -> None:
    liveness, first, second = watchers
    for _ in range(20):
        liveness.connect_to(first.seat)
    until(lambda: first.socks, "the connections to change")
    kept = first.socks[0]
    for _ in range(20):
        liveness.connect_to(first.seat)
    time.sleep(0.3)
    assert first.socks == [kept]
    assert first.most == 1
    liveness.connect_to(second.seat)
    until(lambda: second.socks and not first.socks, "the connections to change")
    liveness.connect_to(None)
    until(lambda: not second.socks, "the connections to change")
    liveness.close()


def test_lost_connection_is_restored(watchers: tuple[LivenessConnection, Watcher, Watcher]) -> None:
    liveness, first, _ = watchers
    liveness.connect_to(first.seat)
    until(lambda: first.socks, "the connections to change")
    lost = first.socks[0]
    lost.shutdown(socket.SHUT_RDWR)
    until(lambda: first.socks and first.socks[0] is not lost, "the connections to change")
    liveness.close()
    until(lambda: not first.socks, "the connections to change")


def test_unreachable_member_is_tried_again() -> None:
    refusals = iter(range(5))
    own_end, peer_end = socket.socketpair()

    def connect(_seat: Seat) -> socket.socket:
        if next(refusals, None) is not None:
            raise ExchangeBroken("not yet")
        return own_end

    liveness = LivenessConnection(connect)
    liveness.connect_to(Seat("m1", "first", Address("127.0.0.1", 1)))
    until(lambda: liveness._open is not None, "the connections to change")
    liveness.close()
    assert peer_end.recv(1) == b"", "the peer sees the end of the connection"
    peer_end.close()
