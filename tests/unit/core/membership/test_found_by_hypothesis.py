"""Sequences of events that the membership machine of tests/property once found, each with the promise it broke."""

from __future__ import annotations

from shoal.core.membership import events as ev
from shoal.core.membership.decide import MembershipSettings, MembershipState, decide
from shoal.core.world import Address

ADDRESS = Address("h", 1)


def hello(name: str, world: int | None = None, step: int | None = None, *, broken: bool = False) -> ev.MemberConnected:
    return ev.MemberConnected(name, f"{name}'s", ADDRESS, world, step, broken)


def ready(name: str, step: int | None = None, *, restored: bool = False) -> ev.MemberReady:
    return ev.MemberReady(name, "f", step, restored)


def replay(
    settings: MembershipSettings, *events: tuple[float, ev.Event]
) -> tuple[MembershipState, list[ev.Instruction]]:
    """Return the state after these events, each with its time, and all instructions that followed from the last one."""
    state, instructions = MembershipState(settings), ()
    for at, event in events:
        state, instructions = decide(state, event, at)
    return state, list(instructions)


def test_world_is_not_announced_again_once_a_member_of_it_has_left() -> None:
    """All members had notice, and the only holder of the state left; the other was told to fetch the state from it."""
    state, instructions = replay(
        MembershipSettings(min_members=1, max_members=3, regroup_s=0.5),
        *[(1000.0, event) for name in ("m1", "m2", "m3", "m4") for event in (hello(name), ready(name))],
        (1000.6, ev.CoordinatorRestarted()),
        (1000.6, hello("m1", 1, 2)),
        (1000.6, hello("m2", 1, 2)),
        (1000.6, ev.NoticeReceived("m2", 30.0, "notice")),
        (1000.6, hello("m3", 1, 2)),
        (1000.6, hello("m4")),
        (1000.6, ready("m4")),
        (1000.6, ev.MemberLost("m3", "its process ended")),
        (1000.6, ev.MemberLost("m1", "its process ended")),
        (1000.6, ev.WorldBroken("m2", 1, 2)),
        (1000.6, ev.NoticeReceived("m4", 30.0, "notice")),
        (1000.6, ev.CoordinatorRestarted()),
        (1000.6, hello("m2", 1, 2, broken=True)),
        (1000.6, ev.NoticeReceived("m2", 30.0, "notice")),
        (1000.6, ev.MemberLeft("m2", 2)),
        (1000.6, hello("m4")),
    )
    assert not [i for i in instructions if isinstance(i, ev.FormWorld)]
    assert [i.to for i in instructions if isinstance(i, ev.DissolveWorld)] == [("m4",)]
    assert state.world is None


def test_restore_that_a_world_made_needless_can_be_asked_for_again() -> None:
    """The answer came when the member had a seat and was ignored; later no member was asked to restore, for ever."""
    state, instructions = replay(
        MembershipSettings(min_members=1, max_members=3, regroup_s=0.5),
        (1000.0, hello("m2")),
        (1000.0, ready("m2")),
        (1000.0, hello("m3")),
        (1000.0, ready("m3")),
        (1000.5, ev.TimerFired("regroup")),
        (1004.0, ev.MemberLost("m2", "lease expired")),
        (1006.0, ev.MemberLost("m3", "it did not reconnect")),
        (1006.1, hello("m3", 1, 0)),
        (1006.1, hello("m4")),
        (1006.1, ready("m4")),
        (1006.1, hello("m3", None, 0)),
        (1006.1, ready("m3", 0)),
        (1006.1, ready("m4", None, restored=True)),
        (1009.4, ev.MemberLost("m3", "lease expired")),
        (1009.4, ready("m4")),
    )
    assert [i.member for i in instructions if isinstance(i, ev.RestoreCheckpoint)] == ["m4"]
    assert state.restoring == "m4"
