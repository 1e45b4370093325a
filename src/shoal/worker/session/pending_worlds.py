"""Worlds that are being connected, each in a thread of its own, until they can be entered or are given up.

There are two kinds. An *immediate* world is entered as soon as it is connected: the first one, or the one after a
break. A *planned* world follows the current one at a step boundary that all members agree on. At most one of each kind
is being connected at a time; a new immediate world cancels both.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from shoal.core.world import World
from shoal.worker.collectives.exchange import Exchange, OnBreak
from shoal.worker.transport.exchange_broken import ExchangeBroken

Connect = Callable[[World, float, threading.Event, OnBreak], Exchange]
"""Connects the exchange of a world within so many seconds, unless it is cancelled; raises ExchangeBroken."""


@dataclass(frozen=True, slots=True)
class PendingWorld:
    """A world that can be entered. `after` is the world that it follows at a step boundary, None for an immediate one.

    Without an exchange it is a world that has no seat for this member.
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


def abandon(pending: PendingWorld | None) -> None:
    """Abort the exchange of a pending world, so that its other members notice that we will not enter it."""
    if pending is not None and pending.exchange is not None:
        pending.exchange.abort("this world was given up before it was entered")


class PendingWorlds:
    """Connects at most one immediate and one planned world; `build` connects their exchanges.

    The callbacks run in the connecting threads. `on_connected(pending, cancelled)` returns whether the world is still
    wanted; `on_failed(world, after, broken)` reports one that could not be connected and was not cancelled;
    `on_broken(number, suspects, cause)` reports a neighbour that is lost later.
    """

    def __init__(
        self,
        build: Connect,
        connect_timeout_s: float,
        on_connected: Callable[[PendingWorld, threading.Event], bool],
        on_failed: Callable[[World, int | None, ExchangeBroken], None],
        on_broken: Callable[[int, tuple[str, ...], str], None],
    ) -> None:
        self.build, self._connect_timeout_s = build, connect_timeout_s
        self._on_connected, self._on_failed, self._on_broken = on_connected, on_failed, on_broken
        # By kind, planned or not: the number of the world, and the event that cancels its thread.
        self._connecting: dict[bool, tuple[int, threading.Event]] = {}

    def connect(self, world: World, after: int | None) -> None:
        """Start connecting a world; cancel an earlier one of its kind, and both kinds if this one is immediate."""
        self.cancel(planned=True)
        if after is None:
            self.cancel(planned=False)
        cancelled = threading.Event()
        self._connecting[after is not None] = (world.number, cancelled)
        work = partial(self._connect, world, after, cancelled)
        threading.Thread(target=work, name=f"shoal-world-{world.number}", daemon=True).start()

    def is_connecting(self, number: int) -> bool:
        """Return whether the world of this number is being connected."""
        return any(connecting == number for connecting, _ in self._connecting.values())

    @property
    def immediate(self) -> int | None:
        """The number of the immediate world that is being connected, None if there is none."""
        return self._connecting[False][0] if False in self._connecting else None

    def cancel(self, planned: bool) -> None:
        """Stop connecting the world of one kind, if any."""
        number_and_event = self._connecting.pop(planned, None)
        if number_and_event is not None:
            number_and_event[1].set()

    def cancel_up_to(self, number: int) -> None:
        """Stop connecting every world up to this number."""
        for planned, (connecting, _) in list(self._connecting.items()):
            if connecting <= number:
                self.cancel(planned)

    def _connect(self, world: World, after: int | None, cancelled: threading.Event) -> None:
        try:
            exchange = self.build(world, self._connect_timeout_s, cancelled, partial(self._on_broken, world.number))
        except ExchangeBroken as broken:
            self._forget(cancelled)
            if not cancelled.is_set():
                self._on_failed(world, after, broken)
            return
        except Exception as error:  # noqa: BLE001 - the outer loop of this thread: the coordinator must hear of it
            self._forget(cancelled)
            if not cancelled.is_set():
                failed = f"connecting world {world.number} failed here: {type(error).__name__}: {error}"
                self._on_failed(world, after, ExchangeBroken(failed))
            return
        pending = PendingWorld(world, exchange, after)
        if not self._on_connected(pending, cancelled):
            abandon(pending)
        self._forget(cancelled)

    def _forget(self, cancelled: threading.Event) -> None:
        for planned, (_, event) in list(self._connecting.items()):
            if event is cancelled:
                self._connecting.pop(planned, None)
