"""`shoal logs`: members that do not exist, and runs without output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from click.testing import CliRunner
from tests.unit.views import member_view, run_view, story_line

from shoal.cli.verbs import logs
from shoal.errors import UsageError
from shoal.launch import run_lookup
from shoal.launch.run_lookup import check_member
from shoal.wire.api import LogPage, RunView, StoryLine


class Records:
    """Records of one run with this story."""

    def __init__(self, *lines: StoryLine) -> None:
        self.lines = lines

    def runs(self) -> tuple[RunView, ...]:
        return ()

    def run(self, run: str) -> RunView:
        return run_view(run)

    def story(self, run: str, member: str = "", after: int = 0, limit: int = 1000) -> tuple[StoryLine, ...]:
        del run
        lines: Sequence[StoryLine] = [line for line in self.lines if line.seq > after and member in ("", line.member)]
        return tuple(lines[:limit])

    def logs(self, *arguments: Any) -> LogPage:
        return LogPage((), 0)


def test_unknown_member_is_an_error_with_the_existing_members() -> None:
    records = Records(story_line(1, "MemberConnected", member="spot/1"))
    view = run_view(members=(member_view("local/0"),))
    with pytest.raises(UsageError) as caught:
        check_member(records, view, "local/7")
    assert caught.value.what == "run train-7f3k has no member local/7"
    assert caught.value.do == "its members are local/0, spot/1"


def test_present_and_former_members_are_accepted() -> None:
    records = Records(story_line(1, "MemberConnected", member="spot/1"))
    check_member(records, run_view(members=(member_view("local/0"),)), "local/0")
    check_member(records, run_view(members=()), "spot/1")


def test_run_without_members_says_so() -> None:
    with pytest.raises(UsageError) as caught:
        check_member(Records(), run_view(members=()), "local/0")
    assert caught.value.do == "it has had no members yet"


@pytest.mark.parametrize(
    ("status", "options", "said"),
    [
        ("done", [], "shoal: the members of train-7f3k have printed nothing\n"),
        ("training", [], "shoal: the members of train-7f3k have printed nothing yet\n"),
        ("done", ["--member", "local/0"], "shoal: local/0 has printed nothing\n"),
    ],
)
def test_run_without_output_says_so(
    monkeypatch: pytest.MonkeyPatch, status: str, options: list[str], said: str
) -> None:
    view = run_view(status=status, members=(member_view("local/0"),))
    reference = run_lookup.CoordinatorRef("c", "", "", None, None, Records())
    monkeypatch.setattr(run_lookup, "find_run", lambda target, run: (reference, view))
    shown = CliRunner().invoke(logs.command, ["train", *options])
    assert (shown.exit_code, shown.stdout, shown.stderr) == (0, "", said)
