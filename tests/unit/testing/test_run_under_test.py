"""What a stage reads of a run that goes on."""

from __future__ import annotations

from pathlib import Path

from shoal.testing.run_under_test import RunUnderTest


def test_a_line_of_the_journal_that_is_being_written_is_not_read_yet(tmp_path: Path) -> None:
    stage = RunUnderTest.__new__(RunUnderTest)
    stage.home = tmp_path
    (tmp_path / "coordinators" / "c").mkdir(parents=True)
    journal = tmp_path / "coordinators" / "c" / "journal.jsonl"
    for torn in ("", '{"kind": "Hel'):
        journal.write_text('{"kind": "CoordinatorStarted"}\n{"kind": "MemberConnected"}\n' + torn)
        assert [entry["kind"] for entry in stage.journal()] == ["CoordinatorStarted", "MemberConnected"]
    assert stage.journal("MemberConnected") == [{"kind": "MemberConnected"}]
