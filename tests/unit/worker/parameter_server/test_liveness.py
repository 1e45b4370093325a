"""Liveness connection: which server it leads to, and when it ends."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from shoal.core.world import Address, Seat
from shoal.testing.wait import until
from shoal.worker.parameter_server.liveness import LivenessConnection
from shoal.worker.transport.exchange_broken import ExchangeBroken

A, B = (Seat(name, "1", Address("127.0.0.1", 1)) for name in "ab")


class Servers:
    """Servers at the other ends of socket pairs; those in `down` cannot be reached."""

    def __init__(self) -> None:
        self.down: set[str] = set()
        self.accepted: list[tuple[str, socket.socket]] = []

    def connect(self, seat: Seat) -> socket.socket:
        if seat.member in self.down:
            raise ExchangeBroken(f"{seat.member} is down")
        ours, theirs = socket.socketpair()
        self.accepted.append((seat.member, theirs))
        return ours

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.accepted]

    def is_closed(self, index: int) -> bool:
        sock = self.accepted[index][1]
        sock.setblocking(False)
        try:
            return sock.recv(1) == b""
        except BlockingIOError:
            return False


@pytest.fixture
def servers() -> Iterator[Servers]:
    made = Servers()
    yield made
    for _, sock in made.accepted:
        sock.close()


def test_connection_moves_to_the_server_that_was_named_last(servers: Servers) -> None:
    liveness = LivenessConnection(servers.connect)
    liveness.connect_to(A)
    until(lambda: servers.names == ["a"], "a connection")
    liveness.connect_to(B)
    until(lambda: servers.names == ["a", "b"], "the other connection")
    until(lambda: servers.is_closed(0), "the end of the first one")
    liveness.close()
    until(lambda: servers.is_closed(1), "the end")


def test_server_that_is_down_is_tried_again(servers: Servers) -> None:
    servers.down.add("a")
    liveness = LivenessConnection(servers.connect)
    liveness.connect_to(A)
    servers.down.clear()
    until(lambda: servers.names == ["a"], "a connection")
    liveness.close()
