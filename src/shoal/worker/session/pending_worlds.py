"""Worlds that are being connected, each in a thread of its own, until they can be entered or are given up."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from shoal.core.world import World
from shoal.worker.collectives.exchange import Exchange, OnBreak
from shoal.worker.transport.exchange_broken import ExchangeBroken

Connect = Callable[[World, float, threading.Event, OnBreak], Exchange]
"""Builds the exchange of a world within so many seconds, unless it is cancelled."""


@dataclass(frozen=True, slots=True)
class PendingWorld:
    """A world that can be entered. `after` is the world that it follows at a step boundary, None to enter at once.

    Without an exchange it is a world that goes on without us.
    """

    world: World
    exchange: Exchange | None
    after: int | None

    @property
    def number(self) -> int:
        return self.world.number

    @property
    def planned(self) -> bool:
        return self.after is not None


def drop(entrance: PendingWorld | None) -> None:
    """Give an entrance up, so that the others who connected it see that we will not come."""
    if entrance is not None and entrance.exchange is not None:
        entrance.exchange.abort("this world will not be")


class PendingWorlds:
    """Connects at most one world to enter at once and one to follow it; `build` makes their exchanges.

    `opened(entrance)` says whether it is still wanted; `failed(world, after, broken)` is told of those that could not
    be connected and were not given up; `broke(number, suspects, cause)` of neighbours that are lost later.
    """

    def __init__(
        self,
        build: Connect,
        connect_timeout_s: float,
        opened: Callable[[PendingWorld, threading.Event], bool],
        failed: Callable[[World, int | None, ExchangeBroken], None],
        broke: Callable[[int, tuple[str, ...], str], None],
    ) -> None:
        self.build, self._connect_s = build, connect_timeout_s
        self._opened, self._failed, self._broke = opened, failed, broke
        self._under_way: dict[bool, tuple[int, threading.Event]] = {}

    def connect(self, world: World, after: int | None) -> None:
        """Begin to connect a world; an earlier one of its kind is given up, and with a world to enter now, both are."""
        self.give_up(planned=True)
        if after is None:
            self.give_up(planned=False)
        cancelled = threading.Event()
        self._under_way[after is not None] = (world.number, cancelled)
        work = partial(self._connect, world, after, cancelled)
        threading.Thread(target=work, name=f"shoal-world-{world.number}", daemon=True).start()

    def connects(self, number: int) -> bool:
        """Whether a world of this number is being connected."""
        return any(found == number for found, _ in self._under_way.values())

    @property
    def at_once(self) -> int | None:
        """The number of the world that is being connected to be entered at once."""
        return self._under_way[False][0] if False in self._under_way else None

    def give_up(self, planned: bool) -> None:
        number_and_event = self._under_way.pop(planned, None)
        if number_and_event is not None:
            number_and_event[1].set()

    def give_up_to(self, number: int) -> None:
        """Give up every world up to this number."""
        for planned, (found, _) in list(self._under_way.items()):
            if found <= number:
                self.give_up(planned)

    def _connect(self, world: World, after: int | None, cancelled: threading.Event) -> None:
        try:
            exchange = self.build(world, self._connect_s, cancelled, partial(self._broke, world.number))
        except ExchangeBroken as broken:
            self._is_over(cancelled)
            if not cancelled.is_set():
                self._failed(world, after, broken)
            return
        entrance = PendingWorld(world, exchange, after)
        if not self._opened(entrance, cancelled):
            drop(entrance)
        self._is_over(cancelled)

    def _is_over(self, cancelled: threading.Event) -> None:
        for planned, (_, event) in list(self._under_way.items()):
            if event is cancelled:
                self._under_way.pop(planned, None)
