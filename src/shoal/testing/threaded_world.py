"""World of members in one process: one thread each, real rings between them, and no coordinator.

For tests of what a step computes. Tests of members that die need processes (`run_under_test`).
"""

from __future__ import annotations

import socket
import sys
import threading
import traceback
from collections.abc import Callable
from typing import TypeVar

from shoal.core.world import Address, Seat, World
from shoal.testing.wait import TIMEOUT_S
from shoal.worker.collectives.catch_up import CatchUpExchange
from shoal.worker.collectives.exchange import Exchange
from shoal.worker.collectives.ring import Ring
from shoal.worker.session.member_worlds import StateProvider
from shoal.worker.session.standalone import StandaloneSession

T = TypeVar("T")


class FixedWorldSession(StandaloneSession):
    """Session of a member in a world that never changes."""

    def __init__(self, rank: int, world: World, ring: Ring) -> None:
        super().__init__()
        self.me = world.seats[rank].member
        self.rank, self.size = rank, world.size
        self.world, self.exchange = world, ring
        self.is_writer = rank == 0

    def begin(self, fingerprint: str, training_state: StateProvider, on_cpu: bool = True) -> None:  # noqa: ARG002
        """Give a member that is to catch up the exchange that a newcomer has."""
        assert self.world is not None
        zero_buffers = training_state.zero_buffers() if self.rank in self.world.catching_up else None
        if zero_buffers is not None and isinstance(self.exchange, Ring):
            self.exchange = CatchUpExchange(self.exchange, zero_buffers, training_state.is_last_step)

    def finish(self, compare: Callable[[Exchange], None]) -> bool:
        """Compare the states of all members, as at the end of a run."""
        assert self.exchange is not None
        compare(self.exchange)
        return super().finish(compare)


def together(count: int, body: Callable[[FixedWorldSession], T], catching_up: tuple[int, ...] = ()) -> list[T]:
    """Run the body as each of `count` members at once; return their results by rank, or raise the first error."""
    members = [f"together/{rank}" for rank in range(count)]
    seats = tuple(Seat(name, "", Address("127.0.0.1", 0)) for name in members)
    world = World(1, seats, 0, fresh=True, catching_up=catching_up)
    pairs = [socket.socketpair() for _ in range(count)]
    results: dict[int, T] = {}
    failures: list[BaseException] = []

    def work(rank: int) -> None:
        ring = Ring(rank, members, pairs[rank][0], pairs[rank - 1][1]) if count > 1 else Ring(0, members)
        try:
            results[rank] = body(FixedWorldSession(rank, world, ring))
            ring.barrier()
        except BaseException as error:  # noqa: BLE001 - it is raised again, in the calling thread
            failures.append(error)
            ring.abort(f"{type(error).__name__}: {error}")
        finally:
            ring.close()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * TIMEOUT_S)
    if failures:
        raise failures[0]
    if stuck := [thread for thread in threads if thread.is_alive()]:
        raise TimeoutError("".join(_stack(thread) for thread in stuck))
    return [results[rank] for rank in range(count)]


def _stack(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    return f"\n{thread.name} has not ended:\n" + "".join(traceback.format_stack(frame))
