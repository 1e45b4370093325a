"""Members for the tests of connections: sockets, peers and worlds on loopback."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor

from shoal.core.world import Seat, World
from shoal.worker.collectives.connect_ring import connect_ring
from shoal.worker.collectives.ring import Ring
from shoal.worker.transport.peers import Peers
from shoal.worker.transport.sockets import own, shut

TOKEN = b"the token of the tests"
NEVER = threading.Event()


def pair() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a TCP connection on loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connected = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
    for sock in (connected, accepted):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return own(connected), own(accepted)


def world_of(peers: list[Peers], number: int = 1) -> World:
    """Return a world with a seat for each of these peers: m0, m1 and so on."""
    return World(number, tuple(Seat(f"m{rank}", "first", peer.address) for rank, peer in enumerate(peers)), 0)


def connect_all(peers: list[Peers], world: World, timeout_s: float = 60.0) -> list[Ring]:
    """Connect the ring of a world, all members at once."""
    with ThreadPoolExecutor(len(peers)) as pool:
        return list(pool.map(lambda peer: connect_ring(peer, world, timeout_s, NEVER), peers))


def die(ring: Ring) -> None:
    """Close the connections of a rank as the kernel does for a killed process: without a farewell."""
    assert ring._links is not None
    ring._links._shut = lambda: None  # type: ignore[method-assign]
    for sock in (ring._links._next, ring._links._prev):
        shut(sock)
