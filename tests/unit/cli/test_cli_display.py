"""How a run is shown."""

from __future__ import annotations

import io
import json
import re
from typing import Any

import pytest
from rich.console import Console

from shoal.cli.output import live_panel, table
from shoal.cli.output.lines import JsonLines, PlainOutput, SafeDisplay, decisions, progress, sentence
from shoal.cli.verbs import status, why
from shoal.wire.api import AdjustmentView


def drawn(renderable: Any, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(renderable)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_a_panel_shows_the_run_its_members_and_what_happened(make: Any) -> None:
    text = drawn(live_panel.render(make.run(), [(100.0, "local/2 is lost: killed by signal 9")], now=112.5))
    for part in (
        "train · train-7f3k · training",
        "step 1 234 of 5 000",
        "25 %",
        "epoch 2",
        "loss 0.25",
        "812 samples/s",
    ):
        assert part in text
    assert "world 3 with 2 members (1:4)" in text
    assert "local/1" in text
    assert "local/2 is lost: killed by signal 9" in text


def test_a_panel_of_many_members_stays_small(make: Any) -> None:
    many = tuple(make.member(f"m{n}/0", rank=n) for n in range(50))
    text = drawn(live_panel.render(make.run(members=many), [], now=100.0))
    assert "and 38 more" in text
    assert len(text.splitlines()) < 20


def test_a_panel_says_who_is_silent_and_why_a_run_waits(make: Any) -> None:
    silent = make.member("local/0", connected=False, beat_age_s=4.0)
    view = make.run(status="waiting", reason="1 of at least 2 members are present", members=(silent,), total_steps=None)
    text = drawn(live_panel.render(view, [], now=100.0))
    assert "silent for 4.0 s" in text
    assert "1 of at least 2 members are present" in text


@pytest.mark.parametrize("width", [20, 40, 79])
def test_a_panel_fits_narrow_terminals(make: Any, width: int) -> None:
    view = make.run(reason="x" * 300, status="waiting", metrics={"a" * 50: 1.0})
    assert all(
        len(line) <= width for line in drawn(live_panel.render(view, [(1.0, "y" * 300)], 100.0), width).splitlines()
    )


def test_markup_in_what_members_print_is_only_text() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    shown = live_panel.Panel(console)
    shown.logs([("local/0", "[bold]not markup[/nonsense]")])
    shown.close()
    assert "[bold]not markup[/nonsense]" in console.file.getvalue()  # type: ignore[attr-defined]


def test_plain_lines_come_with_their_member_and_progress_now_and_then(make: Any) -> None:
    said: list[str] = []
    now = [0.0]
    shown = PlainOutput(said.append, clock=lambda: now[0], every_s=10.0)
    for second in range(21):
        now[0] = float(second)
        shown.view(make.run(step=second))
    shown.logs([("local/1", "epoch 0")])
    shown.story([make.line(1, "MembershipNote", "local/2 is lost", reason="signal 9")])
    assert [line.split("/")[0] for line in said[:3]] == ["step 0", "step 10", "step 20"]
    assert said[3:] == ["local/1 | epoch 0", "shoal: local/2 is lost (signal 9)"]


def test_quiet_leaves_only_what_members_print(make: Any) -> None:
    said: list[str] = []
    shown = PlainOutput(said.append, quiet=True)
    shown.view(make.run())
    shown.note("something")
    shown.logs([("local/0", "mine")])
    assert said == ["local/0 | mine"]


def test_json_is_one_object_a_line(make: Any) -> None:
    said: list[str] = []
    shown = JsonLines(said.append)
    shown.view(make.run())
    shown.view(make.run())
    shown.logs([("local/0", "a\nb")])
    shown.story([make.line(1, "MembershipNote", "x")])
    assert [json.loads(line)["event"] for line in said] == ["progress", "log", "story"]


def test_a_terminal_that_is_gone_does_not_end_the_supervision(make: Any) -> None:
    def broken(text: str) -> None:
        raise OSError(5, "Input/output error")

    shown = SafeDisplay(PlainOutput(broken))
    shown.note("hello")
    shown.view(make.run())


def test_a_reason_that_is_in_the_text_is_not_said_twice(make: Any) -> None:
    assert sentence(make.line(1, "MembershipNote", "lost: signal 9", reason="signal 9")) == "lost: signal 9"


def test_progress_of_a_waiting_run_says_why(make: Any) -> None:
    assert progress(make.run(status="waiting", reason="2 of 3", world=None)).endswith("no world  2 of 3")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0213, "21 ms"),
        (4.25, "4.2 s"),
        (59.97, "1 min 0 s"),
        (185, "3 min 5 s"),
        (7800, "2 h 10 min"),
        (2e5, "2 d 7 h"),
    ],
)
def test_spans_are_short(seconds: float, text: str) -> None:
    assert table.span(seconds) == text


def balanced(make: Any) -> Any:
    members = (
        make.member("local/0", rank=0, share=51, data_s=0.0003, compute_s=0.051, wait_s=0.0012, exchange_s=0.004),
        make.member("local/1", rank=1, share=13, data_s=0.0003, compute_s=0.052, exchange_s=0.004),
        make.member("local/2", status="spare", share=0, samples_per_s=0.0),
    )
    told = AdjustmentView("shares", 12, {"local/0": 51, "local/1": 13}, "local/1 is slow: 51, 13 instead of 32, 32")
    return make.run(members=members, batch=64, noise=1310.4, idle_before=0.38, idle_now=0.0172, decided=(told,))


