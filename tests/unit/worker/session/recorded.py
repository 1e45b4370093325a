"""A session without network, for tests of how a member reacts to messages and broken connections."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.core.world import Address, Seat, World
from shoal.settings import RunSettings
from shoal.worker.session import member_worlds
from shoal.worker.session.environment import MemberEnvironment
from shoal.worker.session.session import Session
from shoal.worker.session.uplink import MemberUplink

NAMES = ("local/0", "local/1", "local/2")
ADDRESS = Address("127.0.0.1", 9)


def world(number: int, size: int) -> World:
    return World(number, tuple(Seat(name, "1", ADDRESS) for name in NAMES[:size]), 0)


class RecordedSession(Session):
    """A session without network, which records the messages it sends and the worlds it connects."""

    def __init__(self, environment: MemberEnvironment) -> None:
        self.sent: list[Any] = []
        self.connected: list[tuple[int, int | None]] = []
        super().__init__(environment)
        pending: Any = self._pending_worlds
        pending.connect = lambda world, after: self.connected.append((world.number, after))

    def _send(self, message: Any) -> None:
        self.sent.append(message)


def recorded_session(directory: Path, monkeypatch: pytest.MonkeyPatch) -> RecordedSession:
    """Return the session of `local/0`, which has not said anything yet."""
    (directory / "token").write_text("token")
    peers = {"address": ADDRESS, "end_worlds": lambda _number: None, "close": lambda: None}
    monkeypatch.setattr(MemberUplink, "open", lambda _self: None)
    monkeypatch.setattr(member_worlds, "Peers", lambda *_, **__: SimpleNamespace(**peers))
    environment = MemberEnvironment(
        "http://127.0.0.1:9", str(directory / "token"), "r", "local/0", "1", "127.0.0.1", {}, RunSettings(), "/runs/r"
    )
    return RecordedSession(environment)
