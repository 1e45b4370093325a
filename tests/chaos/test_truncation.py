"""A coordinator that always truncates its journal is killed at random; what it acknowledged is never forgotten."""

from __future__ import annotations

import os
import random
import sys
import threading
from http.client import HTTPException
from pathlib import Path

import pytest
from tests.process.coordinator.fakes import Coordinator

from shoal.store import journal

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1500)]

KILLS = int(os.environ.get("SHOAL_STRESS_KILLS", "20"))
# Runs the coordinator in this process; the arguments begin with those of the command it replaces.
RUNNER = """
import sys
from shoal.coordinator import compaction
from shoal.coordinator.__main__ import main
compaction.MAX_EVENTS, compaction.CHECK_S = 5, 0.005
sys.exit(main(sys.argv[4:]))
"""


def test_what_was_acknowledged_survives_any_kill_while_the_journal_is_truncated(tmp_path: Path) -> None:
    dice = random.Random(7)
    coordinator = Coordinator(tmp_path / "c", prefix=(sys.executable, "-c", RUNNER))
    run = coordinator.create(1, 1)
    acknowledged: list[int] = []
    asked = 1
    for _ in range(KILLS):
        killer = threading.Timer(dice.uniform(0.02, 0.6), coordinator.process.kill)
        killer.start()
        try:
            while True:
                asked += 1
                status, _ = coordinator.ask("POST", f"/v1/runs/{run}/scale", {"min": 1, "max": asked})
                assert status == 200
                acknowledged.append(asked)
        except (OSError, HTTPException, ValueError):
            killer.join()
        coordinator.process.wait(180)
        coordinator.restart()
        view = coordinator.view(run)
        # The last request may have been journaled without an answer.
        assert view["members_max"] in (acknowledged[-1:] or [1]) + [asked]
    told = [line for line in coordinator.story(run) if line.startswith("scaled to")]
    missing = [number for number in acknowledged if f"scaled to 1:{number} members" not in told]
    assert missing == []
    assert journal.read_snapshot(coordinator.directory) is not None
    coordinator.close()
