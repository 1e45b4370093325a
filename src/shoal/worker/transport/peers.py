"""The port of a member: one listener, through which rings are connected and the state is handed over."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from shoal.core.world import Address, Seat, World
from shoal.worker.collectives.exchange import ExchangeBroken, OnBreak
from shoal.worker.collectives.ring import Ring
from shoal.worker.transport import state_transfer
from shoal.worker.transport.address_cache import AddressCache
from shoal.worker.transport.connect import GLANCE_S, ConnectDeadline, dial
from shoal.worker.transport.handshake import RING, STATE, PeerHello, make_key
from shoal.worker.transport.listener import Identity, PeerListener, listen
from shoal.worker.transport.sockets import alive, disown, shut
from shoal.worker.transport.state_transfer import ReceivedState, SnapshotLike

STALL_S = 30.0

log = logging.getLogger("shoal.port")


@dataclass(frozen=True, slots=True)
class _StateOffer:
    snapshot: SnapshotLike
    readers: frozenset[str]


class Peers:
    """Where the peers of a member reach it, and from where it reaches them.

    `seen_as` is its own address on the way to its neighbour in the latest ring.
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
    ) -> None:
        self._identity = Identity(make_key(token, run), run, member, incarnation)
        self._user_timeout_ms = user_timeout_ms
        self._lock = threading.Lock()
        self._offers: dict[int, _StateOffer] = {}
        self._deliveries: dict[socket.socket, tuple[int, threading.Thread]] = {}
        self._closed = False
        self._served: dict[str, Callable[[PeerHello, socket.socket], object]] = {}
        listener = listen(host, ports, everywhere=bool(others))
        self.address = Address(host, listener.getsockname()[1], tuple(others))
        self.seen_as = host
        self._ways = AddressCache()
        self._door = PeerListener(listener, self._identity, user_timeout_ms, self._on_arrival)

    def connect(
        self, world: World, timeout_s: float, cancelled: threading.Event, on_break: OnBreak | None = None
    ) -> Ring:
        """Join the ring of a world; return when all of its members have."""
        rank = world.rank_of(self._identity.member)
        if rank is None:
            raise ValueError(f"{self._identity.member} has no seat in world {world.number}")
        members = [seat.member for seat in world.seats]
        if world.size == 1:
            return Ring(0, members)
        patience = ConnectDeadline(timeout_s, cancelled)
        self._door.shun(world.number, shunned=False)
        try:
            ring = Ring(rank, members, *self._meet(world, rank, patience), on_break)
            self._assemble(ring, patience)
        except ExchangeBroken:
            # those who wait for us must see at once that we have given up
            self._door.shun(world.number)
            raise
        return ring

    def offer(self, world: int, snapshot: SnapshotLike, readers: Collection[str]) -> None:
        """Hand this snapshot to these members in the background, to each when it asks."""
        with self._lock:
            self._offers[world] = _StateOffer(snapshot, frozenset(readers))
        for reader in readers:
            self._deliver(world, reader)

    def withdraw(self, up_to_world: int) -> None:
        """Drop the offers and requests of worlds up to this number."""
        with self._lock:
            self._offers = {world: offer for world, offer in self._offers.items() if world > up_to_world}
            over = [sock for sock, (world, _) in self._deliveries.items() if world <= up_to_world]
            for sock in over:
                shut(sock)
        self._door.forget(up_to_world)

    def fetch(self, world: World, source_rank: int, timeout_s: float, cancelled: threading.Event) -> ReceivedState:
        """Receive the state from a source, as soon as that offers it; `timeout_s` bounds each wait without progress."""
        seat = world.seats[source_rank]
        patience = ConnectDeadline(timeout_s, cancelled)
        sock = self._dial(STATE, world.number, seat, patience)
        try:
            return state_transfer.receive(sock, seat.member, timeout_s, cancelled)
        finally:
            disown(sock)

    def serve(self, kind: str, serve: Callable[[PeerHello, socket.socket], object]) -> None:
        """From now on hand every connection of this kind to `serve`, in a thread of its own; it then owns it."""
        self._served[kind] = serve

    def call(self, kind: str, number: int, seat: Seat, timeout_s: float, cancelled: threading.Event) -> socket.socket:
        """Open a connection of this kind to a member; the caller then owns it."""
        patience = ConnectDeadline(timeout_s, cancelled)
        sock = self._dial(kind, number, seat, patience)
        sock.setblocking(True)
        return sock

    def close(self) -> None:
        """Stop listening; end every hand-over. Rings live on: each is closed by its owner."""
        with self._lock:
            self._closed = True
            self._offers.clear()
            deliveries = list(self._deliveries.items())
            for sock, _ in deliveries:
                shut(sock)
        self._door.close()
        for _, (_, thread) in deliveries:
            thread.join()

    def _dial(self, kind: str, number: int, seat: Seat, patience: ConnectDeadline) -> socket.socket:
        return dial(self._identity, kind, number, seat, patience, self._user_timeout_ms, self._ways)

    # --- the ring

    def _meet(self, world: World, rank: int, patience: ConnectDeadline) -> tuple[socket.socket, socket.socket]:
        next_, previous = world.seats[(rank + 1) % world.size], world.seats[rank - 1]
        following = self._dial(RING, world.number, next_, patience)
        self.seen_as = str(following.getsockname()[0])
        try:
            with self._door.arrived:
                while not (sock := self._door.take(RING, world.number, previous.member, previous.incarnation)):
                    patience.check((previous.member,), f"{previous.member} did not come to world {world.number}")
                    if not alive(following):
                        raise ExchangeBroken(f"{next_.member} gave world {world.number} up", (next_.member,))
                    self._door.arrived.wait(GLANCE_S)
        except ExchangeBroken:
            disown(following)
            raise
        return following, sock

    def _assemble(self, ring: Ring, patience: ConnectDeadline) -> None:
        ticket = ring.gather(np.zeros(1))
        try:
            while not ticket.done(GLANCE_S):
                patience.check((), "not all members came to the ring")
            ticket.wait()
        except ExchangeBroken:
            ring.close()
            raise

    # --- the state

    def _on_arrival(self, hello: PeerHello) -> None:
        if hello.kind == STATE:
            self._deliver(hello.world, hello.member)
        elif (serve := self._served.get(hello.kind)) is not None:
            sock = self._door.take(hello.kind, hello.world, hello.member)
            if sock is not None:
                sock.setblocking(True)
                threading.Thread(target=serve, args=(hello, sock), name=f"shoal-{hello.kind}", daemon=True).start()

    def _deliver(self, world: int, reader: str) -> None:
        with self._lock:
            offer = self._offers.get(world)
            if offer is None or reader not in offer.readers or self._closed:
                return
            sock = self._door.take(STATE, world, reader)
            if sock is None:
                return
            thread = threading.Thread(
                target=self._hand_over, args=(sock, offer.snapshot, reader), name="shoal-handover", daemon=True
            )
            self._deliveries[sock] = (world, thread)
            thread.start()

    def _hand_over(self, sock: socket.socket, snapshot: SnapshotLike, reader: str) -> None:
        try:
            state_transfer.send(sock, snapshot, reader, STALL_S)
        except (OSError, LookupError) as error:
            log.info("could not hand the state of step %d to %s: %s", snapshot.step, reader, error)
        finally:
            with self._lock:
                del self._deliveries[sock]
                disown(sock)
