"""The story that `shoal why` prints."""

from __future__ import annotations

import time

import pytest
from tests.unit.views import run_view, story_line

from shoal.cli.output import incidents
from shoal.cli.verbs import why
from shoal.errors import UsageError


def test_many_share_changes_are_folded() -> None:
    many = [story_line(n, "SharesDecided", f"shares {n}", step=n) for n in range(100)]
    lines = [
        story_line(100, "MembershipNote", "local/2 is lost"),
        *many,
        story_line(101, "MembershipNote", "done"),
        *many[:8],
    ]
    text = why.text(run_view(), lines)
    assert len(text.splitlines()) == 1 + 1 + 7 + 1 + 8 + 1
    assert "… 94 more changes of shares; shoal why --json shows them all" in text
    assert "shares 2\n" in text
    assert "shares 97\n" in text


def test_story_of_a_member_has_the_share_changes_of_its_time() -> None:
    lines = [
        story_line(1, "SharesDecided", "before its time"),
        story_line(2, "MemberConnected", "local/1 connected", member="local/1"),
        story_line(3, "MemberConnected", "local/0 connected", member="local/0"),
        story_line(4, "SharesDecided", "it is slow"),
        story_line(5, "ProcessExited", "local/1 ended", member="local/1"),
        story_line(6, "BatchDecided", "after its time"),
    ]
    assert [line.seq for line in why.member_story(lines, "local/1")] == [2, 4, 5]
    assert [line.seq for line in why.member_story(lines, "local/0")] == [3, 4, 6], "it is still there"
    assert why.member_story(lines, "local/7") == []


def test_since_is_a_span_a_time_of_today_or_a_date() -> None:
    noon = time.mktime((2026, 11, 17, 12, 0, 0, 0, 0, -1))
    assert why.parse_since("10m", noon) == noon - 600
    assert why.parse_since("11:30", noon) == noon - 1800
    assert why.parse_since("2026-11-16 12:00", noon) == noon - 86400
    for wrong in ("soon", "25:00", "10"):
        with pytest.raises(UsageError, match="--since"):
            why.parse_since(wrong, noon)


def test_unknown_kind_is_refused_with_the_nearest() -> None:
    assert why.parse_kinds("loss, join") == ("loss", "join")
    with pytest.raises(UsageError, match="did you mean loss"):
        why.parse_kinds("los")


def test_digest_shows_kinds_and_how_to_see_everything() -> None:
    lost = incidents.digest([story_line(1, "MemberLost", "local/1 is lost: killed", member="local/1")])
    text = why.digest_text(run_view(), lost)
    assert "INCIDENT" in text
    assert "loss" in text
    assert text.endswith("now: training; shoal why train-7f3k --all shows every line")
    assert why.digest_text(run_view(), []).startswith("no incidents")


def test_reason_of_a_failed_run_is_said_once() -> None:
    view = run_view(status="failed", reason="KeyError: 'loss'\n  do: fix the script")
    failed = incidents.digest([story_line(1, "RunFailed", "the run failed: KeyError: 'loss'\n  do: fix the script")])
    assert why.digest_text(view, failed).count("KeyError") == 1
    assert "now: failed, KeyError: 'loss'   do: fix the script" in why.digest_text(view, [])
