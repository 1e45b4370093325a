"""A world that is proposed to who has not yet crossed into the one before it."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

from shoal.core.world import Address, Seat, World
from shoal.wire import member_messages as messages
from shoal.worker.session.pending_worlds import PendingWorld
from shoal.worker.session.session import Session

NAMES = ("local/0", "local/1", "local/2")


def world(number: int, size: int) -> World:
    return World(number, tuple(Seat(name, "1", Address("127.0.0.1", 9)) for name in NAMES[:size]), 0)


def member_about_to_cross() -> tuple[Any, list[tuple[int, int | None]]]:
    """In world 3, has announced world 4, and all others have too; and what it connects from now on."""
    session: Any = object.__new__(Session)
    connected: list[tuple[int, int | None]] = []
    session._entrances = SimpleNamespace(
        connects=lambda _number: False,
        connect=lambda world, after: connected.append((world.number, after)),
        give_up=lambda **_how: None,
    )
    session.me, session.step, session.rank = "local/0", 18, 0
    session.world, session.exchange, session._broken = world(3, 2), None, False
    session._prepared = session._announced = PendingWorld(world(4, 2), None, 3)
    session._formed = session._entering = session._early = session._keeper = session._offered = None
    session._agreed, session._over_up_to, session._decided = 4, 0, {}
    session._changed = threading.Condition()
    session._say = lambda _message: None
    return session, connected


def test_what_another_that_crossed_before_us_brought_about_is_not_missed() -> None:
    session, connected = member_about_to_cross()
    session._on_prepareworld(messages.PrepareWorldMsg(4, world(5, 3), "local/2 joins"))
    assert connected == []
    session._cross(4)
    assert session.world.number == 4
    assert connected == [(5, 4)]


def test_it_is_forgotten_if_the_world_is_over_before() -> None:
    session, connected = member_about_to_cross()
    session._on_prepareworld(messages.PrepareWorldMsg(4, world(5, 3), "local/2 joins"))
    session._forget_prepared()
    assert session._early is None
    assert connected == []
