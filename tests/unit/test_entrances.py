"""Worlds that are being connected: which one, and until when a repeated call is ignored."""

from __future__ import annotations

import threading

from shoal.core.world import World
from shoal.worker.session.pending_worlds import PendingWorlds
from shoal.worker.transport.exchange_broken import ExchangeBroken

WAIT_S = 10.0


class Stage:
    """Entrances whose worlds are connected when the test says so."""

    def __init__(self) -> None:
        self.may_connect = {1: threading.Event(), 2: threading.Event()}
        self.told: list[tuple[str, int]] = []
        self.heard = threading.Semaphore(0)
        self.fails: set[int] = set()
        self.entrances = PendingWorlds(self._build, 1.0, self._opened, self._failed, lambda *_: None)

    def _build(self, world, _timeout_s, cancelled, _on_break):
        self.may_connect[world.number].wait(WAIT_S)
        if world.number in self.fails or cancelled.is_set():
            raise ExchangeBroken("nobody there")
        return None

    def _opened(self, entrance, _cancelled):
        self._hear("opened", entrance.number)
        return True

    def _failed(self, world, _after, _broken):
        self._hear("failed", world.number)

    def _hear(self, what, number):
        self.told.append((what, number))
        self.heard.release()

    def let(self, number):
        self.may_connect[number].set()
        assert self.heard.acquire(timeout=WAIT_S)


def world(number: int) -> World:
    return World(number, (), step=0)


def test_a_world_to_follow_is_connected_beside_the_one_to_enter_now():
    stage = Stage()
    stage.entrances.connect(world(1), after=None)
    stage.entrances.connect(world(2), after=1)
    assert stage.entrances.at_once == 1
    stage.let(2)
    stage.let(1)
    assert stage.told == [("opened", 2), ("opened", 1)]


def test_a_world_that_could_not_be_connected_is_tried_again_when_it_is_proposed_again():
    stage = Stage()
    stage.fails = {1}
    stage.entrances.connect(world(1), after=None)
    assert stage.entrances.connects(1)
    stage.let(1)
    assert stage.told == [("failed", 1)]
    assert not stage.entrances.connects(1)
    assert stage.entrances.at_once is None


def test_a_world_to_enter_now_takes_the_place_of_all_others():
    stage = Stage()
    stage.entrances.connect(world(1), after=0)
    stage.entrances.connect(world(2), after=None)
    assert not stage.entrances.connects(1)
    assert stage.entrances.at_once == 2
    stage.may_connect[1].set()
    stage.let(2)
    assert stage.told == [("opened", 2)]
