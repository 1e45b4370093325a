"""The end of a run in a few lines."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.cli.output import summary
from shoal.cli.verbs import status
from shoal.core.membership import decide as membership
from shoal.core.membership import events as ev
from shoal.core.world import Address


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [("done", None, 0), ("failed", None, 1), ("stopped", None, 75), ("resumable", None, 75), ("failed", 5, 5)],
)
def test_the_exit_code_says_how_it_ended(make: Any, status: str, code: int | None, expected: int) -> None:
    assert summary.exit_code(make.run(status=status, exit_code=code)) == expected


def test_a_loss_is_shown_with_what_it_cost(make: Any) -> None:
    story = [
        make.line(1, "FormWorld", world=1, step=0),
        make.line(3, "DissolveWorld", world=1, reason="local/0 lost touch with local/1", at=110.0),
        make.line(4, "WorldBroken", member="local/0", world=1, step=40, at=110.01),
        make.line(5, "FormWorld", world=2, step=40, at=110.021),
        make.line(6, "ProcessExited", member="local/1", reason="killed by signal 9", at=110.03),
        make.line(7, "ProposeWorld", world=3, reason="local/1 joins", at=112.0),
        make.line(8, "ProposeWorld", world=4, reason="local/1, local/2 join", at=112.1),
        make.line(9, "MembershipNote", "world 4 with 3 members from step 52", at=112.2),
    ]
    lost, joined = summary.changes(story)
    assert (lost.world, lost.step, lost.steps_lost) == (2, 40, 0)
    assert lost.formed_s == pytest.approx(0.021)
    assert (joined.world, joined.step, joined.text, joined.formed_s) == (4, 52, "local/1, local/2 join", None)
    text = summary.text(summary.of(make.run(status="done", ended=141.0), story))
    assert (
        "changes     world 2, step 40: local/1 lost: killed by signal 9 (new world after 21 ms, 0 steps lost)" in text
    )
    assert "1 234 of 5 000 steps in 41.0 s" in text


def test_a_state_that_falls_back_to_a_checkpoint_counts_its_steps(make: Any) -> None:
    story = [
        make.line(1, "FormWorld", world=1, step=0),
        make.line(2, "WorldBroken", member="local/0", world=1, step=45),
        make.line(3, "FormWorld", world=2, step=40),
    ]
    assert [change.steps_lost for change in summary.changes(story)] == [5]


def test_a_failure_shows_its_root_cause_first_and_folds_the_victims(make: Any) -> None:
    story = [
        make.line(1, "ExceptionReported", "local/1 raised ConnectionResetError: peer", member="local/1"),
        make.line(
            2, "ExceptionReported", "local/0 raised ValueError: no", member="local/0", reason='File "t.py", line 3'
        ),
        make.line(3, "ProcessExited", "the process of local/0 ended with exit code 1", member="local/0", reason="user"),
        make.line(
            4, "ProcessExited", "the process of local/2 ended by signal 15", member="local/2", reason="the run failed"
        ),
    ]
    facts = summary.of(make.run(status="failed", exit_code=1, reason="local/0 raised"), story)
    assert facts.cause == 'local/0: ValueError: no (File "t.py", line 3)'
    assert facts.victims == ("local/1: ConnectionResetError: peer",)
    assert summary.text(facts).startswith("cause       local/0: ValueError: no")


def test_a_stopped_run_says_how_to_go_on(make: Any) -> None:
    facts = summary.of(make.run(status="stopped", checkpoint_step=7, checkpoint_path="/c/7"), [])
    assert summary.text(facts).endswith("to go on    shoal resume train-7f3k")


def test_the_sentence_of_a_planned_world_is_understood() -> None:
    state = membership.MembershipState(membership.MembershipSettings(min_members=1, max_members=2, regroup_s=0.0))
    said: list[str] = []
    story: tuple[ev.Event, ...] = (
        ev.MemberConnected("a", "1", Address("h", 1)),
        ev.MemberReady("a", "f", None),
        ev.TimerFired("regroup"),
        ev.MemberConnected("b", "2", Address("h", 2)),
        ev.MemberReady("b", "f", None),
        ev.WorldEntered("a", 2, 9),
    )
    for now, event in enumerate(story):
        state, asked = membership.decide(state, event, float(now))
        said += [one.text for one in asked if isinstance(one, ev.MembershipNote)]
    assert [found.groups() for text in said if (found := summary.ENTERED.match(text))] == [("2", "9")]


def test_changes_of_shares_are_counted_with_what_they_gained(make: Any) -> None:
    story = [make.line(n, "SharesDecided", "x") for n in range(3)]
    text = summary.text(summary.of(make.run(status="done", idle_before=0.38, idle_now=0.017), story))
    assert "shares      changed 3 times; idle 1.7 % of the time, with equal ones 38 %" in text
    assert "shares      changed once\n" in summary.text(summary.of(make.run(status="done"), story[:1])) + "\n"
    assert "shares" not in summary.text(summary.of(make.run(status="done"), []))


def test_the_end_says_where_tensorboard_finds_the_run_or_why_not(make: Any) -> None:
    where = "/somewhere/train-7f3k/tensorboard"
    assert f"\ntensorboard {where}" in summary.text(summary.of(make.run(tensorboard=where), []))
    failed = make.run(tensorboard=where, tensorboard_error="No space left on device")
    assert f"\ntensorboard not written: No space left on device ({where})" in summary.text(summary.of(failed, []))
    assert "tensorboard" not in summary.text(summary.of(make.run(), []))


def test_the_status_says_where_tensorboard_finds_the_run(make: Any) -> None:
    where = "/somewhere/train-7f3k/tensorboard"
    assert f"\ntensorboard {where}" in status.text(make.run(tensorboard=where), 110.0, live=True)
    assert "tensorboard" not in status.text(make.run(), 110.0, live=True)
