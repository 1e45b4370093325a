"""Worlds that are being connected: which one, and until when a repeated proposal is ignored."""

from __future__ import annotations

import threading

from shoal.core.world import World
from shoal.worker.session.pending_worlds import PendingWorlds
from shoal.worker.transport.exchange_broken import ExchangeBroken

WAIT_S = 10.0


class ControlledWorlds:
    """Pending worlds that are connected when the test allows it."""

    def __init__(self) -> None:
        self.may_connect = {1: threading.Event(), 2: threading.Event()}
        self.events: list[tuple[str, int]] = []
        self.reported = threading.Semaphore(0)
        self.fails: set[int] = set()
        self.pending = PendingWorlds(self._build, 1.0, self._connected, self._failed, lambda *_: None)

    def _build(self, world, _timeout_s, cancelled, _on_break):
        self.may_connect[world.number].wait(WAIT_S)
        if world.number in self.fails or cancelled.is_set():
            raise ExchangeBroken("no answer")
        return None

    def _connected(self, pending, _cancelled):
        self._record("connected", pending.number)
        return True

    def _failed(self, world, _after, _broken):
        self._record("failed", world.number)

    def _record(self, what, number):
        self.events.append((what, number))
        self.reported.release()

    def allow(self, number):
        self.may_connect[number].set()
        assert self.reported.acquire(timeout=WAIT_S)


def world(number: int) -> World:
    return World(number, (), step=0)


def test_planned_world_is_connected_beside_the_immediate_one():
    worlds = ControlledWorlds()
    worlds.pending.connect(world(1), after=None)
    worlds.pending.connect(world(2), after=1)
    assert worlds.pending.immediate == 1
    worlds.allow(2)
    worlds.allow(1)
    assert worlds.events == [("connected", 2), ("connected", 1)]


def test_failed_world_may_be_connected_again():
    worlds = ControlledWorlds()
    worlds.fails = {1}
    worlds.pending.connect(world(1), after=None)
    assert worlds.pending.is_connecting(1)
    worlds.allow(1)
    assert worlds.events == [("failed", 1)]
    assert not worlds.pending.is_connecting(1)
    assert worlds.pending.immediate is None


def test_immediate_world_cancels_all_others():
    worlds = ControlledWorlds()
    worlds.pending.connect(world(1), after=0)
    worlds.pending.connect(world(2), after=None)
    assert not worlds.pending.is_connecting(1)
    assert worlds.pending.immediate == 2
    worlds.may_connect[1].set()
    worlds.allow(2)
    assert worlds.events == [("connected", 2)]
