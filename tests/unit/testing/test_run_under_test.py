"""Reading the journal of a run that is still being written."""

from __future__ import annotations

from pathlib import Path

from shoal.testing.run_under_test import read_journal


def test_journal_line_in_mid_write_is_left_out(tmp_path: Path) -> None:
    journal = tmp_path / "journal.jsonl"
    for torn in ("", '{"kind": "Hel'):
        journal.write_text('{"kind": "CoordinatorStarted"}\n{"kind": "MemberConnected"}\n' + torn)
        assert [entry["kind"] for entry in read_journal(journal)] == ["CoordinatorStarted", "MemberConnected"]
    assert read_journal(journal, "MemberConnected") == [{"kind": "MemberConnected"}]
