"""The listener of a member: lets in those who prove that they know the run's token, and keeps them until asked for.

One thread serves the listener, the strangers that have not proven themselves yet, and the guests that wait. Strangers
are few, have little time and may say little; when too many stand there, the one that has stood longest has to go.
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

STRANGERS_LIMIT = 64
GUESTS_LIMIT = 512
STRANGER_S = 3.0
GUEST_S = 30.0

log = logging.getLogger("shoal.port")


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a member is, and the key that proves it."""

    key: bytes = field(repr=False)
    run: str
    member: str
    incarnation: str


@dataclass(slots=True)
class _PendingHandshake:
    sock: socket.socket
    until: float
    wanted: int = handshake.PREFIX.size
    heard: bytearray = field(default_factory=bytearray)
    prefix: bytes = b""
    hello: PeerHello | None = None
    expected: bytes = b""


@dataclass(frozen=True, slots=True)
class _IdlePeer:
    sock: socket.socket
    hello: PeerHello
    until: float


class PeerListener:
    """Accepts connections, and hands out those that have proven themselves."""

    def __init__(
        self,
        listener: socket.socket,
        identity: Identity,
        user_timeout_ms: int,
        on_arrival: Callable[[PeerHello], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._listener, self._identity = own(listener), identity
        self._user_timeout_ms, self._on_arrival, self._clock = user_timeout_ms, on_arrival, clock
        self._strangers: dict[int, _PendingHandshake] = {}
        self._guests: dict[tuple[str, int, str], _IdlePeer] = {}
        self._shunned: set[int] = set()
        self._past = -1
        self._closed = False
        self.arrived = threading.Condition()
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._wakeup, select.POLLIN)
        listener.setblocking(False)
        self._poll.register(listener, select.POLLIN)
        self._thread = threading.Thread(target=self._serve, name="shoal-port", daemon=True)
        self._thread.start()

    # --- from any thread

    def take(self, kind: str, world: int, member: str, incarnation: str | None = None) -> socket.socket | None:
        """The connection of this member for this purpose, if it is here; the caller then owns it."""
        with self.arrived:
            guest = self._guests.pop((kind, world, member), None)
            if guest is None:
                return None
            self._release(guest)
        if (incarnation is not None and guest.hello.incarnation != incarnation) or not alive(guest.sock):
            disown(guest.sock)
            return None
        return guest.sock

    def shun(self, world: int, shunned: bool = True) -> None:
        """Turn away whoever comes to the ring of this world, because this member has given it up."""
        with self.arrived:
            if shunned:
                self._shunned.add(world)
                self._dismiss(lambda guest: guest.hello.kind == handshake.RING and guest.hello.world == world)
            else:
                self._shunned.discard(world)

    def forget(self, up_to_world: int) -> None:
        """Turn away whoever waits for, or asks for, a world up to this number."""
        with self.arrived:
            self._past = max(self._past, up_to_world)
            self._shunned = {world for world in self._shunned if world > up_to_world}
            self._dismiss(lambda guest: guest.hello.world <= up_to_world)

    def close(self) -> None:
        """Stop listening and let go of everybody."""
        with self.arrived:
            if self._closed:
                return
            self._closed = True
            os.eventfd_write(self._wakeup, 1)
            self.arrived.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join()

    # --- the door's own thread

    def _serve(self) -> None:
        while not self._closed:
            for fd, _ in self._poll.poll(self._patience_ms()):
                if fd == self._listener.fileno():
                    self._accept()
                elif fd in self._strangers:
                    self._hear(self._strangers[fd])
                elif fd == self._wakeup:
                    os.eventfd_read(fd)
                else:
                    self._see_off(fd)
            self._expire()
        for stranger in list(self._strangers.values()):
            self._drop(stranger, "the port closes")
        with self.arrived:
            self._dismiss(lambda _: True)
            disown(self._listener)
            os.close(self._wakeup)

    def _patience_ms(self) -> float | None:
        with self.arrived:
            ends = [guest.until for guest in self._guests.values()]
        ends += [stranger.until for stranger in self._strangers.values()]
        end = min(ends, default=float("inf"))
        return None if end == float("inf") else max(0.0, end - self._clock()) * 1000 + 1

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            # out of file descriptors, or the peer has gone again: neither may end the door
            log.debug("cannot accept: %s", error)
            if self._strangers:
                self._drop(next(iter(self._strangers.values())), "too many connections")
            return
        own(sock)
        sock.setblocking(False)
        if len(self._strangers) >= STRANGERS_LIMIT:
            self._drop(next(iter(self._strangers.values())), "too many strangers")
        self._strangers[sock.fileno()] = _PendingHandshake(sock, self._clock() + STRANGER_S)
        self._poll.register(sock, select.POLLIN)

    def _hear(self, stranger: _PendingHandshake) -> None:
        try:
            heard = stranger.sock.recv(stranger.wanted - len(stranger.heard))
            if not heard:
                raise HandshakeFailed("hung up")
            stranger.heard += heard
            if len(stranger.heard) == stranger.wanted:
                self._answer(stranger, bytes(stranger.heard))
        except BlockingIOError:
            return
        except (HandshakeFailed, OSError) as error:
            self._drop(stranger, str(error))

    def _answer(self, stranger: _PendingHandshake, heard: bytes) -> None:
        stranger.heard.clear()
        if not stranger.prefix:
            stranger.prefix, stranger.wanted = heard, handshake.body_bytes(heard)
        elif stranger.hello is None:
            stranger.hello = hello = handshake.unpack(heard)
            self._examine(hello)
            key, packed, nonce = self._identity.key, stranger.prefix + heard, secrets.token_bytes(handshake.NONCE_BYTES)
            stranger.sock.send(nonce + handshake.prove(key, b"listener", packed, nonce))
            stranger.expected, stranger.wanted = handshake.prove(key, b"dialler", packed, nonce), handshake.PROOF_BYTES
        elif handshake.same(heard, stranger.expected):
            self._admit(stranger, stranger.hello)
        else:
            raise HandshakeFailed("does not know the token")

    def _examine(self, hello: PeerHello) -> None:
        me = self._identity
        if hello.run != me.run:
            raise HandshakeFailed("belongs to another run")
        if (hello.to_member, hello.to_incarnation) != (me.member, me.incarnation):
            raise HandshakeFailed(f"looks for {hello.to_member}, not for this process")
        if hello.world <= self._past or (hello.kind == handshake.RING and hello.world in self._shunned):
            raise HandshakeFailed(f"comes for world {hello.world}, which is over here")

    def _admit(self, stranger: _PendingHandshake, hello: PeerHello) -> None:
        sock = stranger.sock
        del self._strangers[sock.fileno()]
        tune(sock, self._user_timeout_ms)
        until = self._clock() + GUEST_S if hello.kind == handshake.RING else float("inf")
        key = (hello.kind, hello.world, hello.member)
        with self.arrived:
            self._poll.modify(sock, select.POLLRDHUP)
            self._examine_again(sock, hello)
            if key in self._guests:
                self._dismiss(lambda guest: guest is self._guests[key])
            if len(self._guests) >= GUESTS_LIMIT:
                oldest = next(iter(self._guests.values()))
                self._dismiss(lambda guest: guest is oldest)
            self._guests[key] = _IdlePeer(sock, hello, until)
            self.arrived.notify_all()
        self._on_arrival(hello)

    def _examine_again(self, sock: socket.socket, hello: PeerHello) -> None:
        try:
            self._examine(hello)
        except HandshakeFailed:
            self._poll.unregister(sock)
            disown(sock)
            raise

    def _drop(self, stranger: _PendingHandshake, why: str) -> None:
        log.debug("dropped a connection: %s", why)
        if self._strangers.pop(stranger.sock.fileno(), None) is not None:
            self._poll.unregister(stranger.sock)
            disown(stranger.sock)

    def _see_off(self, fd: int) -> None:
        with self.arrived:
            self._dismiss(lambda guest: guest.sock.fileno() == fd)

    def _expire(self) -> None:
        now = self._clock()
        for stranger in [one for one in self._strangers.values() if one.until <= now]:
            self._drop(stranger, "took too long")
        with self.arrived:
            self._dismiss(lambda guest: guest.until <= now)

    def _dismiss(self, chosen: Callable[[_IdlePeer], bool]) -> None:
        for key, guest in [(key, guest) for key, guest in self._guests.items() if chosen(guest)]:
            del self._guests[key]
            self._release(guest)
            disown(guest.sock)

    def _release(self, guest: _IdlePeer) -> None:
        # the door's thread may be polling it, which would keep a closed connection open
        self._poll.unregister(guest.sock)
        os.eventfd_write(self._wakeup, 1)


def listen(host: str, ports: range | None, everywhere: bool = False) -> socket.socket:
    """A listening socket on the first free port of a range, or on any.

    It is on all interfaces and of both families if that is asked for, and on all of one if the host is not ours.
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
    """Both families on one socket; IPv4 alone where there is no other."""
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
