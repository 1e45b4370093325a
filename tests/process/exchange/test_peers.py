from __future__ import annotations

import os
import socket
import threading

import numpy as np
import pytest
from tests.process.exchange.loopback import NEVER, TOKEN, connect_all, die, world_of

from shoal.core.world import Address, Seat, World
from shoal.errors import PortsTaken
from shoal.testing.wait import until
from shoal.worker.collectives.connect_ring import connect_ring
from shoal.worker.transport import handshake
from shoal.worker.transport import listener as listener_module
from shoal.worker.transport.exchange_broken import ExchangeBroken
from shoal.worker.transport.handshake import PeerHello
from shoal.worker.transport.peers import Peers

pytestmark = pytest.mark.process


def hello_for(peer: Peers, **changes: object) -> PeerHello:
    fields = {
        "kind": handshake.RING,
        "run": "run",
        "world": 1,
        "member": "m1",
        "incarnation": "first",
        "to_member": "m0",
        "to_incarnation": "first",
        "nonce": b"n" * 32,
    }
    return PeerHello(**{**fields, **changes})


def knock(peer: Peers, data: bytes) -> socket.socket:
    sock = socket.create_connection((peer.address.host, peer.address.port), timeout=8)
    sock.sendall(data)
    return sock


def answer(sock: socket.socket) -> bytes:
    """Return what the listener sends until it closes or waits; empty if it refused the connection."""
    try:
        return sock.recv(handshake.CHALLENGE_BYTES, socket.MSG_WAITALL)
    except ConnectionResetError:
        return b""


def is_closed(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def idle_connections(peer: Peers) -> int:
    return len(peer.listener._idle)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_members_of_a_world_connect_a_ring(make_peers, size):
    peers = make_peers(size)
    rings = connect_all(peers, world_of(peers))
    parts = [np.full(1000, ring.rank + 1.0) for ring in rings]
    for work in [ring.reduce(part) for ring, part in zip(rings, parts, strict=True)]:
        work.wait()
    assert all((part == size * (size + 1) / 2).all() for part in parts)
    for ring in rings:
        ring.close()


def test_next_world_connects_while_the_current_one_works(make_peers):
    peers = make_peers(3)
    now = connect_all(peers[:2], world_of(peers[:2], 1))
    later = connect_all(peers, world_of(peers, 2))
    for work in [ring.gather(np.ones(2)) for ring in (*now, *later)]:
        work.wait()
    for ring in (*now, *later):
        ring.close()


def test_connection_waits_until_the_listener_hears_of_the_world(make_peers):
    peers = make_peers(2)
    world = world_of(peers)
    rings = []
    early = threading.Thread(target=lambda: rings.append(connect_ring(peers[0], world, 10.0, NEVER)))
    early.start()
    until(lambda: idle_connections(peers[1]) == 1, "the number of idle connections")
    rings.append(connect_ring(peers[1], world, 10.0, NEVER))
    early.join(120)
    assert len(rings) == 2
    for ring in rings:
        ring.close()


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x80\x04\x95" + os.urandom(500),
        handshake.PREFIX.pack(handshake.MAGIC, 0xFFFF) + b"x" * 2000,
        handshake.PREFIX.pack(handshake.MAGIC, 0),
        handshake.PREFIX.pack(handshake.MAGIC, 5) + b"\xc1\xc1\xc1\xc1\xc1",
    ],
)
def test_garbage_is_dropped_and_rings_keep_working(make_peers, garbage):
    peers = make_peers(2)
    rings = connect_all(peers, world_of(peers))
    with knock(peers[0], garbage) as sock:
        assert is_closed(sock)
    for work in [ring.gather(np.ones(2)) for ring in rings]:
        work.wait()
    for ring in rings:
        ring.close()


@pytest.mark.parametrize(
    "changes",
    [
        {"run": "another run"},
        {"to_member": "m7"},
        {"to_incarnation": "earlier"},
        {"kind": "admin"},
        {"nonce": b"short"},
    ],
)
def test_hello_for_another_process_is_refused(make_peers, changes):
    (peer,) = make_peers(1)
    with knock(peer, handshake.pack(hello_for(peer, **changes))) as sock:
        assert answer(sock) == b""


@pytest.mark.parametrize("token", [b"a wrong token", b""])
def test_connection_with_a_wrong_token_is_refused(make_peers, token):
    (peer,) = make_peers(1)
    packed = handshake.pack(hello_for(peer))
    with knock(peer, packed) as sock:
        challenge = answer(sock)
        sock.sendall(handshake.prove(handshake.make_key(token, "run"), handshake.CONNECTOR, packed, challenge[:32]))
        assert is_closed(sock)
    assert idle_connections(peer) == 0


def test_reflected_proof_of_the_listener_is_refused(make_peers):
    (peer,) = make_peers(1)
    with knock(peer, handshake.pack(hello_for(peer))) as sock:
        sock.sendall(answer(sock)[32:])
        assert is_closed(sock)


