"""The checks and the text of `shoal rm`."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from click.testing import CliRunner
from tests.unit.directories import ended_coordinator
from tests.unit.views import run_view

from shoal.cli.main import shoal
from shoal.cli.verbs import rm
from shoal.errors import RunStillActive, UsageError
from shoal.launch.run_lookup import CoordinatorRef
from shoal.wire.api import RunView


class Records:
    """The records of a coordinator with these runs."""

    def __init__(self, *views: RunView) -> None:
        self.views = views

    def runs(self) -> tuple[RunView, ...]:
        return self.views


def coordinator(*views: RunView, live: bool = False) -> CoordinatorRef:
    records = cast(Any, Records(*views))
    return CoordinatorRef("c1", "u", "t", Path("/home/c1"), records if live else None, records)


def test_active_run_is_refused_and_told_how_to_stop_it() -> None:
    view = run_view("a")
    with pytest.raises(RunStillActive, match="shoal stop a"):
        rm.check([(coordinator(view, live=True), view)])


def test_ended_run_of_a_live_coordinator_is_refused() -> None:
    view = run_view("a", status="done")
    with pytest.raises(RunStillActive, match="coordinator c1 of run a is still running"):
        rm.check([(coordinator(view, live=True), view)])


def test_coordinator_that_is_about_to_end_is_waited_for(tmp_path: Path) -> None:
    view = run_view("a", status="stopped")
    (tmp_path / "supervisor").write_text(str(os.getppid()))
    live = replace(coordinator(view, live=True), directory=tmp_path)
    assert rm.is_ending((live, view))
    assert not rm.is_ending((replace(live, client=None), view)), "it has ended"
    assert not rm.is_ending((live, run_view("a"))), "the run is active"
    (tmp_path / "supervisor").unlink()
    assert not rm.is_ending((live, view)), "a standing coordinator stays"


def test_runs_of_one_coordinator_are_removed_together() -> None:
    first, second = run_view("a", status="done"), run_view("b", status="failed")
    both = coordinator(first, second)
    with pytest.raises(UsageError, match="shoal rm a b"):
        rm.check([(both, first)])
    assert rm.check([(both, first), (both, second)]) == [Path("/home/c1")]


def test_rm_deletes_the_directory_unless_it_is_a_dry_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path))
    directory = ended_coordinator(tmp_path, "a")
    dry = CliRunner().invoke(shoal, ["rm", "run-a", "--dry-run"])
    assert "would remove run-a" in dry.output
    assert directory.exists()
    done = CliRunner().invoke(shoal, ["rm", "run-a"])
    assert "removed run-a" in done.output
    assert "freed" in done.output
    assert not directory.exists()
