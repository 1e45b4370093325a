"""Connecting the ring of a world: each member connects to the next rank and waits for the previous one.

A ring is complete when a first gather has gone round. A member that gives up refuses the world's connections, so that
the ranks that wait for it notice at once instead of at their deadline.
"""

from __future__ import annotations

import socket
import threading

import numpy as np

from shoal.core.world import World
from shoal.worker.collectives.exchange import OnBreak
from shoal.worker.collectives.ring import Ring
from shoal.worker.transport.connect import POLL_S, ConnectDeadline
from shoal.worker.transport.exchange_broken import ExchangeBroken
from shoal.worker.transport.handshake import RING
from shoal.worker.transport.peers import Peers
from shoal.worker.transport.sockets import alive, disown

# How many members an error names that did not come.
MAX_NAMED = 5


def connect_ring(
    peers: Peers, world: World, timeout_s: float, cancelled: threading.Event, on_break: OnBreak | None = None
) -> Ring:
    """Join the ring of a world; return when all of its members have, or raise ExchangeBroken."""
    rank = world.rank_of(peers.member)
    if rank is None:
        raise ValueError(f"{peers.member} has no seat in world {world.number}")
    members = [seat.member for seat in world.seats]
    if world.size == 1:
        return Ring(0, members)
    deadline = ConnectDeadline(timeout_s, cancelled)
    peers.listener.accept_world(world.number)
    try:
        following = peers.connect(RING, world.number, world.seats[(rank + 1) % world.size], timeout_s, cancelled)
        peers.local_host = str(following.getsockname()[0])
        preceding = _wait_for_previous(peers, world, rank, following, deadline)
        ring = Ring(rank, members, following, preceding, on_break)
        _wait_for_all(ring, world, rank, deadline)
    except ExchangeBroken:
        peers.listener.refuse_world(world.number)
        raise
    return ring


def _wait_for_previous(
    peers: Peers, world: World, rank: int, following: socket.socket, deadline: ConnectDeadline
) -> socket.socket:
    """Return the connection of the previous rank; close `following` if it does not come."""
    next_, previous = world.seats[(rank + 1) % world.size], world.seats[rank - 1]
    listener = peers.listener
    try:
        with listener.arrived:
            while not (sock := listener.take(RING, world.number, previous.member, previous.incarnation)):
                deadline.check((previous.member,), f"{previous.member} did not connect to world {world.number}")
                if not alive(following):
                    raise ExchangeBroken(f"{next_.member} gave up world {world.number}", (next_.member,))
                listener.arrived.wait(POLL_S)
    except ExchangeBroken:
        disown(following)
        raise
    return sock


def _wait_for_all(ring: Ring, world: World, rank: int, deadline: ConnectDeadline) -> None:
    """Return when a first gather has gone round; else name the members that this one is not connected to."""
    work = ring.gather(np.zeros(1))
    unseen = [world.seats[(rank + hop) % world.size].member for hop in range(2, world.size - 1)]
    late = unseen or [world.seats[rank - 1].member, world.seats[(rank + 1) % world.size].member]
    names = ", ".join(dict.fromkeys(late[:MAX_NAMED])) + (" or others" if len(late) > MAX_NAMED else "")
    try:
        while not work.done(POLL_S):
            deadline.check((), f"world {world.number} did not become complete: {names} did not join its ring")
        work.wait()
    except ExchangeBroken:
        ring.close()
        raise