@pytest.mark.parametrize("width", [75, 120])
def test_a_panel_shows_shares_where_time_goes_and_why(make: Any, width: int) -> None:
    text = drawn(live_panel.render(balanced(make), [], now=100.0, width=width), width)
    assert re.search(r"batch 64 +noise scale 1 310 +idle 1.7 % \(38 % with equal shares\)", text)
    assert "shares from step 12 on: local/1 is slow: 51, 13 instead of 32, 32" in text
    assert re.search(r"member +status.* share +data +compute +wait +exchange", text)
    assert re.search(r"local/0 .* 51 +0.3 ms +51 ms +1.2 ms +4.0 ms", text)
    assert re.search(r"local/1 .* 13 +0.3 ms +52 ms +0.0 ms +4.0 ms", text)
    assert re.search(r"local/2 +spare( +compute)? +│", text)
    assert ("samples/s" in text.split("member", 2)[2]) == (width > 100)


def test_a_narrow_panel_says_that_a_member_is_silent_or_stuck(make: Any) -> None:
    silent = make.member("local/0", rank=0, connected=False, beat_age_s=4.0)
    stuck = make.member("local/1", rank=1, phase="exchange", phase_age_s=7.0)
    text = drawn(live_panel.render(make.run(members=(silent, stuck)), [], now=100.0, width=75), 75)
    assert "silent for 4.0 s" in text
    assert "exchange for 7.0 s" in text


def test_changes_of_shares_leave_room_for_what_else_happens(make: Any) -> None:
    console = Console(file=io.StringIO(), width=120, force_terminal=True)
    shown = live_panel.Panel(console)
    shown.story([make.line(1, "MembershipNote", "local/2 is lost")])
    shown.story([make.line(n, "SharesDecided", f"shares {n}") for n in range(2, 50)])
    shown.view(make.run())
    shown.close()
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "local/2 is lost" in text
    assert "shares 49" not in text


def test_many_limits_of_memory_are_one_line(make: Any) -> None:
    limits = tuple(AdjustmentView("memory", 10 - n, {f"m/{n}": 8}, f"m/{n} is full") for n in range(3))
    assert decisions(make.run(decided=limits)) == [
        ("memory", "from step 10 on: m/0 is full (and 2 more members have a limit)")
    ]


def test_plain_lines_tell_few_of_many_changes_of_shares(make: Any) -> None:
    said: list[str] = []
    now = [0.0]
    shown = PlainOutput(said.append, clock=lambda: now[0], every_s=10.0)
    for number in range(200):
        now[0] = 0.1 * number
        shown.story([make.line(number, "SharesDecided", f"shares {number}")])
    shown.story([make.line(200, "BatchDecided", "batch 128")])
    assert said == [
        "shoal: shares 0",
        "shoal: shares 1",
        "shoal: shares 2",
        "shoal: shares 102; changes before it that were not told: 99",
        "shoal: batch 128",
    ]


def test_status_shows_shares_where_time_goes_and_why(make: Any) -> None:
    text = status.text(balanced(make), 100.0, live=True)
    assert "efficiency  batch 64, noise scale 1 310, idle 1.7 % (38 % with equal shares)" in text
    assert "shares      from step 12 on: local/1 is slow: 51, 13 instead of 32, 32" in text
    assert re.search(r"^MEMBER +SHARE +DATA +COMPUTE +WAIT +EXCHANGE +SAMPLES/S$", text, re.M)
    assert re.search(r"^local/0 +51 +0.3 ms +51 ms +1.2 ms +4.0 ms +400$", text, re.M)
    assert len(re.findall("^local/2", text, re.M)) == 1, "who has no seat has no share"
    assert max(map(len, text.split("\n\n", 1)[1].splitlines())) <= 80


def test_status_of_a_run_that_has_not_begun_has_no_shares(make: Any) -> None:
    text = status.text(make.run(members=(make.member("local/0", status="starting"),)), 100.0, live=True)
    assert "efficiency" not in text
    assert "SHARE" not in text


def test_why_folds_many_changes_of_shares(make: Any) -> None:
    many = [make.line(n, "SharesDecided", f"shares {n}", step=n) for n in range(100)]
    lines = [
        make.line(100, "MembershipNote", "local/2 is lost"),
        *many,
        make.line(101, "MembershipNote", "done"),
        *many[:8],
    ]
    text = why.text(make.run(), lines)
    assert len(text.splitlines()) == 1 + 1 + 7 + 1 + 8 + 1
    assert "… 94 more changes of shares; shoal why --json tells them all" in text
    assert "shares 2\n" in text
    assert "shares 97\n" in text


def test_the_story_of_a_member_has_the_shares_of_its_time(make: Any) -> None:
    lines = [
        make.line(1, "SharesDecided", "before its time"),
        make.line(2, "MemberConnected", "local/1 connected", member="local/1"),
        make.line(3, "MemberConnected", "local/0 connected", member="local/0"),
        make.line(4, "SharesDecided", "it is slow"),
        make.line(5, "ProcessExited", "local/1 ended", member="local/1"),
        make.line(6, "BatchDecided", "after its time"),
    ]
    assert [line.seq for line in why.about(lines, "local/1")] == [2, 4, 5]
    assert [line.seq for line in why.about(lines, "local/0")] == [3, 4, 6], "it is still there"
    assert why.about(lines, "local/7") == []


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.0, "0.0 ms"), (0.00034, "0.3 ms"), (0.0099, "9.9 ms"), (0.00996, "10 ms"), (0.4, "400 ms"), (2.5, "2.5 s")],
)
def test_parts_of_steps_are_short_to_read(seconds: float, shown: str) -> None:
    assert table.short(seconds) == shown


@pytest.mark.parametrize(("part", "shown"), [(0.0, "0 %"), (0.004, "0.4 %"), (0.099, "9.9 %"), (0.376, "38 %")])
def test_parts_of_a_whole_are_short_to_read(part: float, shown: str) -> None:
    assert table.percent(part) == shown
