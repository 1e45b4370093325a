"""Whoever waits for a coordinator to end waits until it has given back what it hired."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from shoal.launch import supervisor as launch_supervisor
from shoal.launch.launch_plan import LaunchPlan
from shoal.launch.supervisor import Supervisor
from shoal.wire.pool_files import CoordinatorPools

pytestmark = pytest.mark.process

# It takes longer than anybody would wait for one that says nothing.
COORDINATOR = """
import os, sys, time
from pathlib import Path
from shoal.wire.pool_files import ReleaseProgress, say_leaving

where, lifeline = Path(sys.argv[1]), int(sys.argv[sys.argv.index("--lifeline") + 1])
(where / "ready").touch()
os.read(lifeline, 1)
for left in range(40, 0, -1):
    say_leaving(where, ReleaseProgress(left, time.time() + 60.0))
    time.sleep(0.1)
(where / "given back").touch()
"""


def test_a_coordinator_is_not_killed_before_it_has_given_back_what_it_hired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_supervisor, "HIRES_GRACE_S", 2.0)
    argv = (sys.executable, "-c", COORDINATOR, str(tmp_path))
    supervisor = Supervisor(LaunchPlan(str(tmp_path), argv, (), hires=CoordinatorPools({})))
    supervisor._coordinator.start()
    while not (tmp_path / "ready").exists():
        assert supervisor._coordinator.running()
    said: list[str] = []
    supervisor.close(None, said.append)
    assert (tmp_path / "given back").exists()
    assert said
    assert "giving back" in said[0]
    assert "which may take" in said[0]
    assert not supervisor._coordinator.running()
