"""When `shoal resume` may talk to a coordinator that still answers."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from shoal.cli.verbs.resume import _about_to_end
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
def test_only_an_embedded_coordinator_whose_run_is_over_is_about_to_end(
    tmp_path: Path, embedded: bool, live: bool, status: str, ends: bool
) -> None:
    if embedded:
        (tmp_path / COORDINATOR_LOG).touch()
    assert _about_to_end(coordinator(tmp_path, live), SimpleNamespace(status=status)) is ends


def test_a_coordinator_elsewhere_is_taken_as_it_is() -> None:
    assert not _about_to_end(coordinator(None, live=True), SimpleNamespace(status="stopped"))
