"""A session's worlds: proposals that arrive early, and worlds that have ended."""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.unit.worker.session.recorded import RecordedSession, recorded_session, world

from shoal.errors import ModelMismatch
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


@pytest.fixture
def training(session: RecordedSession) -> RecordedSession:
    """Return a member that trains in world 3, holds the state of step 18, and has no next world."""
    session._prepared = session._announced = session._agreed_world = None
    return session


def test_member_that_reached_the_end_of_the_training_ends_its_loop_without_a_barrier(training: RecordedSession) -> None:
    training._on_message(messages.EndTrainingMsg(18, "the script of local/1 left its training loop"))
    assert training.broken, "it must not wait for the member that left"
    assert training.next_step() == 18
    assert training.ends_at(18)
    assert training.finish(lambda _exchange: None)
    assert training.sent == [messages.DoneMsg(18, early=True)]


def test_member_behind_the_end_of_the_training_goes_on_until_there(training: RecordedSession) -> None:
    training._on_message(messages.EndTrainingMsg(19, "the script of local/1 left its training loop"))
    assert not training.broken
    assert training.next_step() == 18
    assert not training.ends_at(18)
    assert training.begin_commit()
    training.commit()
    assert training.ends_at(training.next_step())


def test_loop_that_an_exception_left_is_not_reported_as_done(training: RecordedSession) -> None:
    checkpoints: list[int] = []
    training.suspend_loop(lambda: checkpoints.append(1))
    training.report_exception(ValueError("a bad sample"), "")
    training._resolve_suspended()
    assert [type(message) for message in training.sent] == [messages.ExceptionRaisedMsg]
    assert checkpoints == []


def test_exception_that_was_caught_outside_the_loop_ends_the_training(training: RecordedSession) -> None:
    training.suspend_loop(lambda: None)
    assert training.sent == []
    training.try_claim("model.pt")
    assert training.sent == [messages.DoneMsg(18, early=True), messages.ClaimMsg("model.pt")]


@pytest.mark.parametrize(("code", "left"), [(0, True), (None, True), (1, False), ("no data", False)])
def test_exit_in_the_loop_ends_the_training_only_with_code_0(
    training: RecordedSession, code: int | str | None, left: bool
) -> None:
    checkpoints: list[int] = []
    training._finished = True
    training.suspend_loop(lambda: checkpoints.append(1))
    try:
        sys.exit(code)
    except SystemExit:
        training.close()
    assert checkpoints == [1]
    assert training.sent == ([messages.DoneMsg(18, early=True)] if left else [])


def test_world_replaces_a_restore_that_was_asked_for_before(training: RecordedSession) -> None:
    """Otherwise the main thread restored, forgot the world, and its peers waited for it."""
    training._on_message(messages.RestoreMsg("no member holds the state"))
    training._on_message(messages.EnterWorldMsg(world(5, 2), "local/1 holds it after all"))
    assert not training._restore_requested
    assert training.connected == [(5, None)]


def test_state_that_does_not_fit_refuses_this_member_and_not_the_run(training: RecordedSession) -> None:
    """The error of `load_state_dict` once counted as one of the user's code: after three tries the run had failed."""
    received = SimpleNamespace(step=20, header=b"", buffers=[])
    training.peers = cast(Any, SimpleNamespace(fetch_state=lambda *_: received))
    training._state = cast(Any, SimpleNamespace(load=lambda *_: {}["exp_avg"]))
    with pytest.raises(ModelMismatch, match="does not fit into local/0"):
        training._receive_state(replace(world(4, 2), sources={0: 1}), 0, threading.Event())
