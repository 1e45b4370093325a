"""The listener against strangers: garbage, silence and floods cost a connection, never the port."""

from __future__ import annotations

import resource
import socket
from collections.abc import Callable, Iterator

import pytest

from shoal.testing.wait import until
from shoal.worker.transport import handshake
from shoal.worker.transport import listener as listener_module
from shoal.worker.transport.handshake import PeerHello
from shoal.worker.transport.listener import Identity, PeerListener, listen

KEY = handshake.make_key(b"token", "run")
NOT_UTF8 = handshake.PREFIX.pack(handshake.MAGIC, 10) + b"\x98\xa8" + b"\xff" * 8
"""Eighteen bytes of a stranger that once ended the thread of the port."""


class Port:
    """A listener on loopback, and what it reported."""

    def __init__(self, on_arrival: Callable[[PeerHello], object] | None = None) -> None:
        self.arrived: list[PeerHello] = []
        self.failures: list[Exception] = []
        self.now = 0.0
        self.socket = listen("127.0.0.1", None)
        self.address = self.socket.getsockname()
        identity = Identity(KEY, "run", "m0", "first")
        on_arrival = on_arrival or self.arrived.append
        self.listener = PeerListener(
            self.socket, identity, 5000, on_arrival, self.failures.append, clock=lambda: self.now
        )

    def send(self, data: bytes) -> socket.socket:
        sock = socket.create_connection(self.address, timeout=30)
        sock.sendall(data)
        return sock

    def join(self, world: int = 1, member: str = "m1") -> socket.socket:
        """Return a connection that has proven itself."""
        hello = PeerHello(handshake.RING, "run", world, member, "first", "m0", "first", b"n" * 32)
        packed = handshake.pack(hello)
        sock = self.send(packed)
        challenge = sock.recv(handshake.CHALLENGE_BYTES, socket.MSG_WAITALL)
        sock.sendall(handshake.prove(KEY, handshake.CONNECTOR, packed, challenge[: handshake.NONCE_BYTES]))
        return sock

    def claim(self, world: int = 1, member: str = "m1") -> socket.socket:
        return until(lambda: self.listener.take(handshake.RING, world, member), "the connection of a member")


@pytest.fixture
def port() -> Iterator[Port]:
    made = Port()
    yield made
    made.listener.close()
    assert not made.failures


def is_closed(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize("garbage", [NOT_UTF8, b"GET / HTTP/1.1\r\n\r\n", handshake.PREFIX.pack(handshake.MAGIC, 0)])
def test_member_is_let_in_after_garbage(port: Port, garbage: bytes) -> None:
    with port.send(garbage) as sock:
        assert is_closed(sock)
    with port.join(), port.claim() as claimed:
        assert claimed.getpeername()[0] == "127.0.0.1"


def test_unforeseen_error_of_one_connection_does_not_end_the_port() -> None:
    def fail(_hello: PeerHello) -> None:
        raise ZeroDivisionError

    port = Port(fail)
    with port.join(member="m1"), port.claim(member="m1"), port.join(member="m2"), port.claim(member="m2"):
        assert not port.failures
    port.listener.close()


def test_failed_port_closes_and_reports_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    port = Port()
    monkeypatch.setattr(port.listener, "_accept", lambda: 1 / 0)
    sock = socket.create_connection(port.address)
    until(lambda: port.failures, "the listener to report its failure")
    assert isinstance(port.failures[0], ZeroDivisionError)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(port.address)
    sock.close()
    port.listener.close()


def test_silent_connection_is_closed_at_its_deadline(port: Port) -> None:
    with port.send(b"") as silent:
        until(lambda: port.listener._pending, "the connection to be accepted")
        port.now = listener_module.HANDSHAKE_TIMEOUT_S + 0.1
        with port.join(), port.claim():  # also wakes the listener, whose clock stood still
            assert is_closed(silent)


def test_oldest_of_too_many_silent_connections_is_closed(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_module, "MAX_PENDING", 4)
    crowd = [port.send(b"") for _ in range(6)]
    assert is_closed(crowd[0])
    with port.join(), port.claim():
        assert len(port.listener._pending) <= 4
    for sock in crowd:
        sock.close()


def test_port_without_file_descriptors_waits_instead_of_spinning(port: Port) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    sock = socket.socket()
    highest = max(sock.fileno(), port.socket.fileno()) + 1
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest, hard))
        taken = []
        try:
            while True:
                taken.append(socket.socket())
        except OSError:
            sock.connect(port.address)
        until(lambda: port.listener._accept_again_at, "the listener to pause")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for used in taken:
            used.close()
    port.now += 1.0
    with sock, port.join(), port.claim():
        assert port.listener._accept_again_at is None


def test_connections_of_ended_and_refused_worlds_are_closed(port: Port) -> None:
    port.listener.end_worlds(3)
    port.listener.refuse_world(5)
    for world in (3, 5):
        with pytest.raises((ConnectionError, AssertionError)), port.join(world) as sock:
            assert not is_closed(sock)
    with port.join(4), port.claim(4):
        pass
    port.listener.accept_world(5)
    with port.join(5), port.claim(5):
        pass
