"""How a run is shown."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console

from shoal.cli import panel, table
from shoal.cli.display import Forgiving, JsonLines, Plain, progress, sentence


def drawn(renderable: Any, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(renderable)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_a_panel_shows_the_run_its_members_and_what_happened(make: Any) -> None:
    text = drawn(panel.render(make.run(), [(100.0, "local/2 is lost: killed by signal 9")], now=112.5))
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
    text = drawn(panel.render(make.run(members=many), [], now=100.0))
    assert "and 38 more" in text
    assert len(text.splitlines()) < 20


def test_a_panel_says_who_is_silent_and_why_a_run_waits(make: Any) -> None:
    silent = make.member("local/0", connected=False, beat_age_s=4.0)
    view = make.run(status="waiting", reason="1 of at least 2 members are present", members=(silent,), total_steps=None)
    text = drawn(panel.render(view, [], now=100.0))
    assert "silent for 4.0 s" in text
    assert "1 of at least 2 members are present" in text


@pytest.mark.parametrize("width", [20, 40, 79])
def test_a_panel_fits_narrow_terminals(make: Any, width: int) -> None:
    view = make.run(reason="x" * 300, status="waiting", metrics={"a" * 50: 1.0})
    assert all(len(line) <= width for line in drawn(panel.render(view, [(1.0, "y" * 300)], 100.0), width).splitlines())


def test_markup_in_what_members_print_is_only_text() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    shown = panel.Panel(console)
    shown.logs([("local/0", "[bold]not markup[/nonsense]")])
    shown.close()
    assert "[bold]not markup[/nonsense]" in console.file.getvalue()  # type: ignore[attr-defined]


def test_plain_lines_come_with_their_member_and_progress_now_and_then(make: Any) -> None:
    said: list[str] = []
    now = [0.0]
    shown = Plain(said.append, clock=lambda: now[0], every_s=10.0)
    for second in range(21):
        now[0] = float(second)
        shown.view(make.run(step=second))
    shown.logs([("local/1", "epoch 0")])
    shown.story([make.line(1, "Say", "local/2 is lost", reason="signal 9")])
    assert [line.split("/")[0] for line in said[:3]] == ["step 0", "step 10", "step 20"]
    assert said[3:] == ["local/1 | epoch 0", "shoal: local/2 is lost (signal 9)"]


def test_quiet_leaves_only_what_members_print(make: Any) -> None:
    said: list[str] = []
    shown = Plain(said.append, quiet=True)
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
    shown.story([make.line(1, "Say", "x")])
    assert [json.loads(line)["event"] for line in said] == ["progress", "log", "story"]


def test_a_terminal_that_is_gone_does_not_end_the_supervision(make: Any) -> None:
    def broken(text: str) -> None:
        raise OSError(5, "Input/output error")

    shown = Forgiving(Plain(broken))
    shown.note("hello")
    shown.view(make.run())


def test_a_reason_that_is_in_the_text_is_not_said_twice(make: Any) -> None:
    assert sentence(make.line(1, "Say", "lost: signal 9", reason="signal 9")) == "lost: signal 9"


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
