"""Rings on loopback for the tests of collectives."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.worker.collectives.ring import Ring, RingWork


@contextmanager
def rings(size: int) -> Iterator[list[Ring]]:
    """Yield the connected rings of a world of this size, members m0, m1 and so on."""
    members = [f"m{rank}" for rank in range(size)]
    links = [socket.socketpair() for _ in range(size)]
    made = [Ring(rank, members, links[rank][0], links[rank - 1][1]) for rank in range(size)]
    try:
        yield made
    finally:
        for ring in made:
            ring.close()


def wait_all(works: list[RingWork]) -> None:
    for work in works:
        work.wait()


def vectors(size: int, count: int, dtype: Any = np.float32) -> list[NDArray[Any]]:
    """Return a vector of random values for each rank."""
    random = np.random.default_rng(1)
    return [random.standard_normal(count).astype(dtype) for _ in range(size)]
