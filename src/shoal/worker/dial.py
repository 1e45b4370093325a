"""Opens a connection to another member and proves the token to it."""

from __future__ import annotations

import os
import secrets
import select
import socket
import threading
import time
from typing import Any

from shoal.core.world import Seat
from shoal.worker import handshake
from shoal.worker.door import Identity
from shoal.worker.exchange import ExchangeBroken
from shoal.worker.handshake import Hello, Refused
from shoal.worker.sockets import disown, own, tune

TRIES = 3
GLANCE_S = 0.02


class Patience:
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


def dial(
    identity: Identity, kind: str, world: int, seat: Seat, patience: Patience, user_timeout_ms: int
) -> socket.socket:
    """A connection to the member in this seat, which has proven itself and to which we have; raise ExchangeBroken."""
    for attempt in range(1, TRIES + 1):
        try:
            return _dial_once(identity, kind, world, seat, patience, user_timeout_ms)
        except ConnectionRefusedError as error:
            raise _unreachable(seat, "nobody listens there any more") from error
        except (OSError, Refused) as error:
            if attempt == TRIES:
                raise _unreachable(seat, str(error)) from error
            time.sleep(GLANCE_S)
    raise AssertionError("unreachable")


def _unreachable(seat: Seat, why: str) -> ExchangeBroken:
    where = f"{seat.address.host}:{seat.address.port}"
    return ExchangeBroken(f"cannot reach {seat.member} at {where}: {why}", (seat.member,))


def _dial_once(
    identity: Identity, kind: str, world: int, seat: Seat, patience: Patience, user_timeout_ms: int
) -> socket.socket:
    address = seat.address
    family, _, _, _, where = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
    sock = own(socket.socket(family, socket.SOCK_STREAM))
    try:
        sock.setblocking(False)
        _open(sock, where, seat, patience)
        tune(sock, user_timeout_ms)
        _introduce(sock, identity, kind, world, seat, patience)
    except BaseException:
        disown(sock)
        raise
    return sock


def _open(sock: socket.socket, where: tuple[Any, ...], seat: Seat, patience: Patience) -> None:
    try:
        sock.connect(where)
    except BlockingIOError:
        _await(sock, select.POLLOUT, seat, patience)
    error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if error:
        raise OSError(error, os.strerror(error))


def _introduce(sock: socket.socket, identity: Identity, kind: str, world: int, seat: Seat, patience: Patience) -> None:
    hello = Hello(
        kind=kind,
        run=identity.run,
        world=world,
        member=identity.member,
        incarnation=identity.incarnation,
        to_member=seat.member,
        to_incarnation=seat.incarnation,
        nonce=secrets.token_bytes(handshake.NONCE_BYTES),
    )
    packed = handshake.pack(hello)
    sock.send(packed)
    challenge = bytearray()
    while len(challenge) < handshake.CHALLENGE_BYTES:
        _await(sock, select.POLLIN, seat, patience)
        heard = sock.recv(handshake.CHALLENGE_BYTES - len(challenge))
        if not heard:
            raise Refused("it turned this member away")
        challenge += heard
    nonce, proof = bytes(challenge[: handshake.NONCE_BYTES]), bytes(challenge[handshake.NONCE_BYTES :])
    if not handshake.same(proof, handshake.prove(identity.key, b"listener", packed, nonce)):
        raise Refused("whoever listens there does not know the token")
    sock.send(handshake.prove(identity.key, b"dialler", packed, nonce))


def _await(sock: socket.socket, events: int, seat: Seat, patience: Patience) -> None:
    poll = select.poll()
    poll.register(sock, events)
    while not poll.poll(GLANCE_S * 1000):
        patience.check((seat.member,), f"{seat.member} did not answer")
