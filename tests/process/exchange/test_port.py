from __future__ import annotations

import os
import socket
import threading
import time

import numpy as np
import pytest
from tests.process.exchange.meeting import NEVER, TOKEN, connect_all, die, world_of

from shoal.core.world import Address, Seat, World
from shoal.errors import PortsTaken
from shoal.worker.collectives.exchange import ExchangeBroken
from shoal.worker.transport import handshake
from shoal.worker.transport import listener as door_module
from shoal.worker.transport.handshake import PeerHello
from shoal.worker.transport.peers import Peers

pytestmark = pytest.mark.process


def hello_for(port: Peers, **changes: object) -> PeerHello:
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


def knock(port: Peers, data: bytes) -> socket.socket:
    sock = socket.create_connection((port.address.host, port.address.port), timeout=8)
    sock.sendall(data)
    return sock


def answer(sock: socket.socket) -> bytes:
    """Everything that the port says until it closes or waits for us; empty if it turned us away."""
    try:
        return sock.recv(handshake.CHALLENGE_BYTES, socket.MSG_WAITALL)
    except ConnectionResetError:
        return b""


def is_turned_away(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def guests_of(port: Peers) -> int:
    return len(port._door._guests)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_members_of_a_world_meet_in_a_ring(make_ports, size):
    ports = make_ports(size)
    rings = connect_all(ports, world_of(ports))
    parts = [np.full(1000, ring.rank + 1.0) for ring in rings]
    for ticket in [ring.reduce(part) for ring, part in zip(rings, parts, strict=True)]:
        ticket.wait()
    assert all((part == size * (size + 1) / 2).all() for part in parts)
    for ring in rings:
        ring.close()


def test_the_next_world_is_connected_while_this_one_works(make_ports):
    ports = make_ports(3)
    now = connect_all(ports[:2], world_of(ports[:2], 1))
    later = connect_all(ports, world_of(ports, 2))
    for ticket in [ring.gather(np.ones(2)) for ring in (*now, *later)]:
        ticket.wait()
    for ring in (*now, *later):
        ring.close()


def test_a_member_that_comes_before_the_others_know_of_the_world_is_kept(make_ports):
    ports = make_ports(2)
    world = world_of(ports)
    rings = []
    early = threading.Thread(target=lambda: rings.append(ports[0].connect(world, 10.0, NEVER)))
    early.start()
    wait_until(lambda: guests_of(ports[1]) == 1)
    rings.append(ports[1].connect(world, 10.0, NEVER))
    early.join(10)
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
def test_garbage_is_dropped_and_disturbs_no_ring(make_ports, garbage):
    ports = make_ports(2)
    rings = connect_all(ports, world_of(ports))
    with knock(ports[0], garbage) as sock:
        assert is_turned_away(sock)
    for ticket in [ring.gather(np.ones(2)) for ring in rings]:
        ticket.wait()
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
def test_a_hello_that_is_not_for_us_is_turned_away(make_ports, changes):
    (port,) = make_ports(1)
    with knock(port, handshake.pack(hello_for(port, **changes))) as sock:
        assert answer(sock) == b""


@pytest.mark.parametrize("token", [b"a wrong token", b""])
def test_whoever_does_not_know_the_token_is_turned_away(make_ports, token):
    (port,) = make_ports(1)
    packed = handshake.pack(hello_for(port))
    with knock(port, packed) as sock:
        challenge = answer(sock)
        sock.sendall(handshake.prove(handshake.make_key(token, "run"), b"dialler", packed, challenge[:32]))
        assert is_turned_away(sock)
    assert guests_of(port) == 0


def test_the_proof_of_the_listener_is_not_accepted_back(make_ports):
    (port,) = make_ports(1)
    with knock(port, handshake.pack(hello_for(port))) as sock:
        sock.sendall(answer(sock)[32:])
        assert is_turned_away(sock)


def test_a_recorded_conversation_opens_nothing(make_ports):
    (port,) = make_ports(1)
    packed, key = handshake.pack(hello_for(port)), handshake.make_key(TOKEN, "run")
    with knock(port, packed) as sock:
        proof = handshake.prove(key, b"dialler", packed, answer(sock)[:32])
        sock.sendall(proof)
        wait_until(lambda: guests_of(port) == 1)
    wait_until(lambda: guests_of(port) == 0)
    with knock(port, packed) as sock:
        answer(sock)
        sock.sendall(proof)
        assert is_turned_away(sock)
    assert guests_of(port) == 0


def test_a_listener_without_the_token_is_found_out(make_ports):
    (port,) = make_ports(1)
    impostor = Peers(b"a wrong token", "run", "m1", "first", "127.0.0.1")
    world = World(1, (Seat("m0", "first", port.address), Seat("m1", "first", impostor.address)), 0)
    with pytest.raises(ExchangeBroken, match="does not know the token") as broken:
        port.connect(world, 5.0, NEVER)
    assert broken.value.suspects == ("m1",)
    impostor.close()


def test_whoever_says_nothing_is_dropped_in_time(make_ports, monkeypatch):
    monkeypatch.setattr(door_module, "STRANGER_S", 0.2)
    (port,) = make_ports(1)
    with knock(port, handshake.MAGIC[:3]) as sock:
        assert is_turned_away(sock)
    assert not port._door._strangers


def test_a_crowd_of_strangers_does_not_keep_members_out(make_ports):
    ports = make_ports(2)
    crowd = [knock(ports[0], b"s") for _ in range(door_module.STRANGERS_LIMIT + 20)]
    rings = connect_all(ports, world_of(ports))
    assert len(ports[0]._door._strangers) <= door_module.STRANGERS_LIMIT
    for ring in rings:
        ring.close()
    for sock in crowd:
        sock.close()


def test_a_member_that_is_gone_is_suspected_at_once(make_ports):
    ports = make_ports(2)
    world = world_of(ports)
    ports[1].close()
    with pytest.raises(ExchangeBroken) as broken:
        ports[0].connect(world, 60.0, NEVER)
    assert broken.value.suspects == ("m1",)


def test_all_give_a_world_up_when_one_member_of_it_is_gone(make_ports):
    ports = make_ports(4)
    world = world_of(ports)
    ports[2].close()
    suspects = []

    def join(port):
        with pytest.raises(ExchangeBroken) as broken:
            port.connect(world, 60.0, NEVER)
        suspects.extend(broken.value.suspects)

    threads = [threading.Thread(target=join, args=(port,)) for port in (ports[0], ports[1], ports[3])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert "m2" in suspects


def test_a_member_that_does_not_come_is_suspected_after_the_time_allowed(make_ports):
    ports = make_ports(2)
    with pytest.raises(ExchangeBroken, match="did not come") as broken:
        ports[0].connect(world_of(ports), 0.2, NEVER)
    assert broken.value.suspects == ("m1",)


def test_connecting_can_be_cancelled(make_ports):
    ports = make_ports(2)
    cancelled = threading.Event()
    threading.Timer(0.1, cancelled.set).start()
    with pytest.raises(ExchangeBroken) as broken:
        ports[0].connect(world_of(ports), 60.0, cancelled)
    assert broken.value.suspects == ()


def test_a_stopped_listener_is_suspected(make_ports):
    (port,) = make_ports(1)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        where = Address("127.0.0.1", mute.getsockname()[1])
        world = World(1, (Seat("m0", "first", port.address), Seat("m1", "first", where)), 0)
        with pytest.raises(ExchangeBroken, match="did not answer") as broken:
            port.connect(world, 0.3, NEVER)
    assert broken.value.suspects == ("m1",)


def test_a_range_of_ports_is_used_until_none_is_free():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        with pytest.raises(PortsTaken):
            Peers(TOKEN, "run", "m0", "first", "127.0.0.1", range(number, number + 1))


def test_three_hundred_worlds_leak_nothing(make_ports):
    ports = make_ports(2)
    for ring in connect_all(ports, world_of(ports)):
        ring.close()
    before = (len(os.listdir("/proc/self/fd")), threading.active_count())
    for number in range(2, 302):
        rings = connect_all(ports, world_of(ports, number))
        if number % 3 == 0:
            die(rings[0])
        for ring in rings:
            ring.close()
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before


def wait_until(condition, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
