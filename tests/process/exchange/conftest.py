from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.process.exchange.loopback import TOKEN, pair

from shoal.worker.collectives.ring import Ring
from shoal.worker.transport.peers import Peers


@pytest.fixture
def make_rings() -> Iterator[Callable[..., list[Ring]]]:
    made: list[Ring] = []

    def make(size: int, on_break: Callable[[int], Any] | None = None) -> list[Ring]:
        if size == 1:
            return [Ring(0, ["m0"])]
        members = [f"m{rank}" for rank in range(size)]
        links = [pair() for _ in range(size)]
        rings = [
            Ring(rank, members, links[rank][0], links[rank - 1][1], on_break(rank) if on_break else None)
            for rank in range(size)
        ]
        made.extend(rings)
        return rings

    yield make
    for ring in made:
        ring.close()


@pytest.fixture
def make_peers() -> Iterator[Callable[..., list[Peers]]]:
    made: list[Peers] = []

    def make(size: int, **settings: Any) -> list[Peers]:
        peers = [Peers(TOKEN, "run", f"m{rank}", "first", "127.0.0.1", **settings) for rank in range(size)]
        made.extend(peers)
        return peers

    yield make
    for peer in made:
        peer.close()
