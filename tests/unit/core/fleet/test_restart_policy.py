"""How often a member is started again, and how soon."""

from __future__ import annotations

import pytest

from shoal.core.fleet.restart_policy import (
    PastExit,
    RestartAfter,
    RestartLimits,
    StopRestarting,
    decide,
    decide_before_first_step,
)

SETTINGS = RestartLimits(user=2, infrastructure=3, window_s=1000.0, backoff_s=1.0, backoff_max_s=5.0, healthy_s=60.0)


def losses(cause, *times):
    return [PastExit(at, cause) for at in times]


def test_first_restart_is_immediate():
    assert decide([], "infrastructure", 0.0, SETTINGS) == RestartAfter(
        0.0, "restart 1 of at most 3 after infrastructure failures"
    )


@pytest.mark.parametrize(("cause", "allowed"), [("user", 2), ("infrastructure", 3)])
def test_each_cause_has_its_own_limit(cause, allowed):
    other = "infrastructure" if cause == "user" else "user"
    before = losses(other, *range(50))
    for spent in range(allowed):
        assert isinstance(
            decide(before + losses(cause, *range(100, 100 + spent)), cause, 200.0, SETTINGS), RestartAfter
        )
    assert isinstance(
        decide(before + losses(cause, *range(100, 100 + allowed)), cause, 200.0, SETTINGS), StopRestarting
    )


def test_reason_names_the_number_of_errors():
    found = decide(losses("user", 1.0, 2.0), "user", 3.0, SETTINGS)
    assert found == StopRestarting("3 errors of the user's code within 1000 s; 2 restarts are allowed")


def test_preemption_has_no_limit():
    assert isinstance(decide(losses("preempted", *range(1000)), "preempted", 1000.0, SETTINGS), RestartAfter)


def test_exits_before_the_window_do_not_count():
    assert isinstance(decide(losses("user", 1.0, 2.0), "user", 1003.0, SETTINGS), RestartAfter)


def test_pause_doubles_up_to_its_maximum():
    wide = RestartLimits(infrastructure=100, backoff_s=1.0, backoff_max_s=5.0, healthy_s=60.0)
    pauses = [decide(losses("infrastructure", *range(n)), "infrastructure", n, wide).after_s for n in range(6)]
    assert pauses == [0.0, 1.0, 2.0, 4.0, 5.0, 5.0]


def test_healthy_time_resets_the_pause():
    wide = RestartLimits(infrastructure=100, backoff_s=1.0, backoff_max_s=5.0, healthy_s=60.0)
    assert decide(losses("infrastructure", 1.0, 2.0, 3.0), "infrastructure", 63.0, wide).after_s == 0.0
    assert decide(losses("infrastructure", 1.0, 2.0, 63.0), "infrastructure", 64.0, wide).after_s == 1.0


def test_preemptions_do_not_lengthen_the_pause():
    assert decide(losses("preempted", 1.0, 2.0), "infrastructure", 3.0, SETTINGS).after_s == 0.0


def test_limit_of_zero_allows_no_restart():
    assert decide([], "user", 0.0, RestartLimits(user=0)) == StopRestarting(
        "no restarts are allowed after errors of the user's code"
    )


def test_pause_never_overflows():
    endless = RestartLimits(infrastructure=10**9, window_s=1e9, healthy_s=1e9)
    assert decide(losses("infrastructure", *range(5000)), "infrastructure", 5000.0, endless).after_s == 30.0


def early(histories, member="a", error="ValueError: x", members=("a", "b")):
    failed = {name: [PastExit(1.0, cause, past)] for name, (cause, past) in histories.items()}
    return decide_before_first_step(failed, member, error, members, 2.0, SETTINGS)


def test_first_error_before_the_first_step_waits_for_the_other_members():
    decision = early({})
    assert isinstance(decision, RestartAfter)
    assert decision.after_s == 1.0


def test_same_error_of_another_member_before_the_first_step_is_not_retried():
    assert early({"b": ("user", "ValueError: x")}) == StopRestarting(
        "not restarted: every member failed with the same error before the first step"
    )
    assert early({"b": ("user", "ValueError: x")}, members=("a", "b", "c")) == StopRestarting(
        "not restarted: 2 members failed with the same error before the first step"
    )


def test_same_error_again_before_the_first_step_is_not_retried():
    assert early({"a": ("user", "ValueError: x")}) == StopRestarting(
        "not restarted: it failed twice with the same error before the first step"
    )


def test_only_member_is_not_restarted_before_the_first_step():
    assert early({}, members=("a",)) == StopRestarting("not restarted: the only member failed before the first step")


@pytest.mark.parametrize("past", [("user", "KeyError: y"), ("infrastructure", "ValueError: x")])
def test_other_failures_before_the_first_step_do_not_stop_restarts(past):
    assert isinstance(early({"b": past}), RestartAfter)
    assert isinstance(early({"a": past}), RestartAfter)
