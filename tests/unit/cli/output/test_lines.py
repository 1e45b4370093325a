"""Plain lines, JSON lines and the phrases that displays share."""

from __future__ import annotations

import json

from tests.unit.views import run_view, story_line

from shoal.cli.output.lines import (
    JsonLines,
    PlainOutput,
    SafeDisplay,
    adjustments,
    forecast,
    progress,
    resume_advice,
    sentence,
)
from shoal.wire.api import AdjustmentView, ForecastView


def test_plain_lines_name_their_member_and_progress_is_periodic() -> None:
    output: list[str] = []
    now = [0.0]
    shown = PlainOutput(output.append, clock=lambda: now[0], every_s=10.0)
    for second in range(21):
        now[0] = float(second)
        shown.view(run_view(step=second))
    shown.logs([("local/1", "epoch 0")])
    shown.story([story_line(1, "MembershipNote", "local/2 is lost", reason="signal 9")])
    assert [line.split("/")[0] for line in output[:3]] == ["step 0", "step 10", "step 20"]
    assert output[3:] == ["local/1 | epoch 0", "shoal: local/2 is lost (signal 9)"]


def test_quiet_output_has_only_the_lines_of_members() -> None:
    output: list[str] = []
    shown = PlainOutput(output.append, quiet=True)
    shown.view(run_view())
    shown.note("something")
    shown.logs([("local/0", "mine")])
    assert output == ["local/0 | mine"]


def test_json_output_is_one_object_per_line() -> None:
    output: list[str] = []
    shown = JsonLines(output.append)
    shown.view(run_view())
    shown.view(run_view())
    shown.logs([("local/0", "a\nb")])
    shown.story([story_line(1, "MembershipNote", "x")])
    assert [json.loads(line)["event"] for line in output] == ["progress", "log", "story"]


def test_lost_terminal_does_not_end_the_supervision() -> None:
    def broken(text: str) -> None:
        raise OSError(5, "Input/output error")

    shown = SafeDisplay(PlainOutput(broken))
    shown.note("hello")
    shown.view(run_view())


def test_reason_that_is_in_the_text_is_not_repeated() -> None:
    assert sentence(story_line(1, "MembershipNote", "lost: signal 9", reason="signal 9")) == "lost: signal 9"


def test_progress_of_a_waiting_run_has_its_reason() -> None:
    assert progress(run_view(status="waiting", reason="2 of 3", world=None)).endswith("no world  2 of 3")


def test_memory_limits_of_many_members_are_one_line() -> None:
    limits = tuple(AdjustmentView("memory", 10 - n, {f"m/{n}": 8}, f"m/{n} is full") for n in range(3))
    assert adjustments(run_view(decided=limits)) == [
        ("memory", "from step 10: m/0 is full (and 2 more members with a limit)")
    ]


def test_plain_lines_show_few_of_many_share_changes() -> None:
    output: list[str] = []
    now = [0.0]
    shown = PlainOutput(output.append, clock=lambda: now[0], every_s=10.0)
    for number in range(200):
        now[0] = 0.1 * number
        shown.story([story_line(number, "SharesDecided", f"shares {number}")])
    shown.story([story_line(200, "BatchDecided", "batch 128")])
    assert output == [
        "shoal: shares 0",
        "shoal: shares 1",
        "shoal: shares 2",
        "shoal: shares 102; 99 earlier changes not shown",
        "shoal: batch 128",
    ]


def test_resume_advice_names_the_step_where_the_run_continues() -> None:
    assert resume_advice("r", 9, None) == "shoal resume r starts over at step 0: there is no checkpoint"
    assert resume_advice("r", 9, 9) == "shoal resume r continues at step 9"
    assert resume_advice("r", 9, 8, " --url u") == "shoal resume r --url u continues at step 8 and repeats 1 step"


def test_time_left_has_an_interval_a_source_and_a_price() -> None:
    left = ForecastView(720.0, 600.0, 5640.0, 0.9, "340 steps of this run", changed="2 → 3 members: 40 s earlier")
    text = "about 12 min (10 min to 1 h 30 min in 90 % of cases), from 340 steps of this run"
    assert forecast(run_view(forecast=left)) == f"{text}; 2 → 3 members: 40 s earlier"
    assert forecast(run_view(forecast=left, rate_per_h=3.0)).startswith(f"{text}; 0.60 more to spend")
    assert progress(run_view(forecast=left)).endswith("  about 12 min left")


def test_time_that_cannot_be_foretold_says_why() -> None:
    view = run_view(forecast=ForecastView(unknown="the run is waiting"))
    assert forecast(view) == "unknown: the run is waiting"
    assert "left" not in progress(view)
    assert forecast(run_view()) == ""
