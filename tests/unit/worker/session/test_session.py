"""A session's worlds: proposals that arrive early, and worlds that have ended."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.worker.session.recorded import RecordedSession, recorded_session, world

from shoal.wire import member_messages as messages
from shoal.worker.session.pending_worlds import PendingWorld


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RecordedSession:
    """Return a member of world 3, step 18, that has announced world 4, as all others have."""
    session = recorded_session(tmp_path, monkeypatch)
    session.world, session.step = world(3, 2), 18
    session._prepared = session._announced = PendingWorld(world(4, 2), None, 3)
    session._agreed_world = 4
    return session


def test_proposal_that_arrives_before_this_member_crosses_is_handled_afterwards(session: RecordedSession) -> None:
    session._on_message(messages.PrepareWorldMsg(4, world(5, 3), "local/2 joins"))
    assert session.connected == []
    session._cross(4)
    assert session.world is not None
    assert session.world.number == 4
    assert session.connected == [(5, 4)]


def test_early_proposal_is_forgotten_when_its_world_breaks_first(session: RecordedSession) -> None:
    session._on_message(messages.PrepareWorldMsg(4, world(5, 3), "local/2 joins"))
    session._forget_prepared()
    assert session._early_proposal is None
    assert session.connected == []


def test_dissolved_world_is_reported_once_and_ignored_afterwards(session: RecordedSession) -> None:
    session._on_message(messages.DissolveWorldMsg(4, "local/1 is lost"))
    assert session.broken
    assert session.sent == [messages.WorldBrokenMsg(3, 18, (), "local/1 is lost")]
    session._on_message(messages.EnterWorldMsg(world(4, 2), "too late"))
    assert session.connected == []
    session._on_message(messages.EnterWorldMsg(world(5, 1), "local/0 goes on"))
    assert session.connected == [(5, None)]


def test_broken_world_is_reported_after_the_step_that_is_being_applied(session: RecordedSession) -> None:
    session._agreed_world = None
    assert session.begin_commit()
    session._on_message(messages.DissolveWorldMsg(3, "local/1 is lost"))
    assert session.sent == []
    session.commit()
    assert session.sent == [messages.WorldBrokenMsg(3, 19, (), "local/1 is lost")]
    assert not session.begin_commit()
