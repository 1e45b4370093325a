"""Opens a connection to another member and proves the token to it.

A member may have several addresses, some of which lead nowhere or to somebody else. They are tried in turn, the next
one as soon as one has failed or has not answered for a moment, and the first at which the member itself proves who it
is is taken. Only that one gets our own proof, so that the member sees one connection whatever was tried.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import threading
import time
from dataclasses import dataclass, field

from shoal.core import addresses
from shoal.core.world import Seat
from shoal.wire import connect_errors
from shoal.worker.collectives.exchange import ExchangeBroken
from shoal.worker.transport import handshake
from shoal.worker.transport.address_cache import AddressCache
from shoal.worker.transport.handshake import HandshakeFailed, PeerHello
from shoal.worker.transport.listener import Identity
from shoal.worker.transport.sockets import disown, own, tune

TRIES = 3
GLANCE_S = 0.02
STAGGER_S = 0.25
# A member that computes may take its time to prove itself; a worse way must not be taken only because of that.
PROOF_S = 1.0
# Silence is believed after this long, once another address has said something: a lost packet is sent again after 1 s.
SILENT_S = 1.5


class ConnectDeadline:
    """How long to wait for others: until a deadline, or until somebody cancels."""

    def __init__(self, timeout_s: float, cancelled: threading.Event) -> None:
        self._deadline = time.monotonic() + timeout_s
        self._timeout_s, self._cancelled = timeout_s, cancelled

    def check(self, suspects: tuple[str, ...], what: str) -> None:
        """Raise if it makes no sense to wait any longer."""
        if self._cancelled.is_set():
            raise ExchangeBroken("this member gave the connection up")
        if time.monotonic() > self._deadline:
            raise ExchangeBroken(f"{what} within {self._timeout_s:g} s", suspects)


class NoAddressReachable(Exception):  # noqa: N818 - what it holds are the errors
    """No address led to the member; `failures` says how each failed."""

    def __init__(self, failures: dict[str, Exception]) -> None:
        super().__init__()
        self.failures = failures


def dial(
    identity: Identity,
    kind: str,
    world: int,
    seat: Seat,
    patience: ConnectDeadline,
    user_timeout_ms: int,
    ways: AddressCache | None = None,
) -> socket.socket:
    """A connection to the member in this seat, which has proven itself and to which we have; raise ExchangeBroken."""
    ways = ways or AddressCache()
    for attempt in range(1, TRIES + 1):
        call = _PeerConnect(identity, kind, world, seat, patience)
        try:
            host, sock = call.connect(ways.in_order(seat.address), ways.taken(seat.address))
        except NoAddressReachable as none:
            ways.forget(seat.address)
            if attempt == TRIES or _is_final(none.failures):
                raise _unreachable(seat, none.failures) from none
            time.sleep(GLANCE_S)
        else:
            ways.took(seat.address, host)
            tune(sock, user_timeout_ms)
            return sock
    raise AssertionError("unreachable")


def _is_final(failures: dict[str, Exception]) -> bool:
    """Whether nobody listens there any more, so that it makes no sense to try again."""
    causes = {connect_errors.cause_of(error) for error in failures.values()}
    return "refused" in causes and causes <= {"refused", "no route", "silent"}


def _unreachable(seat: Seat, failures: dict[str, Exception]) -> ExchangeBroken:
    tried = "; ".join(
        f"{addresses.host_port(host, seat.address.port)}: {_in_words(error)}" for host, error in failures.items()
    )
    return ExchangeBroken(f"cannot reach {seat.member} at {tried}", (seat.member,))


def _in_words(error: Exception) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "nobody listens there any more, or a firewall rejects it"
    return str(error) if isinstance(error, HandshakeFailed) else connect_errors.in_words(error)


@dataclass(slots=True)
class _AddressAttempt:
    """One address that is being tried."""

    host: str
    sock: socket.socket
    packed: bytes
    heard: bytearray = field(default_factory=bytearray)
    open: bool = False


class _PeerConnect:
    """One try to reach a member at all of its addresses."""

    def __init__(self, identity: Identity, kind: str, world: int, seat: Seat, patience: ConnectDeadline) -> None:
        self._identity, self._kind, self._world = identity, kind, world
        self._seat, self._patience = seat, patience
        self._poll = select.poll()
        self._attempts: dict[int, _AddressAttempt] = {}
        self._failures: dict[str, Exception] = {}
        self._next_at = 0.0

    def connect(self, hosts: tuple[str, ...], sure: str | None) -> tuple[str, socket.socket]:
        """The host that the member was reached at, and the connection.

        `sure` leads to its machine: if that refuses, nobody listens there, and the others need not be tried.
        """
        waiting, began = list(hosts), 0.0
        try:
            while True:
                gone = isinstance(self._failures.get(sure or ""), ConnectionRefusedError)
                if gone or not (waiting or self._attempts):
                    raise NoAddressReachable(self._failures)
                if waiting and (not self._attempts or time.monotonic() >= self._next_at):
                    began = time.monotonic()
                    self._next_at = began + STAGGER_S
                    self._begin(waiting.pop(0))
                    continue
                stirred = self._poll.poll(GLANCE_S * 1000)
                for fd, _ in stirred:
                    attempt = self._attempts[fd]
                    if self._advance(attempt):
                        del self._attempts[fd]
                        return attempt.host, attempt.sock
                if not stirred:
                    self._patience.check((self._seat.member,), self._silence(hosts))
                if not waiting and self._failures and time.monotonic() > began + SILENT_S:
                    self._believe_silence()
        finally:
            for attempt in self._attempts.values():
                disown(attempt.sock)

    def _silence(self, hosts: tuple[str, ...]) -> str:
        where = ", ".join(addresses.host_port(host, self._seat.address.port) for host in hosts)
        unconnected = not any(attempt.open for attempt in self._attempts.values())
        more = " (no connection: shoal doctor POOL finds out why)" if unconnected else ""
        return f"{self._seat.member} did not answer at {where}{more}"

    def _begin(self, host: str) -> None:
        try:
            where = socket.getaddrinfo(host, self._seat.address.port, type=socket.SOCK_STREAM)[0]
            sock = own(socket.socket(where[0], socket.SOCK_STREAM))
        except OSError as error:
            self._failures[host] = error
            return
        attempt = _AddressAttempt(host, sock, handshake.pack(self._hello()))
        self._attempts[sock.fileno()] = attempt
        try:
            sock.setblocking(False)
            sock.connect(where[4])
        except BlockingIOError:
            pass
        except OSError as error:
            self._attempts.pop(sock.fileno())
            self._drop(attempt, error)
            return
        self._poll.register(sock, select.POLLOUT)

    def _hello(self) -> PeerHello:
        return PeerHello(
            kind=self._kind,
            run=self._identity.run,
            world=self._world,
            member=self._identity.member,
            incarnation=self._identity.incarnation,
            to_member=self._seat.member,
            to_incarnation=self._seat.incarnation,
            nonce=secrets.token_bytes(handshake.NONCE_BYTES),
        )

    def _advance(self, attempt: _AddressAttempt) -> bool:
        """Whether the member has proven itself there."""
        try:
            if attempt.open:
                return self._hear(attempt)
            error = attempt.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                raise OSError(error, os.strerror(error))
            attempt.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            attempt.sock.send(attempt.packed)
            attempt.open = True
            self._next_at = time.monotonic() + PROOF_S
            self._poll.modify(attempt.sock, select.POLLIN)
        except (OSError, HandshakeFailed) as error:
            fd = attempt.sock.fileno()
            self._poll.unregister(fd)
            del self._attempts[fd]
            self._drop(attempt, error)
        return False

    def _hear(self, attempt: _AddressAttempt) -> bool:
        heard = attempt.sock.recv(handshake.CHALLENGE_BYTES - len(attempt.heard))
        if not heard:
            raise HandshakeFailed("it turned this member away")
        attempt.heard += heard
        if len(attempt.heard) < handshake.CHALLENGE_BYTES:
            return False
        nonce, proof = bytes(attempt.heard[: handshake.NONCE_BYTES]), bytes(attempt.heard[handshake.NONCE_BYTES :])
        if not handshake.same(proof, handshake.prove(self._identity.key, b"listener", attempt.packed, nonce)):
            raise HandshakeFailed("whoever listens there does not know the token")
        attempt.sock.send(handshake.prove(self._identity.key, b"dialler", attempt.packed, nonce))
        return True

    def _believe_silence(self) -> None:
        """Give up on addresses that have said nothing at all, since others have."""
        for fd, attempt in list(self._attempts.items()):
            if not attempt.open:
                self._poll.unregister(fd)
                del self._attempts[fd]
                self._drop(attempt, TimeoutError())

    def _drop(self, attempt: _AddressAttempt, error: Exception) -> None:
        self._next_at = 0.0
        self._failures[attempt.host] = error
        disown(attempt.sock)
