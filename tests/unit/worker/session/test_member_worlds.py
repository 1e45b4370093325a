"""A member's reactions, in other threads than the main one: losses, dissolved worlds, evictions, restores."""

from __future__ import annotations

import threading
from pathlib import Path

import msgspec
import pytest
from tests.unit.worker.session.recorded import RecordedSession, recorded_session, world

from shoal.testing.wait import until
from shoal.wire import member_messages as messages
from shoal.worker.session.pending_worlds import PendingWorld
from shoal.worker.session.session import MemberExit
from shoal.worker.transport.exchange_broken import ExchangeBroken


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RecordedSession:
    """Return a member of world 3 that holds the state of step 18."""
    session = recorded_session(tmp_path, monkeypatch)
    session.world, session.step = world(3, 2), 18
    return session


def test_lost_neighbour_breaks_only_the_world_it_belongs_to(session: RecordedSession) -> None:
    session._on_lost_neighbour(2, ("local/1",), "connection reset")
    assert not session.broken
    session._on_lost_neighbour(3, ("local/1",), "connection reset")
    assert session.broken
    assert session.sent == [messages.WorldBrokenMsg(3, 18, ("local/1",), "connection reset")]


@pytest.mark.parametrize("agreed", ["_finishing", "_stop_agreed"])
def test_neighbour_that_closes_at_an_agreed_end_is_no_loss(session: RecordedSession, agreed: str) -> None:
    setattr(session, agreed, True)
    session._on_lost_neighbour(3, ("local/1",), "connection reset")
    assert not session.broken


def test_connected_world_is_entered_now_or_prepared_to_follow(session: RecordedSession) -> None:
    planned, immediate = PendingWorld(world(4, 2), None, 3), PendingWorld(world(5, 2), None, None)
    assert session._on_connected(planned, threading.Event())
    assert (session._prepared, session._to_enter) == (planned, None)
    assert session._on_connected(immediate, threading.Event())
    assert session._to_enter == immediate


def test_world_that_was_dissolved_while_it_connected_is_not_wanted(session: RecordedSession) -> None:
    session._on_message(messages.DissolveWorldMsg(5, "local/1 is lost"))
    assert not session._on_connected(PendingWorld(world(5, 2), None, None), threading.Event())


def test_world_that_could_not_be_connected_is_reported_by_its_kind(session: RecordedSession) -> None:
    broken = ExchangeBroken("no answer", ("local/1",))
    session._report_unconnected(world(4, 2), 3, broken)
    session._report_unconnected(world(5, 2), None, broken)
    assert session.sent == [
        messages.PrepareFailedMsg(4, ("local/1",), "no answer"),
        messages.WorldBrokenMsg(5, 18, ("local/1",), "no answer"),
    ]


def test_evicted_member_says_hello_with_its_state_and_without_a_world(session: RecordedSession) -> None:
    session._on_message(messages.EvictedMsg("its lease expired"))
    hello = session.sent[0]
    assert isinstance(hello, messages.MemberHelloMsg)
    assert (hello.world, hello.step) == (None, 18)


def test_eviction_during_a_commit_takes_effect_after_it(session: RecordedSession) -> None:
    assert session.begin_commit()
    session._on_message(messages.EvictedMsg("its lease expired"))
    assert session.sent == []
    session.commit()
    assert [message.step for message in session.sent if isinstance(message, messages.MemberHelloMsg)] == [19]


def test_member_that_has_the_sum_applies_it_although_its_world_broke(session: RecordedSession) -> None:
    """A peer that applied it may have left its loop; this member once repeated the step alone, with other bits."""
    session.begin_exchange()
    session._on_lost_neighbour(3, (), "local/1 left the ring")
    assert not session.broken
    assert session.sent == []
    assert session.begin_commit()
    session.commit()
    assert session.broken
    assert session.sent == [messages.WorldBrokenMsg(3, 19, (), "local/1 left the ring")]


def test_broken_world_is_not_reported_at_the_step_at_which_training_ends(session: RecordedSession) -> None:
    """The member is done then; another world would be formed for nothing."""
    session.begin_exchange()
    session._on_message(messages.EndTrainingMsg(19, "the script of local/1 left its training loop"))
    session._on_lost_neighbour(3, (), "local/2 left the ring")
    assert session.begin_commit()
    session.commit()
    assert session.sent == []
    assert session.next_step() == 19


def test_member_without_the_sum_reports_the_broken_world_once(session: RecordedSession) -> None:
    session.begin_exchange()
    session._on_message(messages.DissolveWorldMsg(3, "local/1 is lost"))
    assert session.sent == []
    session.fail(ExchangeBroken("the world was dissolved"))
    assert session.sent == [messages.WorldBrokenMsg(3, 18, (), "local/1 is lost")]
    assert session.broken
    assert not session.begin_commit()


def test_sum_that_the_script_does_not_apply_for_long_is_given_up(session: RecordedSession) -> None:
    session.settings = msgspec.structs.replace(session.settings, hang_timeout_s=0.05)
    session.begin_exchange()
    session._on_lost_neighbour(3, (), "local/1 left the ring")
    until(lambda: session.sent, "the report")
    assert session.sent == [messages.WorldBrokenMsg(3, 18, (), "local/1 left the ring")]
    assert not session.begin_commit()


def test_step_that_was_not_applied_is_reported_before_the_next_one(session: RecordedSession) -> None:
    session.begin_exchange()
    session._on_lost_neighbour(3, (), "local/1 left the ring")
    session._finished = True
    with pytest.raises(MemberExit):
        session.next_step()
    assert session.sent == [messages.WorldBrokenMsg(3, 18, (), "local/1 left the ring")]


def test_eviction_while_the_sum_is_here_takes_effect_after_the_commit(session: RecordedSession) -> None:
    session.begin_exchange()
    session._on_message(messages.EvictedMsg("its lease expired"))
    assert session.sent == []
    assert session.begin_commit()
    session.commit()
    assert [message.step for message in session.sent if isinstance(message, messages.MemberHelloMsg)] == [19]


def test_member_alone_in_its_world_does_not_outlive_it(session: RecordedSession) -> None:
    """No peer would notice that it was cut off, so another world may have computed the step."""
    session.world = world(3, 1)
    session.begin_exchange()
    session._on_message(messages.DissolveWorldMsg(3, "its lease expired"))
    assert session.broken
    assert session.sent == [messages.WorldBrokenMsg(3, 18, (), "its lease expired")]
