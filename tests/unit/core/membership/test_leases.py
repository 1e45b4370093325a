from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st

from shoal.core.membership import events as ev
from shoal.core.membership import leases
from shoal.core.membership.leases import CoordinatorReachability, due, heartbeat_s
from shoal.core.membership.state import (
    STARTING,
    TRAINING,
    LastHeartbeat,
    MembershipSettings,
    MembershipState,
    MemberState,
)
from shoal.core.world import Address, Seat, World
from shoal.settings import MIN_HEARTBEATS_PER_LEASE

SETTINGS = MembershipSettings(max_members=2, lease_s=3.0, reconnect_s=1.0, hang_timeout_s=60.0)
NAMES = ("a/0", "b/0")


def state_of(**changes: Any) -> MembershipState:
    """Return two members that train in world 1; `changes` are those of b/0."""
    address = Address("h", 7)
    first, second = (MemberState(name, "1", address, TRAINING, 0, since=0.0) for name in NAMES)
    world = World(1, tuple(Seat(name, "1", address) for name in NAMES), step=0)
    return MembershipState(SETTINGS, {"a/0": first, "b/0": replace(second, **changes)}, world)


def heard(a: float, b: float, **changes: Any) -> dict[str, LastHeartbeat]:
    return {"a/0": LastHeartbeat(a), "b/0": LastHeartbeat(b, **changes)}


def lost(events: tuple[ev.Event, ...]) -> list[str]:
    return [event.member for event in events if isinstance(event, ev.MemberLost)]


def test_lease_expires_only_after_lease_s_of_silence() -> None:
    assert lost(due(state_of(), heard(10.0, 7.0), 10.0)) == []
    (event,) = due(state_of(), heard(10.0, 6.5), 10.0)
    assert event == ev.MemberLost("b/0", "lease expired after 3.5 s of silence", silent=True)


def test_closed_connection_alone_loses_no_member_that_trains() -> None:
    away = state_of(connected=False, disconnected_since=8.0)
    assert lost(due(away, heard(10.0, 9.5), 10.0)) == []


def test_starting_member_that_does_not_reconnect_is_not_waited_for() -> None:
    away = state_of(status=STARTING, connected=False, disconnected_since=8.0)
    (event,) = due(away, heard(10.0, 9.5), 10.0)
    assert event == ev.MemberLost("b/0", "it did not reconnect within 1 s")


def test_member_that_computes_while_all_others_wait_is_hung() -> None:
    waiting = LastHeartbeat(100.0, phase="exchange", phase_age_s=70.0)
    busy = LastHeartbeat(100.0, phase="data", phase_age_s=80.0)
    (event,) = due(state_of(), {"a/0": waiting, "b/0": busy}, 100.0)
    assert event == ev.MemberLost("b/0", "stuck in data for 80 s while all other members wait", hung=True)
    assert due(state_of(), {"a/0": waiting, "b/0": waiting}, 100.0) == (), "they wait for the network"


def test_long_step_is_not_a_hang() -> None:
    waiting = LastHeartbeat(100.0, phase="exchange", phase_age_s=70.0, usual_step_s=4.0)
    busy = LastHeartbeat(100.0, phase="compute", phase_age_s=70.0)
    assert due(state_of(), {"a/0": waiting, "b/0": busy}, 100.0) == ()


def test_coordinator_that_heard_nothing_blames_itself_and_not_the_members() -> None:
    cut_off = CoordinatorReachability(last_received=10.0, silence_limit_s=2.0)
    assert lost(due(state_of(), heard(10.0, 10.0), 14.0, cut_off)) == []
    long_after = 10.0 + leases.OWN_SILENCE_S + 1.0
    assert lost(due(state_of(), heard(10.0, 10.0), long_after, cut_off)) == ["a/0", "b/0"]


def test_members_have_a_lease_to_reconnect_once_the_coordinator_hears_again() -> None:
    restored = CoordinatorReachability(last_received=10.0, silence_limit_s=2.0).received(20.0)
    assert restored.restored_at == 20.0
    assert lost(due(state_of(), heard(20.0, 10.0), 21.0, restored)) == []
    assert lost(due(state_of(), heard(29.0, 10.0), 29.0, restored.received(29.0 - 1e-9))) == []
    quiet = CoordinatorReachability(last_received=29.0, silence_limit_s=2.0, restored_at=20.0)
    assert lost(due(state_of(), heard(29.0, 10.0), 29.0, quiet)) == ["b/0"]


def test_message_that_is_older_than_the_last_changes_nothing() -> None:
    record = CoordinatorReachability(last_received=10.0, silence_limit_s=2.0)
    assert record.received(9.0) is record
    assert record.received(11.0).restored_at == record.restored_at


@given(st.floats(0.01, 10.0), st.floats(1.0, 100.0), st.integers(1, 100_000))
def test_heartbeats_of_many_members_still_fit_their_lease(wished_s: float, lease_s: float, members: int) -> None:
    assume(wished_s * MIN_HEARTBEATS_PER_LEASE <= lease_s)
    assert heartbeat_s(wished_s, members, lease_s) * MIN_HEARTBEATS_PER_LEASE <= lease_s
