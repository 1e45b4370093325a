"""Connecting to another member at any of its addresses, and authenticating.

A member may have several addresses, and some lead nowhere or to another process. They are tried in turn (happy
eyeballs, RFC 8305): the next one starts as soon as one has failed or has not answered for a moment. The first address
at which the member itself proves its identity wins. Only that connection gets this member's own proof, so the peer sees
exactly one connection, no matter how many were tried.
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
from shoal.worker.transport import handshake
from shoal.worker.transport.address_cache import AddressCache
from shoal.worker.transport.exchange_broken import ExchangeBroken
from shoal.worker.transport.handshake import HandshakeFailed, PeerHello
from shoal.worker.transport.listener import Identity
from shoal.worker.transport.sockets import disown, own, tune

ATTEMPTS = 3
POLL_S = 0.02
STAGGER_S = 0.25
# A busy member may take a while to prove its identity; that alone must not make us prefer a worse address.
PROOF_S = 1.0
# Wait this long for silent addresses once another one has failed: a lost SYN is sent again after 1 s.
SILENT_S = 1.5


class ConnectDeadline:
    """Time limit for waiting on other members; the caller may also cancel the wait."""

    def __init__(self, timeout_s: float, cancelled: threading.Event) -> None:
        self._deadline = time.monotonic() + timeout_s
        self._timeout_s, self._cancelled = timeout_s, cancelled

    def check(self, suspects: tuple[str, ...], what: str) -> None:
        """Raise ExchangeBroken if the wait was cancelled or the time is over; `what` has not happened yet."""
        if self._cancelled.is_set():
            raise ExchangeBroken("this member cancelled the connection")
        if time.monotonic() > self._deadline:
            raise ExchangeBroken(f"{what} within {self._timeout_s:g} s", suspects)


class NoAddressReachable(Exception):  # noqa: N818 - what it holds are the errors
    """No address led to the member; `failures` maps each host to its error."""

    def __init__(self, failures: dict[str, Exception]) -> None:
        super().__init__()
        self.failures = failures


def connect_to_member(
    identity: Identity,
    kind: str,
    world: int,
    seat: Seat,
    deadline: ConnectDeadline,
    user_timeout_ms: int,
    cache: AddressCache,
) -> socket.socket:
    """Return an authenticated connection to the member in this seat; raise ExchangeBroken if it cannot be reached."""
    for attempt in range(1, ATTEMPTS + 1):
        connecting = _PeerConnect(identity, kind, world, seat, deadline)
        try:
            host, sock = connecting.connect(cache.hosts_to_try(seat.address), cache.working_host(seat.address))
        except NoAddressReachable as unreachable:
            cache.forget(seat.address)
            if attempt == ATTEMPTS or _is_final(unreachable.failures):
                raise _unreachable(seat, unreachable.failures) from unreachable
            time.sleep(POLL_S)
        else:
            cache.remember(seat.address, host)
            tune(sock, user_timeout_ms)
            return sock
    raise AssertionError("unreachable")


def _is_final(failures: dict[str, Exception]) -> bool:
    """Return whether the member's process is gone, so that trying again makes no sense."""
    causes = {connect_errors.cause_of(error) for error in failures.values()}
    return "refused" in causes and causes <= {"refused", "no route", "silent"}


def _unreachable(seat: Seat, failures: dict[str, Exception]) -> ExchangeBroken:
    tried = "; ".join(
        f"{addresses.host_port(host, seat.address.port)}: {_in_words(error)}" for host, error in failures.items()
    )
    return ExchangeBroken(f"cannot reach {seat.member} at {tried}", (seat.member,))


def _in_words(error: Exception) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "connection refused: the process is gone, or a firewall rejects it"
    return str(error) if isinstance(error, HandshakeFailed) else connect_errors.describe(error)


@dataclass(slots=True)
class _AddressAttempt:
    """One address that is being tried."""

    host: str
    sock: socket.socket
    hello: bytes
    received: bytearray = field(default_factory=bytearray)
    open: bool = False


