"""`shoal prune`."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.unit.directories import ended_coordinator

from shoal.cli.main import shoal


def test_prune_removes_old_runs_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path))
    old, new = ended_coordinator(tmp_path, "old"), ended_coordinator(tmp_path, "new", time.time())
    assert "would free" in CliRunner().invoke(shoal, ["prune", "--older-than", "7d", "--dry-run"]).output
    assert old.exists()
    assert "removed run-old" in CliRunner().invoke(shoal, ["prune", "--older-than", "7d"]).output
    assert not old.exists()
    assert new.exists()
    assert "nothing to remove" in CliRunner().invoke(shoal, ["prune", "--older-than", "7d"]).output


@pytest.mark.parametrize("age", ["7", "d", "-1d", "7w", ""])
def test_age_without_a_unit_is_refused(age: str) -> None:
    result = CliRunner().invoke(shoal, ["prune", "--older-than", age])
    assert result.exit_code == 2
    assert "7d" in result.output
