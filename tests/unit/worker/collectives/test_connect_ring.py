from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from shoal.core.world import Seat, World
from shoal.testing.wait import until
from shoal.worker.collectives.connect_ring import connect_ring
from shoal.worker.transport.exchange_broken import ExchangeBroken
from shoal.worker.transport.handshake import RING
from shoal.worker.transport.peers import Peers

NEVER = threading.Event()
MakePeers = Callable[[int], list[Peers]]


@pytest.fixture
def make_peers() -> Iterator[MakePeers]:
    made: list[Peers] = []

    def make(size: int) -> list[Peers]:
        made.extend(Peers(b"token", "run", f"m{rank}", "first", "127.0.0.1") for rank in range(size))
        return made[-size:]

    yield make
    for peer in made:
        peer.close()


def world_of(peers: list[Peers]) -> World:
    return World(4, tuple(Seat(peer.member, "first", peer.address) for peer in peers), 0)


def test_members_of_a_world_meet_in_one_ring(make_peers: MakePeers) -> None:
    peers = make_peers(3)
    world = world_of(peers)
    with ThreadPoolExecutor(3) as pool:
        rings = list(pool.map(lambda peer: connect_ring(peer, world, 60.0, NEVER), peers))
    works = [ring.gather(np.array([ring.rank])) for ring in rings]
    assert [work.result().ravel().tolist() for work in works] == [[0.0, 1.0, 2.0]] * 3
    for ring in rings:
        ring.close()


def test_member_without_a_seat_is_a_mistake_of_the_caller(make_peers: MakePeers) -> None:
    stranger, *others = make_peers(3)
    with pytest.raises(ValueError, match="m0 has no seat in world 4"):
        connect_ring(stranger, world_of(others), 1.0, NEVER)


def test_previous_rank_that_does_not_come_is_named(make_peers: MakePeers) -> None:
    first, absent = make_peers(2)
    with pytest.raises(ExchangeBroken, match="m1 did not connect to world 4 within") as broken:
        connect_ring(first, world_of([first, absent]), 0.1, NEVER)
    assert broken.value.suspects == ("m1",)


def test_ring_that_does_not_close_names_those_it_has_not_heard_of(make_peers: MakePeers) -> None:
    first, *others = make_peers(4)
    world = world_of([first, *others])
    previous = others[2].connect(RING, 4, world.seats[0], 60.0, NEVER)  # it comes, and then says nothing
    with pytest.raises(ExchangeBroken, match="world 4 did not become complete: m2 did not join its ring within"):
        connect_ring(first, world, 0.2, NEVER)
    previous.close()


def test_member_that_gives_up_lets_the_others_notice_at_once(make_peers: MakePeers) -> None:
    first, second = make_peers(2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(connect_ring, first, world_of([first, second]), 60.0, NEVER)
        until(lambda: second.listener._idle, "the connection of the first member")
        second.listener.refuse_world(4)
        with pytest.raises(ExchangeBroken, match="m1 gave up world 4"):
            waiting.result(timeout=60)