def test_replayed_handshake_is_refused(make_peers):
    (peer,) = make_peers(1)
    packed, key = handshake.pack(hello_for(peer)), handshake.make_key(TOKEN, "run")
    with knock(peer, packed) as sock:
        proof = handshake.prove(key, handshake.CONNECTOR, packed, answer(sock)[:32])
        sock.sendall(proof)
        until(lambda: idle_connections(peer) == 1, "the number of idle connections")
    until(lambda: idle_connections(peer) == 0, "the number of idle connections")
    with knock(peer, packed) as sock:
        answer(sock)
        sock.sendall(proof)
        assert is_closed(sock)
    assert idle_connections(peer) == 0


def test_listener_without_the_token_is_suspected(make_peers):
    (peer,) = make_peers(1)
    impostor = Peers(b"a wrong token", "run", "m1", "first", "127.0.0.1")
    world = World(1, (Seat("m0", "first", peer.address), Seat("m1", "first", impostor.address)), 0)
    with pytest.raises(ExchangeBroken, match="does not know the token") as broken:
        connect_ring(peer, world, 5.0, NEVER)
    assert broken.value.suspects == ("m1",)
    impostor.close()


def test_silent_connection_is_dropped_after_the_handshake_timeout(make_peers, monkeypatch):
    monkeypatch.setattr(listener_module, "HANDSHAKE_TIMEOUT_S", 0.2)
    (peer,) = make_peers(1)
    with knock(peer, handshake.MAGIC[:3]) as sock:
        assert is_closed(sock)
    assert not peer.listener._pending


def test_many_unauthenticated_connections_do_not_keep_members_out(make_peers):
    peers = make_peers(2)
    crowd = [knock(peers[0], b"s") for _ in range(listener_module.MAX_PENDING + 20)]
    rings = connect_all(peers, world_of(peers))
    assert len(peers[0].listener._pending) <= listener_module.MAX_PENDING
    for ring in rings:
        ring.close()
    for sock in crowd:
        sock.close()


def test_closed_member_is_suspected_at_once(make_peers):
    peers = make_peers(2)
    world = world_of(peers)
    peers[1].close()
    with pytest.raises(ExchangeBroken) as broken:
        connect_ring(peers[0], world, 60.0, NEVER)
    assert broken.value.suspects == ("m1",)


def test_all_members_give_up_a_world_when_one_is_gone(make_peers):
    peers = make_peers(4)
    world = world_of(peers)
    peers[2].close()
    suspects = []

    def join(peer):
        with pytest.raises(ExchangeBroken) as broken:
            connect_ring(peer, world, 60.0, NEVER)
        suspects.extend(broken.value.suspects)

    threads = [threading.Thread(target=join, args=(peer,)) for peer in (peers[0], peers[1], peers[3])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert "m2" in suspects


def test_member_that_does_not_connect_is_suspected_after_the_timeout(make_peers):
    peers = make_peers(2)
    with pytest.raises(ExchangeBroken, match="did not connect") as broken:
        connect_ring(peers[0], world_of(peers), 0.2, NEVER)
    assert broken.value.suspects == ("m1",)


def test_connect_can_be_cancelled(make_peers):
    peers = make_peers(2)
    cancelled = threading.Event()
    threading.Timer(0.1, cancelled.set).start()
    with pytest.raises(ExchangeBroken) as broken:
        connect_ring(peers[0], world_of(peers), 60.0, cancelled)
    assert broken.value.suspects == ()


def test_silent_listener_is_suspected(make_peers):
    (peer,) = make_peers(1)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        where = Address("127.0.0.1", mute.getsockname()[1])
        world = World(1, (Seat("m0", "first", peer.address), Seat("m1", "first", where)), 0)
        with pytest.raises(ExchangeBroken, match="did not answer") as broken:
            connect_ring(peer, world, 0.3, NEVER)
    assert broken.value.suspects == ("m1",)


def test_exhausted_port_range_raises():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        with pytest.raises(PortsTaken):
            Peers(TOKEN, "run", "m0", "first", "127.0.0.1", range(number, number + 1))


def test_three_hundred_worlds_leak_no_descriptors_or_threads(make_peers):
    peers = make_peers(2)
    for ring in connect_all(peers, world_of(peers)):
        ring.close()
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for number in range(2, 302):
        rings = connect_all(peers, world_of(peers, number))
        if number % 3 == 0:
            die(rings[0])
        for ring in rings:
            ring.close()
    # Threads of earlier tests may have ended meanwhile, and the last ones of this test may not have ended yet.
    until(lambda: len(os.listdir("/proc/self/fd")) <= descriptors, "all descriptors are closed")
    until(lambda: threading.active_count() <= threads, "all threads have ended")
