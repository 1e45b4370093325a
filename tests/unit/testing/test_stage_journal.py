"""What a stage reads of a run that goes on."""

from __future__ import annotations

from pathlib import Path

from shoal.testing.run_under_test import Stage


def test_a_line_of_the_journal_that_is_being_written_is_not_read_yet(tmp_path: Path) -> None:
    stage = Stage.__new__(Stage)
    stage.home = tmp_path
    (tmp_path / "coordinators" / "c").mkdir(parents=True)
    journal = tmp_path / "coordinators" / "c" / "journal.jsonl"
    for torn in ("", '{"kind": "Hel'):
        journal.write_text('{"kind": "Opened"}\n{"kind": "Hello"}\n' + torn)
        assert [entry["kind"] for entry in stage.journal()] == ["Opened", "Hello"]
    assert stage.journal("Hello") == [{"kind": "Hello"}]
