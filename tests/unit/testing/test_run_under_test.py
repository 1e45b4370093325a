"""Reading the journal of a run that is still being written."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.testing.run_under_test import RunUnderTest, read_journal


def test_journal_line_in_mid_write_is_left_out(tmp_path: Path) -> None:
    journal = tmp_path / "journal.jsonl"
    for torn in ("", '{"kind": "Hel'):
        journal.write_text('{"kind": "CoordinatorStarted"}\n{"kind": "MemberConnected"}\n' + torn)
        assert [entry["kind"] for entry in read_journal(journal)] == ["CoordinatorStarted", "MemberConnected"]
    assert read_journal(journal, "MemberConnected") == [{"kind": "MemberConnected"}]


def test_journal_without_its_beginning_is_no_evidence(tmp_path: Path) -> None:
    """A run of many events truncates its journal; the checks then saw a part, and passed."""
    journal = tmp_path / "journal.jsonl"
    journal.write_text('{"seq": 5001, "kind": "WorldEntered"}\n')
    with pytest.raises(AssertionError, match="begins with event 5001"):
        read_journal(journal)


def commits(*records: tuple[str, int, int]) -> RunUnderTest:
    """Return a run whose members recorded these commits, as (member, step, world)."""
    run = RunUnderTest.__new__(RunUnderTest)
    events = [{"event": "commit", "member": m, "pid": 1, "step": step, "world": world} for m, step, world in records]
    run.events = lambda: events  # type: ignore[method-assign]
    return run


def test_worlds_of_a_run_only_go_forward() -> None:
    commits(("a", 0, 1), ("b", 0, 1), ("a", 1, 1), ("b", 1, 2), ("a", 2, 2)).check_worlds()
    with pytest.raises(AssertionError, match="worlds went back for a, process 1"):
        commits(("a", 0, 2), ("a", 1, 1)).check_worlds()
    with pytest.raises(AssertionError, match="worlds went back for the run"):
        commits(("a", 0, 2), ("b", 1, 1)).check_worlds()
