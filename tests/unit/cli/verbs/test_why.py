"""The story that `shoal why` prints."""

from __future__ import annotations

from tests.unit.views import run_view, story_line

from shoal.cli.verbs import why


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