class _PeerConnect:
    """One attempt to reach a member at all of its addresses."""

    def __init__(self, identity: Identity, kind: str, world: int, seat: Seat, deadline: ConnectDeadline) -> None:
        self._identity, self._kind, self._world = identity, kind, world
        self._seat, self._deadline = seat, deadline
        self._poll = select.poll()
        self._attempts: dict[int, _AddressAttempt] = {}
        self._failures: dict[str, Exception] = {}
        self._next_at = 0.0

    def connect(self, hosts: tuple[str, ...], known_host: str | None) -> tuple[str, socket.socket]:
        """Return the host at which the member was reached, and the connection.

        `known_host` is known to lead to its machine: if that one refuses, the process is gone, and the other hosts
        are not tried. Raise NoAddressReachable when all hosts failed.
        """
        waiting, began = list(hosts), 0.0
        try:
            while True:
                gone = isinstance(self._failures.get(known_host or ""), ConnectionRefusedError)
                if gone or not (waiting or self._attempts):
                    raise NoAddressReachable(self._failures)
                if waiting and (not self._attempts or time.monotonic() >= self._next_at):
                    began = time.monotonic()
                    self._next_at = began + STAGGER_S
                    self._begin(waiting.pop(0))
                    continue
                events = self._poll.poll(POLL_S * 1000)
                for fd, _ in events:
                    attempt = self._attempts[fd]
                    if self._advance(attempt):
                        del self._attempts[fd]
                        return attempt.host, attempt.sock
                if not events:
                    self._deadline.check((self._seat.member,), self._no_answer(hosts))
                if not waiting and self._failures and time.monotonic() > began + SILENT_S:
                    self._drop_silent()
        finally:
            for attempt in self._attempts.values():
                disown(attempt.sock)

    def _no_answer(self, hosts: tuple[str, ...]) -> str:
        where = ", ".join(addresses.host_port(host, self._seat.address.port) for host in hosts)
        unconnected = not any(attempt.open for attempt in self._attempts.values())
        hint = " (no connection: shoal doctor POOL finds the cause)" if unconnected else ""
        return f"{self._seat.member} did not answer at {where}{hint}"

    def _begin(self, host: str) -> None:
        try:
            hello = handshake.pack(self._hello())
            where = socket.getaddrinfo(host, self._seat.address.port, type=socket.SOCK_STREAM)[0]
            sock = own(socket.socket(where[0], socket.SOCK_STREAM))
        except (OSError, ValueError, OverflowError, HandshakeFailed) as error:  # a host or port that cannot exist
            self._failures[host] = error
            return
        attempt = _AddressAttempt(host, sock, hello)
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
        """Continue one attempt; return whether the member has proven its identity there."""
        try:
            if attempt.open:
                return self._read_challenge(attempt)
            error = attempt.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                raise OSError(error, os.strerror(error))
            attempt.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            attempt.sock.send(attempt.hello)
            attempt.open = True
            self._next_at = time.monotonic() + PROOF_S
            self._poll.modify(attempt.sock, select.POLLIN)
        except (OSError, HandshakeFailed) as error:
            fd = attempt.sock.fileno()
            self._poll.unregister(fd)
            del self._attempts[fd]
            self._drop(attempt, error)
        return False

    def _read_challenge(self, attempt: _AddressAttempt) -> bool:
        data = attempt.sock.recv(handshake.CHALLENGE_BYTES - len(attempt.received))
        if not data:
            raise HandshakeFailed("it rejected this member")
        attempt.received += data
        if len(attempt.received) < handshake.CHALLENGE_BYTES:
            return False
        nonce = bytes(attempt.received[: handshake.NONCE_BYTES])
        proof = bytes(attempt.received[handshake.NONCE_BYTES :])
        key = self._identity.key
        if not handshake.is_same_proof(proof, handshake.prove(key, handshake.LISTENER, attempt.hello, nonce)):
            raise HandshakeFailed("the process that listens there does not know the token")
        attempt.sock.send(handshake.prove(key, handshake.CONNECTOR, attempt.hello, nonce))
        return True

    def _drop_silent(self) -> None:
        """Give up on addresses that have not answered at all, after another one has failed."""
        for fd, attempt in list(self._attempts.items()):
            if not attempt.open:
                self._poll.unregister(fd)
                del self._attempts[fd]
                self._drop(attempt, TimeoutError())

    def _drop(self, attempt: _AddressAttempt, error: Exception) -> None:
        self._next_at = 0.0
        self._failures[attempt.host] = error
        disown(attempt.sock)
