"""Members of the exchange's tests: sockets, ports and worlds on loopback."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor

from shoal.core.world import Seat, World
from shoal.worker.collectives.ring import Ring
from shoal.worker.transport.peers import Peers
from shoal.worker.transport.sockets import own, shut

TOKEN = b"the token of the tests"
NEVER = threading.Event()


def pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of one TCP connection on loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        dialled = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
    for sock in (dialled, accepted):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return own(dialled), own(accepted)


def world_of(ports: list[Peers], number: int = 1) -> World:
    """A world with a seat for each of these ports, m0, m1 and so on."""
    return World(number, tuple(Seat(f"m{rank}", "first", port.address) for rank, port in enumerate(ports)), 0)


def connect_all(ports: list[Peers], world: World, timeout_s: float = 10.0) -> list[Ring]:
    """Connect the ring of a world, all members at once."""
    with ThreadPoolExecutor(len(ports)) as pool:
        return list(pool.map(lambda port: port.connect(world, timeout_s, NEVER), ports))


def die(ring: Ring) -> None:
    """End the connections of a rank as the kernel does for a killed process: without a farewell."""
    assert ring._neighbours is not None
    ring._neighbours._shut = lambda: None  # type: ignore[method-assign]
    for sock in (ring._neighbours._next, ring._neighbours._prev):
        shut(sock)
