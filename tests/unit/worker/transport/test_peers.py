from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from shoal.core.world import Seat, World
from shoal.errors import PeerPortFailed
from shoal.testing.wait import until
from shoal.worker.transport.exchange_broken import ExchangeBroken
from shoal.worker.transport.handshake import CALL, PeerHello
from shoal.worker.transport.peers import Peers
from shoal.worker.transport.snapshot import Snapshot

NEVER = threading.Event()


@pytest.fixture
def pair() -> Iterator[tuple[Peers, Peers]]:
    first, second = (Peers(b"token", "run", name, "first", "127.0.0.1") for name in ("m0", "m1"))
    yield first, second
    first.close()
    second.close()


def seat(peers: Peers) -> Seat:
    return Seat(peers.member, "first", peers.address)


def test_served_connection_reaches_its_handler_with_the_sender_proven(pair: tuple[Peers, Peers]) -> None:
    client, server = pair
    hellos: list[PeerHello] = []

    def echo(hello: PeerHello, sock: socket.socket) -> None:
        hellos.append(hello)
        with sock:
            sock.sendall(sock.recv(5))

    server.serve(CALL, echo)
    with client.connect(CALL, 7, seat(server), 30.0, NEVER) as sock:
        sock.sendall(b"hello")
        assert sock.recv(5) == b"hello"
    assert [(hello.member, hello.world) for hello in hellos] == [("m0", 7)]


def test_joiner_receives_the_state_that_was_offered_to_it(pair: tuple[Peers, Peers]) -> None:
    holder, joiner = pair
    world = World(2, (seat(holder), seat(joiner)), 0)
    holder.offer_state(2, Snapshot(41, b"header", [np.arange(9, dtype=np.uint8)], 1), ["m1"])
    received = joiner.fetch_state(world, 0, 30.0, NEVER)
    assert (received.step, received.header, received.buffers[0].tolist()) == (41, b"header", list(range(9)))


def test_state_of_an_ended_world_is_withdrawn(pair: tuple[Peers, Peers]) -> None:
    holder, joiner = pair
    world = World(2, (seat(holder), seat(joiner)), 0)
    holder.offer_state(2, Snapshot(41, b"header", [np.arange(9, dtype=np.uint8)], 1), ["m1"])
    holder.end_worlds(2)
    with pytest.raises(ExchangeBroken, match="m0"):
        joiner.fetch_state(world, 0, 30.0, NEVER)


def test_failed_port_is_reported_to_its_owner_with_a_code(monkeypatch: pytest.MonkeyPatch) -> None:
    failures: list[PeerPortFailed] = []
    peers = Peers(b"token", "run", "m0", "first", "127.0.0.1", on_failure=failures.append)
    monkeypatch.setattr(peers.listener, "_accept", lambda: 1 / 0)
    socket.create_connection((peers.address.host, peers.address.port)).close()
    (error,) = until(lambda: failures, "the report of the failure")
    assert error.code == "S214"
    assert str(peers.address.port) in error.what
    assert "ZeroDivisionError" in error.why
    peers.close()
