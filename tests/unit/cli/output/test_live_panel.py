"""The live panel of a run."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.console import Console
from tests.unit.views import balanced_run, member_view, run_view, story_line

from shoal.cli.output import live_panel
from shoal.wire.api import ForecastView


def drawn(renderable: Any, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(renderable)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_panel_shows_the_run_its_members_and_events() -> None:
    text = drawn(live_panel.render(run_view(), [(100.0, "local/2 is lost: killed by signal 9")], now=112.5))
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


def test_panel_of_many_members_stays_small() -> None:
    many = tuple(member_view(f"m{n}/0", rank=n) for n in range(50))
    text = drawn(live_panel.render(run_view(members=many), [], now=100.0))
    assert "and 38 more" in text
    assert len(text.splitlines()) < 20


def test_panel_shows_silent_members_and_why_a_run_waits() -> None:
    silent = member_view("local/0", connected=False, heartbeat_age_s=4.0)
    view = run_view(status="waiting", reason="1 of at least 2 members is present", members=(silent,), total_steps=None)
    text = drawn(live_panel.render(view, [], now=100.0))
    assert "silent for 4.0 s" in text
    assert "1 of at least 2 members is present" in text


@pytest.mark.parametrize("width", [20, 40, 79])
def test_panel_fits_narrow_terminals(width: int) -> None:
    view = run_view(reason="x" * 300, status="waiting", metrics={"a" * 50: 1.0})
    assert all(
        len(line) <= width for line in drawn(live_panel.render(view, [(1.0, "y" * 300)], 100.0), width).splitlines()
    )


def test_markup_in_the_output_of_members_is_plain_text() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    shown = live_panel.Panel(console)
    shown.logs([("local/0", "[bold]not markup[/nonsense]")])
    shown.close()
    assert "[bold]not markup[/nonsense]" in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [75, 120])
def test_panel_shows_shares_and_the_parts_of_a_step(width: int) -> None:
    text = drawn(live_panel.render(balanced_run(), [], now=100.0, width=width), width)
    assert re.search(r"batch 64 +noise scale 1 310 +idle 1.7 % \(38 % with equal shares\)", text)
    assert "shares from step 12: local/1 is slow: 51, 13 instead of 32, 32" in text
    assert re.search(r"member +status.* share +data +compute +wait +exchange", text)
    assert re.search(r"local/0 .* 51 +0.3 ms +51 ms +1.2 ms +4.0 ms", text)
    assert re.search(r"local/1 .* 13 +0.3 ms +52 ms +0.0 ms +4.0 ms", text)
    assert re.search(r"local/2 +spare( +compute)? +│", text)
    assert ("samples/s" in text.split("member", 2)[2]) == (width > 100)


def test_narrow_panel_shows_silent_and_stuck_members() -> None:
    silent = member_view("local/0", rank=0, connected=False, heartbeat_age_s=4.0)
    stuck = member_view("local/1", rank=1, phase="exchange", phase_age_s=7.0)
    text = drawn(live_panel.render(run_view(members=(silent, stuck)), [], now=100.0, width=75), 75)
    assert "silent for 4.0 s" in text
    assert "exchange for 7.0 s" in text


def test_share_changes_do_not_push_out_other_events() -> None:
    console = Console(file=io.StringIO(), width=120, force_terminal=True)
    shown = live_panel.Panel(console)
    shown.story([story_line(1, "MembershipNote", "local/2 is lost")])
    shown.story([story_line(n, "SharesDecided", f"shares {n}") for n in range(2, 50)])
    shown.view(run_view())
    shown.close()
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "local/2 is lost" in text
    assert "shares 49" not in text


def test_panel_obeys_no_escape_codes_of_others() -> None:
    evil = "\x1b]0;x\x07"
    view = run_view(name=evil, status="waiting", reason=evil, metrics={evil: 1.0}, members=(member_view(evil, rank=0),))
    assert "\x1b" not in drawn(live_panel.render(view, [], now=100.0))


def test_panel_shows_the_time_left() -> None:
    left = run_view(forecast=ForecastView(600.0, 500.0, 700.0, 0.9))
    assert "about 10 min left" in drawn(live_panel.render(left, [], now=100.0))
