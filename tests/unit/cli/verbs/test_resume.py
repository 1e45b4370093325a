"""When `shoal resume` waits for a coordinator to end before it starts another."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.unit.views import run_view

from shoal.cli.verbs.resume import _is_shutting_down, done_error
from shoal.launch.supervisor import COORDINATOR_LOG


def coordinator(directory: Path | None, live: bool) -> SimpleNamespace:
    return SimpleNamespace(client=object() if live else None, directory=directory)


@pytest.mark.parametrize(
    ("embedded", "live", "status", "ends"),
    [
        (True, True, "stopped", True),
        (True, True, "training", False),
        (True, False, "stopped", False),
        (False, True, "stopped", False),
    ],
)
def test_only_the_coordinator_of_an_ended_shoal_run_is_shutting_down(
    tmp_path: Path, embedded: bool, live: bool, status: str, ends: bool
) -> None:
    if embedded:
        (tmp_path / COORDINATOR_LOG).touch()
    assert _is_shutting_down(coordinator(tmp_path, live), SimpleNamespace(status=status)) is ends


def test_remote_coordinator_is_never_waited_for() -> None:
    assert not _is_shutting_down(coordinator(None, live=True), SimpleNamespace(status="stopped"))


def test_done_run_is_answered_with_what_works() -> None:
    assert done_error(run_view(status="done")).do == (
        "to train again, start a new run; shoal status train-7f3k shows what this one left"
    )
