"""The summary at the end of a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.views import run_view, story_line

from shoal.cli.output import summary
from shoal.core.membership import decide as membership
from shoal.core.membership import events as ev
from shoal.core.world import Address
from shoal.wire.api import AdjustmentView, CostView, StoryLine


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [("done", None, 0), ("failed", None, 1), ("stopped", None, 75), ("resumable", None, 75), ("failed", 5, 5)],
)
def test_exit_code_follows_the_status(status: str, code: int | None, expected: int) -> None:
    assert summary.exit_code(run_view(status=status, exit_code=code)) == expected


def test_late_report_of_a_loss_does_not_lengthen_the_next_one() -> None:
    story = [
        story_line(1, "FormWorld", world=1, step=0),
        story_line(2, "DissolveWorld", world=1, reason="local/1 is lost", at=110.0),
        story_line(3, "FormWorld", world=2, step=40, at=110.02),
        story_line(4, "ProcessExited", member="local/1", reason="killed by signal 9", at=110.03),
        story_line(5, "DissolveWorld", world=2, reason="the lease of local/2 expired", at=128.0),
        story_line(6, "FormWorld", world=3, step=90, at=128.5),
    ]
    assert [change.formed_s for change in summary.changes(story)] == pytest.approx([0.02, 0.5])


@pytest.mark.parametrize(
    "reason",
    [
        "local/1 is gone: lease expired after 3.2 s of silence",
        "local/1 is gone: stuck in compute for 3.2 s while all other members wait",
    ],
)
def test_silence_before_a_member_is_given_up_is_part_of_the_standstill(reason: str) -> None:
    story = [
        story_line(1, "FormWorld", world=1, step=0),
        story_line(2, "DissolveWorld", world=1, reason=reason, at=128.0),
        story_line(3, "FormWorld", world=2, step=90, at=128.5),
    ]
    assert [change.formed_s for change in summary.changes(story)] == pytest.approx([3.7])


def test_lost_member_is_shown_with_its_cost() -> None:
    story = [
        story_line(1, "FormWorld", world=1, step=0),
        story_line(3, "DissolveWorld", world=1, reason="local/0 lost its connection to local/1", at=110.0),
        story_line(4, "WorldBroken", member="local/0", world=1, step=40, at=110.01),
        story_line(5, "FormWorld", world=2, step=40, at=110.021),
        story_line(6, "ProcessExited", member="local/1", reason="killed by signal 9", at=110.03),
        story_line(7, "ProposeWorld", world=3, reason="local/1 joins", at=112.0),
        story_line(8, "ProposeWorld", world=4, reason="local/1, local/2 join", at=112.1),
        story_line(9, "WorldEntered", "world 4 with 3 members", world=4, step=52, at=112.2),
    ]
    lost, joined = summary.changes(story)
    assert (lost.world, lost.step, lost.steps_lost) == (2, 40, 0)
    assert lost.formed_s == pytest.approx(0.021)
    assert (joined.world, joined.step, joined.text, joined.formed_s) == (4, 52, "local/1, local/2 join", None)
    text = summary.text(summary.summarise(run_view(status="done", ended=141.0), story))
    assert "changes     world 2, step 40: local/1 lost: killed by signal 9 (new world after 21 ms; 0 steps lost" in text
    assert "1 234 of 5 000 steps in 41.0 s" in text


def test_loss_that_was_not_a_number_is_said_beside_done() -> None:
    bad = AdjustmentView("loss", 12, {}, "the loss of step 12 is nan [S325]")
    text = summary.text(summary.summarise(run_view(status="done", loss=None, decided=(bad,)), []))
    assert "warning     the loss of step 12 is nan [S325]" in text


FALLBACK = (
    story_line(1, "FormWorld", world=1, step=0),
    story_line(2, "WorldBroken", member="local/0", world=1, step=45),
    story_line(3, "FormWorld", world=2, step=40),
)


def test_fallback_to_a_checkpoint_counts_the_steps_lost_and_repeated() -> None:
    assert [(change.steps_lost, change.steps_repeated) for change in summary.changes(FALLBACK, {}, 100)] == [(5, 5)]
    text = summary.text(summary.summarise(run_view(step=100), FALLBACK))
    assert "; 5 steps lost, 5 repeated)" in text


def test_lost_steps_count_as_repeated_only_once_they_are_done_again() -> None:
    assert [(change.steps_lost, change.steps_repeated) for change in summary.changes(FALLBACK, {}, 42)] == [(5, 2)]


def test_steps_lost_with_all_members_are_counted_from_the_last_progress() -> None:
    story = [story_line(1, "FormWorld", world=1, step=0), story_line(3, "FormWorld", world=2, step=40)]
    assert [change.steps_lost for change in summary.changes(story, {2: 120}, 200)] == [80]
    assert [change.steps_lost for change in summary.changes(story, {2: 40}, 200)] == [0]


def test_restored_checkpoint_never_counts_as_no_loss() -> None:
    story = [
        story_line(1, "FormWorld", world=1, step=0),
        story_line(2, "CheckpointRestored", "local/0 restored a checkpoint", step=40),
        story_line(3, "FormWorld", world=2, step=40),
    ]
    unseen = summary.text(summary.summarise(run_view(step=200), story, reached={2: 40}))
    assert "; restored a checkpoint: later steps lost)" in unseen
    seen = summary.text(summary.summarise(run_view(step=200), story, reached={2: 45}))
    assert "; restored a checkpoint: at least 5 steps lost, 5 repeated)" in seen


def test_start_over_without_a_checkpoint_counts_the_steps_of_its_note() -> None:
    state = membership.MembershipState(
        membership.MembershipSettings(min_members=1, max_members=1), step=80, started=True, restoring="a"
    )
    state, _ = membership.decide(state, ev.MemberConnected("a", "1", Address("h", 1)), 0.0)
    _, instructions = membership.decide(state, ev.MemberReady("a", "f", None, restored=True), 1.0)
    (note,) = [note for note in instructions if isinstance(note, ev.MembershipNote) and note.step == 80]
    story = [
        story_line(1, "FormWorld", world=1, step=0),
        story_line(2, note.kind, note.text, step=note.step),
        story_line(3, "FormWorld", world=2, step=0),
    ]
    assert [(change.steps_lost, change.steps_repeated) for change in summary.changes(story, {}, 100)] == [(80, 80)]


def test_failure_is_shown_with_its_root_cause_first() -> None:
    story = [
        story_line(1, "ExceptionReported", "local/1 raised ConnectionResetError: peer", member="local/1"),
        story_line(
            2, "ExceptionReported", "local/0 raised ValueError: no", member="local/0", reason='File "t.py", line 3'
        ),
        story_line(3, "ProcessExited", "process of local/0 ended with exit code 1", member="local/0", reason="user"),
        story_line(
            4, "ProcessExited", "process of local/2 ended by signal 15", member="local/2", reason="the run failed"
        ),
    ]
    facts = summary.summarise(run_view(status="failed", exit_code=1, reason="local/0 raised"), story)
    assert facts.cause == 'local/0: ValueError: no (File "t.py", line 3)'
    assert facts.victims == ("local/1: ConnectionResetError: peer",)
    assert summary.text(facts).startswith("cause       local/0: ValueError: no")


def exits(detail: str, *members: str) -> list[StoryLine]:
    text = "process of {} ended with exit code 1"
    return [
        story_line(n, "ProcessExited", text.format(name), member=name, reason=detail) for n, name in enumerate(members)
    ]


def test_error_of_all_members_is_one_block_with_one_traceback() -> None:
    story = exits("ValueError: no", "local/0", "local/1", "local/2")
    story += exits("the run failed: local/2: ValueError: no", "local/1")
    why = "local/2: ValueError: no (not restarted: every member failed with the same error before the first step)"
    traceback = (
        'Traceback (most recent call last):\n  File "t.py", line 2, in <module>\n    f()\n'
        '  File "t.py", line 1, in f\n    raise ValueError("no")\nValueError: no'
    )
    view = run_view(status="failed", exit_code=1, reason=why, step=0, total_steps=None)
    lines = summary.text(summary.summarise(view, story, traceback_of={"local/0": traceback}.__getitem__)).splitlines()
    assert lines[:2] == [
        "cause       local/0: ValueError: no (and 2 other members)",
        'at          t.py:1: raise ValueError("no")',
    ]
    assert lines[2:8] == [f"  {line}" for line in traceback.splitlines()]
    assert "why         not restarted: every member failed with the same error before the first step" in lines


def test_traceback_of_an_error_that_the_script_handled_is_not_shown() -> None:
    view = run_view(status="failed", exit_code=1, reason="gone")
    facts = summary.summarise(view, exits("sys.exit(2): no data", "local/0"), traceback_of=lambda _: "KeyError: 1")
    assert (facts.cause, facts.traceback) == ("local/0: sys.exit(2): no data", "")


@pytest.mark.parametrize("detail", ["EOFError: EOF when reading a line", "BdbQuit"])
def test_use_of_a_terminal_is_advised_against(detail: str) -> None:
    facts = summary.summarise(run_view(status="failed", exit_code=1, reason="x"), exits(detail, "local/0"))
    assert "members have no terminal for breakpoint() and input(); run the script alone: python" in summary.text(facts)


def test_stopped_run_is_shown_with_the_command_that_continues_it() -> None:
    view = run_view(status="stopped", step=9, checkpoint_step=7, checkpoint_path="/c/7")
    text = summary.text(summary.summarise(view, [], target_options=" --url u"))
    assert text.endswith("continue    shoal resume train-7f3k --url u continues at step 7 and repeats 2 steps")


def test_run_that_has_spent_its_budget_needs_a_larger_one() -> None:
    ended = run_view(status="resumable", exit_code=6, ended=5.0, checkpoint_step=1234, cost=CostView(3600.0, 2.0, 4.0))
    text = summary.text(summary.summarise(ended, ()))
    assert "continue    shoal resume train-7f3k --budget AMOUNT continues at step 1 234" in text
    assert "cost        1.00 machine hours, 2.00 spent, 4.00 saved" in text


def test_log_directory_is_shown_only_if_it_exists(tmp_path: Path) -> None:
    logs = tmp_path / "runs" / "r" / "logs"
    view = run_view(directory=str(logs.parent))
    (tmp_path / "runs").mkdir()
    assert summary.log_place(view) == "none: no member printed anything"
    logs.mkdir(parents=True)
    assert summary.log_place(view) == str(logs)
    elsewhere = run_view(directory=str(tmp_path / "elsewhere" / "runs" / "r"))
    assert summary.log_place(elsewhere, " --url u").endswith("shoal logs train-7f3k --url u")


def test_note_about_a_planned_world_is_recognised() -> None:
    state = membership.MembershipState(membership.MembershipSettings(min_members=1, max_members=2, regroup_s=0.0))
    notes: list[tuple[str, int | None, int | None]] = []
    story: tuple[ev.Event, ...] = (
        ev.MemberConnected("a", "1", Address("h", 1)),
        ev.MemberReady("a", "f", None),
        ev.TimerFired("regroup"),
        ev.MemberConnected("b", "2", Address("h", 2)),
        ev.MemberReady("b", "f", None),
        ev.WorldEntered("a", 2, 9),
    )
    for now, event in enumerate(story):
        state, instructions = membership.decide(state, event, float(now))
        notes += [(note.kind, note.world, note.step) for note in instructions if isinstance(note, ev.MembershipNote)]
    assert notes[-1] == ("WorldEntered", 2, 9)


def test_share_changes_are_counted_with_the_idle_time_they_saved() -> None:
    story = [story_line(n, "SharesDecided", "x") for n in range(3)]
    text = summary.text(summary.summarise(run_view(status="done", idle_before=0.38, idle_now=0.017), story))
    assert "shares      changed 3 times; idle 1.7 % of the time, 38 % with equal shares" in text
    assert "shares      changed once\n" in summary.text(summary.summarise(run_view(status="done"), story[:1])) + "\n"
    assert "shares" not in summary.text(summary.summarise(run_view(status="done"), []))


def test_event_files_are_shown_or_why_they_are_missing() -> None:
    where = "/somewhere/train-7f3k/tensorboard"
    assert f"\ntensorboard {where}" in summary.text(summary.summarise(run_view(tensorboard=where), []))
    failed = run_view(tensorboard=where, tensorboard_error="No space left on device")
    assert f"\ntensorboard not written: No space left on device ({where})" in summary.text(
        summary.summarise(failed, [])
    )
    assert "tensorboard" not in summary.text(summary.summarise(run_view(), []))
