"""Several members in one process, one thread each, with real rings between them and no coordinator.

For tests of what a step computes; whoever wants to see members die needs processes.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import TypeVar

from shoal.core.world import Address, Seat, World
from shoal.worker.collectives.catch_up import CatchUpExchange
from shoal.worker.collectives.ring import Ring
from shoal.worker.session.member_worlds import StateProvider
from shoal.worker.session.standalone import StandaloneSession

T = TypeVar("T")


class FixedWorldSession(StandaloneSession):
    """A session that is in one world for good."""

    def __init__(self, rank: int, world: World, ring: Ring) -> None:
        super().__init__()
        self.me = world.seats[rank].member
        self.rank, self.size = rank, world.size
        self.world, self.exchange = world, ring
        self.is_writer = rank == 0

    def begin(self, fingerprint: str, training_state: StateProvider, on_cpu: bool = True) -> None:  # noqa: ARG002
        """A ghost is let in as a newcomer is: behind a shadow."""
        assert self.world is not None
        zero_buffers = training_state.zero_buffers() if self.rank in self.world.catching_up else None
        if zero_buffers is not None and isinstance(self.exchange, Ring):
            self.exchange = CatchUpExchange(self.exchange, zero_buffers, training_state.is_last_step)


def together(count: int, body: Callable[[FixedWorldSession], T], ghosts: tuple[int, ...] = ()) -> list[T]:
    """Run the body as each of `count` members at once; what they return, by rank."""
    members = [f"together/{rank}" for rank in range(count)]
    seats = tuple(Seat(name, "", Address("127.0.0.1", 0)) for name in members)
    world = World(1, seats, 0, fresh=True, catching_up=ghosts)
    pairs = [socket.socketpair() for _ in range(count)]
    results: dict[int, T] = {}
    failures: list[BaseException] = []

    def work(rank: int) -> None:
        ring = Ring(rank, members, pairs[rank][0], pairs[rank - 1][1]) if count > 1 else Ring(0, members)
        try:
            results[rank] = body(FixedWorldSession(rank, world, ring))
            ring.barrier()
        except BaseException as error:  # noqa: BLE001 - it is raised again, in the thread that asked
            failures.append(error)
            ring.abort(f"{type(error).__name__}: {error}")
        finally:
            ring.close()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    if failures:
        raise failures[0]
    return [results[rank] for rank in range(count)]
