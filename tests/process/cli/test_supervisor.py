"""How a supervisor starts and stops its coordinator."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from shoal.errors import ServiceFailed
from shoal.launch import supervisor as launch_supervisor
from shoal.launch.launch_plan import LaunchPlan
from shoal.launch.supervisor import Supervisor
from shoal.wire.pool_files import CoordinatorPools

pytestmark = pytest.mark.process

# Takes longer than the supervisor would wait for a coordinator that reports nothing.
COORDINATOR = """
import os, sys, time
from pathlib import Path
from shoal.wire.pool_files import ReleaseProgress, write_release_progress

where, lifeline = Path(sys.argv[1]), int(sys.argv[sys.argv.index("--lifeline") + 1])
(where / "ready").touch()
os.read(lifeline, 1)
for remaining in range(40, 0, -1):
    write_release_progress(where, ReleaseProgress(remaining, time.time() + 60.0))
    time.sleep(0.1)
(where / "released").touch()
"""


def test_coordinator_is_not_killed_before_its_machines_are_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_supervisor, "RELEASE_GRACE_S", 2.0)
    argv = (sys.executable, "-c", COORDINATOR, str(tmp_path))
    supervisor = Supervisor(LaunchPlan(str(tmp_path), argv, (), pools=CoordinatorPools({})))
    supervisor._coordinator.start()
    while not (tmp_path / "ready").exists():
        assert supervisor._coordinator.running()
    notes: list[str] = []
    supervisor.close(None, notes.append)
    assert (tmp_path / "released").exists()
    assert "releasing" in notes[0]
    assert "this may take" in notes[0]
    assert not supervisor._coordinator.running()


def test_failed_start_names_a_log_that_exists(tmp_path: Path) -> None:
    argv = (sys.executable, "-c", "raise SystemExit('port taken')")
    supervisor = Supervisor(LaunchPlan(str(tmp_path / "new"), argv, (), creates_directory=True))
    with pytest.raises(ServiceFailed) as failed:
        supervisor.open()
    assert failed.value.why == "port taken"
    assert Path(failed.value.where).read_text() == "port taken\n"
