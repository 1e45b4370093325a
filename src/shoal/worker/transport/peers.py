"""A member's connections to its peers: one listening port, outgoing connections, and the transfer of state."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from shoal.core.world import Address, Seat, World
from shoal.errors import PeerPortFailed
from shoal.worker.transport import state_transfer
from shoal.worker.transport.address_cache import AddressCache
from shoal.worker.transport.connect import ConnectDeadline, connect_to_member
from shoal.worker.transport.handshake import STATE, PeerHello, make_key
from shoal.worker.transport.listener import Identity, PeerListener, listen
from shoal.worker.transport.sockets import disown, shut
from shoal.worker.transport.state_transfer import ReceivedState, SnapshotLike

HANG_TIMEOUT_S = 30.0

log = logging.getLogger("shoal.peers")


@dataclass(frozen=True, slots=True)
class _StateOffer:
    snapshot: SnapshotLike
    readers: frozenset[str]


class Peers:
    """The listening port of a member, its outgoing connections, and the states it offers to joiners.

    `address` is where peers reach it. `local_host` is its own address on the way to its neighbour in the latest ring.
    `on_failure` is called, from another thread, if the port stops working: its owner must not go on without it.
    """

    def __init__(
        self,
        token: bytes,
        run: str,
        member: str,
        incarnation: str,
        host: str,
        ports: range | None = None,
        user_timeout_ms: int = 5000,
        others: Sequence[str] = (),
        on_failure: Callable[[PeerPortFailed], object] = lambda _error: None,
    ) -> None:
        self._identity = Identity(make_key(token, run), run, member, incarnation)
        self._user_timeout_ms = user_timeout_ms
        self._lock = threading.Lock()
        self._offers: dict[int, _StateOffer] = {}
        self._transfers: dict[socket.socket, tuple[int, threading.Thread]] = {}
        self._closed = False
        self._on_failure = on_failure
        self._handlers: dict[str, Callable[[PeerHello, socket.socket], object]] = {}
        listener = listen(host, ports, everywhere=bool(others))
        self.member = member
        self.address = Address(host, listener.getsockname()[1], tuple(others))
        self.local_host = host
        self._cache = AddressCache()
        self.listener = PeerListener(
            listener, self._identity, user_timeout_ms, self._on_arrival, self._on_listener_failed
        )

    def connect(
        self, kind: str, number: int, seat: Seat, timeout_s: float, cancelled: threading.Event
    ) -> socket.socket:
        """Open a connection of this kind to the member in a seat; the caller then owns it.

        `number` is the number of the world or placement that it belongs to. Raise ExchangeBroken if the member cannot
        be reached in time.
        """
        deadline = ConnectDeadline(timeout_s, cancelled)
        sock = connect_to_member(self._identity, kind, number, seat, deadline, self._user_timeout_ms, self._cache)
        sock.setblocking(True)
        return sock

    def serve(self, kind: str, handler: Callable[[PeerHello, socket.socket], object]) -> None:
        """Pass every new connection of this kind to `handler`, in a thread of its own; the handler then owns it."""
        self._handlers[kind] = handler

    def offer_state(self, world: int, snapshot: SnapshotLike, readers: Collection[str]) -> None:
        """Send this snapshot to these members in the background, to each one when it asks."""
        with self._lock:
            self._offers[world] = _StateOffer(snapshot, frozenset(readers))
        for reader in readers:
            self._start_transfer(world, reader)

    def fetch_state(
        self,
        world: World,
        source_rank: int,
        timeout_s: float,
        cancelled: threading.Event,
        begin_s: float | None = None,
    ) -> ReceivedState:
        """Receive the state from a source as soon as it offers it; `timeout_s` bounds each wait without progress.

        `begin_s`, if given, bounds the wait for the offer, which a source makes between two steps.
        """
        seat = world.seats[source_rank]
        sock = self.connect(STATE, world.number, seat, timeout_s, cancelled)
        try:
            return state_transfer.receive(sock, seat.member, timeout_s, cancelled, begin_s)
        finally:
            disown(sock)

    def end_worlds(self, up_to: int) -> None:
        """Withdraw the offers of worlds up to this number, and close their connections."""
        with self._lock:
            self._offers = {world: offer for world, offer in self._offers.items() if world > up_to}
            for sock, (world, _) in self._transfers.items():
                if world <= up_to:
                    shut(sock)
        self.listener.end_worlds(up_to)

    def close(self) -> None:
        """Stop listening and end every transfer; a ring is closed by its owner."""
        with self._lock:
            self._closed = True
            self._offers.clear()
            transfers = list(self._transfers.items())
            for sock, _ in transfers:
                shut(sock)
        self.listener.close()
        for _, (_, thread) in transfers:
            thread.join()

    def _on_listener_failed(self, error: Exception) -> None:
        self._on_failure(
            PeerPortFailed(
                f"the port for peers, {self.address.port}, stopped working",
                why=f"{type(error).__name__}: {error}",
                do="read this member's log; it is started again if the run's restart limits allow it",
                where=self.member,
            )
        )

    def _on_arrival(self, hello: PeerHello) -> None:
        if hello.kind == STATE:
            self._start_transfer(hello.world, hello.member)
        elif (handler := self._handlers.get(hello.kind)) is not None:
            sock = self.listener.take(hello.kind, hello.world, hello.member)
            if sock is not None:
                sock.setblocking(True)
                threading.Thread(target=handler, args=(hello, sock), name=f"shoal-{hello.kind}", daemon=True).start()

    def _start_transfer(self, world: int, reader: str) -> None:
        """Start sending an offered state, if it is offered to this reader and the reader is connected."""
        with self._lock:
            offer = self._offers.get(world)
            if offer is None or reader not in offer.readers or self._closed:
                return
            sock = self.listener.take(STATE, world, reader)
            if sock is None:
                return
            work = (sock, offer.snapshot, reader)
            thread = threading.Thread(target=self._send_state, args=work, name="shoal-state", daemon=True)
            self._transfers[sock] = (world, thread)
            thread.start()

    def _send_state(self, sock: socket.socket, snapshot: SnapshotLike, reader: str) -> None:
        try:
            state_transfer.send(sock, snapshot, reader, HANG_TIMEOUT_S)
        except (OSError, LookupError) as error:
            log.info("could not send the state of step %d to %s: %s", snapshot.step, reader, error)
        finally:
            with self._lock:
                del self._transfers[sock]
                disown(sock)
