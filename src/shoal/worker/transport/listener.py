"""The listening socket of a member: authenticates connections and keeps them until they are claimed.

One thread serves the listening socket, connections in mid-handshake, and authenticated connections that were not
claimed yet. Unauthenticated connections are few, short-lived and may send little; when there are too many, the oldest
is closed. All methods of `PeerListener` may be called from any thread; `arrived` is the condition, and the lock, that
guards the idle peers and the refused worlds.

Anybody who can reach the port may send anything. Whatever one connection makes go wrong costs that connection, never
the thread. If the thread fails all the same, it closes the port and calls `on_failure`: a member whose port is dead
would train on until the next change of the world, and then keep every peer waiting for it.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from shoal.errors import PortsTaken
from shoal.worker.transport import handshake
from shoal.worker.transport.handshake import HandshakeFailed, PeerHello
from shoal.worker.transport.sockets import alive, disown, own, tune

MAX_PENDING = 64
MAX_IDLE = 512
HANDSHAKE_TIMEOUT_S = 3.0
OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
IDLE_TIMEOUT_S = 30.0
# How long to leave new connections in the backlog when there is no file descriptor for them.
ACCEPT_PAUSE_S = 0.1

log = logging.getLogger("shoal.peers")


@dataclass(frozen=True, slots=True)
class Identity:
    """Name of a member, and the key that proves it."""

    key: bytes = field(repr=False)
    run: str
    member: str
    incarnation: str


@dataclass(slots=True)
class _PendingHandshake:
    """A connection that is not authenticated yet; `wanted` is the length of the part that is being received."""

    sock: socket.socket
    until: float
    wanted: int = handshake.PREFIX.size
    received: bytearray = field(default_factory=bytearray)
    prefix: bytes = b""
    hello: PeerHello | None = None
    expected_proof: bytes = b""


@dataclass(frozen=True, slots=True)
class _IdlePeer:
    """An authenticated connection that was not claimed yet."""

    sock: socket.socket
    hello: PeerHello
    until: float


class PeerListener:
    """Accepts and authenticates connections, and hands them out by (kind, world, member).

    `on_arrival(hello)` is called from the listener's thread for every authenticated connection, `on_failure(error)` if
    the thread ends because of an error.
    """

    def __init__(
        self,
        listener: socket.socket,
        identity: Identity,
        user_timeout_ms: int,
        on_arrival: Callable[[PeerHello], object],
        on_failure: Callable[[Exception], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._listener, self._identity = own(listener), identity
        self._user_timeout_ms, self._clock = user_timeout_ms, clock
        self._on_arrival, self._on_failure = on_arrival, on_failure
        self._pending: dict[int, _PendingHandshake] = {}
        self._idle: dict[tuple[str, int, str], _IdlePeer] = {}
        self._refused_worlds: set[int] = set()
        self._ended_up_to = -1
        self._closed = False
        self._accept_again_at: float | None = None
        self.arrived = threading.Condition()
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._wakeup, select.POLLIN)
        listener.setblocking(False)
        self._poll.register(listener, select.POLLIN)
        self._thread = threading.Thread(target=self._serve, name="shoal-listener", daemon=True)
        self._thread.start()

    # --- from any thread

    def take(self, kind: str, world: int, member: str, incarnation: str | None = None) -> socket.socket | None:
        """Return the idle connection of this member for this purpose, or None; the caller then owns it."""
        with self.arrived:
            peer = self._idle.pop((kind, world, member), None)
            if peer is None:
                return None
            self._stop_polling(peer)
        if (incarnation is not None and peer.hello.incarnation != incarnation) or not alive(peer.sock):
            disown(peer.sock)
            return None
        return peer.sock

    def accept_world(self, world: int) -> None:
        """Accept ring connections of this world again."""
        with self.arrived:
            self._refused_worlds.discard(world)

    def refuse_world(self, world: int) -> None:
        """Close and refuse ring connections of this world, because this member gave it up."""
        with self.arrived:
            self._refused_worlds.add(world)
            self._close_idle(lambda peer: peer.hello.kind == handshake.RING and peer.hello.world == world)

    def end_worlds(self, up_to: int) -> None:
        """Close and refuse all connections of worlds up to this number."""
        with self.arrived:
            self._ended_up_to = max(self._ended_up_to, up_to)
            self._refused_worlds = {world for world in self._refused_worlds if world > up_to}
            self._close_idle(lambda peer: peer.hello.world <= up_to)

    def close(self) -> None:
        """Stop listening and close every connection that was not claimed."""
        with self.arrived:
            if self._closed:
                return
            self._closed = True
            os.eventfd_write(self._wakeup, 1)
            self.arrived.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join()

    # --- in the listener's own thread

    def _serve(self) -> None:
        try:
            while not self._closed:
                self._serve_once()
        except Exception as error:
            log.exception("the port for peers failed")
            self._close_all()
            self._on_failure(error)
        else:
            self._close_all()

    def _serve_once(self) -> None:
        for fd, _ in self._poll.poll(self._poll_timeout_ms()):
            if fd == self._listener.fileno():
                self._accept()
            elif fd in self._pending:
                self._receive(self._pending[fd])
            elif fd == self._wakeup:
                os.eventfd_read(fd)
            else:
                self._close_idle_fd(fd)
        self._expire()

    def _close_all(self) -> None:
        for pending in list(self._pending.values()):
            self._drop(pending, "the listener closes")
        with self.arrived:
            self._closed = True
            self._close_idle(lambda _: True)
            disown(self._listener)
            os.close(self._wakeup)
            self.arrived.notify_all()

    def _poll_timeout_ms(self) -> float | None:
        with self.arrived:
            deadlines = [peer.until for peer in self._idle.values()]
        deadlines += [pending.until for pending in self._pending.values()]
        if self._accept_again_at is not None:
            deadlines.append(self._accept_again_at)
        first = min(deadlines, default=float("inf"))
        return None if first == float("inf") else max(0.0, first - self._clock()) * 1000 + 1

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            # Out of file descriptors, or the peer is gone again: neither may end the listener, nor keep it busy.
            log.debug("cannot accept: %s", error)
            if self._pending:
                self._drop(next(iter(self._pending.values())), "too many connections")
            elif error.errno in OUT_OF_RESOURCES:
                self._poll.unregister(self._listener)
                self._accept_again_at = self._clock() + ACCEPT_PAUSE_S
            return
        own(sock)
        sock.setblocking(False)
        if len(self._pending) >= MAX_PENDING:
            self._drop(next(iter(self._pending.values())), "too many unauthenticated connections")
        self._pending[sock.fileno()] = _PendingHandshake(sock, self._clock() + HANDSHAKE_TIMEOUT_S)
        self._poll.register(sock, select.POLLIN)

    def _receive(self, pending: _PendingHandshake) -> None:
        try:
            data = pending.sock.recv(pending.wanted - len(pending.received))
            if not data:
                raise HandshakeFailed("closed during the handshake")
            pending.received += data
            if len(pending.received) == pending.wanted:
                self._advance(pending, bytes(pending.received))
        except BlockingIOError:
            return
        except (HandshakeFailed, OSError) as error:
            self._drop(pending, str(error))
        except Exception as error:  # noqa: BLE001 - nothing that a stranger sends may end this thread
            log.warning("dropped a connection of a peer: %s: %s", type(error).__name__, error)
            self._drop(pending, str(error))

    def _advance(self, pending: _PendingHandshake, data: bytes) -> None:
        """Handle the next complete part of a handshake: prefix, hello or proof."""
        pending.received.clear()
        if not pending.prefix:
            pending.prefix, pending.wanted = data, handshake.hello_bytes(data)
        elif pending.hello is None:
            pending.hello = hello = handshake.unpack(data)
            self._check_hello(hello)
            key, packed, nonce = self._identity.key, pending.prefix + data, secrets.token_bytes(handshake.NONCE_BYTES)
            pending.sock.send(nonce + handshake.prove(key, handshake.LISTENER, packed, nonce))
            pending.expected_proof = handshake.prove(key, handshake.CONNECTOR, packed, nonce)
            pending.wanted = handshake.PROOF_BYTES
        elif handshake.is_same_proof(data, pending.expected_proof):
            self._admit(pending, pending.hello)
        else:
            raise HandshakeFailed("wrong token")

    def _check_hello(self, hello: PeerHello) -> None:
        """Raise HandshakeFailed if a hello is not for this process, or for a world that has ended."""
        own_identity = self._identity
        if hello.run != own_identity.run:
            raise HandshakeFailed(f"connection is for run {hello.run}, not {own_identity.run}")
        if (hello.to_member, hello.to_incarnation) != (own_identity.member, own_identity.incarnation):
            raise HandshakeFailed(f"connection is for {hello.to_member}, not for this process")
        if hello.world <= self._ended_up_to or (hello.kind == handshake.RING and hello.world in self._refused_worlds):
            raise HandshakeFailed(f"connection is for world {hello.world}, which has ended")

    def _admit(self, pending: _PendingHandshake, hello: PeerHello) -> None:
        sock = pending.sock
        tune(sock, self._user_timeout_ms)
        until = self._clock() + IDLE_TIMEOUT_S if hello.kind == handshake.RING else float("inf")
        key = (hello.kind, hello.world, hello.member)
        with self.arrived:
            self._check_hello(hello)  # again, under the lock: its world may have ended during the handshake
            del self._pending[sock.fileno()]
            self._poll.modify(sock, select.POLLRDHUP)
            if key in self._idle:
                self._close_idle(lambda peer: peer is self._idle[key])
            if len(self._idle) >= MAX_IDLE:
                oldest = next(iter(self._idle.values()))
                self._close_idle(lambda peer: peer is oldest)
            self._idle[key] = _IdlePeer(sock, hello, until)
            self.arrived.notify_all()
        self._on_arrival(hello)

    def _drop(self, pending: _PendingHandshake, why: str) -> None:
        log.debug("dropped a connection: %s", why)
        if self._pending.pop(pending.sock.fileno(), None) is not None:
            self._poll.unregister(pending.sock)
            disown(pending.sock)

    def _close_idle_fd(self, fd: int) -> None:
        with self.arrived:
            self._close_idle(lambda peer: peer.sock.fileno() == fd)

    def _expire(self) -> None:
        now = self._clock()
        if self._accept_again_at is not None and self._accept_again_at <= now:
            self._accept_again_at = None
            self._poll.register(self._listener, select.POLLIN)
        for pending in [pending for pending in self._pending.values() if pending.until <= now]:
            self._drop(pending, "handshake timed out")
        with self.arrived:
            self._close_idle(lambda peer: peer.until <= now)

    def _close_idle(self, chosen: Callable[[_IdlePeer], bool]) -> None:
        for key, peer in [(key, peer) for key, peer in self._idle.items() if chosen(peer)]:
            del self._idle[key]
            self._stop_polling(peer)
            disown(peer.sock)

    def _stop_polling(self, peer: _IdlePeer) -> None:
        # The listener's thread may be polling the socket, which would keep a closed connection open: wake it.
        self._poll.unregister(peer.sock)
        os.eventfd_write(self._wakeup, 1)


def listen(host: str, ports: range | None, everywhere: bool = False) -> socket.socket:
    """Return a listening socket on the first free port of a range, or on any port; raise PortsTaken if none is free.

    With `everywhere` it listens on all interfaces, IPv4 and IPv6; otherwise on `host`, or on all interfaces of its
    family if `host` is not an address of this machine.
    """
    busy: OSError | None = None
    for port in ports if ports is not None else (0,):
        try:
            return _bind_everywhere(port) if everywhere else _bind(host, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            busy = error
    raise PortsTaken(
        f"no free port for the members of a run on {host}",
        why=f"all of {min(ports)}-{max(ports)} are taken" if ports else str(busy or "the range of ports is empty"),
        do="give a larger range with --set ports=FIRST-LAST, or none",
    )


def _bind_everywhere(port: int) -> socket.socket:
    """Bind one socket to both families; to IPv4 alone on a machine without IPv6."""
    try:
        sock = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
    except OSError:
        return _bind("0.0.0.0", port)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind(("::", port))
        sock.listen(128)
    except OSError as error:
        sock.close()
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        return _bind("0.0.0.0", port)
    return sock


def _bind(host: str, port: int) -> socket.socket:
    family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(where)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            sock.bind(("", port))
        sock.listen(128)
    except OSError:
        sock.close()
        raise
    return sock
