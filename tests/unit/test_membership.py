"""Single promises of membership; their combinations are tested in tests/property/test_membership_machine.py."""

from __future__ import annotations

from dataclasses import replace

from shoal.core import events as ev
from shoal.core.membership import Rules, State, decide, due
from shoal.core.world import Address

RULES = Rules(min_members=1, max_members=2, gather_s=0.5)


def after(state: State, *events: ev.Event, now: float = 100.0) -> tuple[State, list[ev.Instruction]]:
    asked: list[ev.Instruction] = []
    for event in events:
        state, more = decide(state, event, now)
        asked = list(more)
    return state, asked


def hello(name: str) -> ev.Hello:
    return ev.Hello(name, "1", Address("h", 1))


def test_a_member_with_another_model_is_refused_and_not_counted_as_lost() -> None:
    state, asked = after(
        State(RULES), hello("a"), ev.BecameReady("a", "x", None), hello("b"), ev.BecameReady("b", "y", None)
    )
    assert [type(i) for i in asked if isinstance(i, ev.Refuse)] == [ev.Refuse]
    assert state.losses == 0
    assert list(state.members) == ["a"]


def test_a_member_that_comes_when_all_is_done_is_told_so() -> None:
    state = replace(State(RULES), finished=True, step=9)
    _, asked = after(state, hello("late"))
    assert ev.TellFinished(("late",), 9) in asked


def test_a_gathering_that_led_nowhere_does_not_fire_for_ever() -> None:
    state, _ = after(State(RULES), hello("a"), ev.BecameReady("a", "x", None))
    state, _ = after(state, ev.Disconnected("a"))
    fired = due(state, {}, 100.6)
    assert ev.TimerFired("gather") in fired
    state, _ = after(state, ev.TimerFired("gather"), now=100.6)
    assert ev.TimerFired("gather") not in due(state, {}, 100.7)
