"""A kill leaves the average of the weights as it would be without, and a disabled GradScaler harms no survivor."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.testing.run_under_test import RunUnderTest, closing

pytestmark = [pytest.mark.process, pytest.mark.faults, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).with_name("train_averaged.py")
STEPS = 18


def test_average_counts_every_step_once_on_all_members_after_a_kill(tmp_path: Path) -> None:
    with closing(RunUnderTest(tmp_path, SCRIPT, "2:3", ("regroup_s=60",))) as run:
        run.finish()
        assert (run.records / "died").exists()
        survivors = {event["pid"] for event in run.events_of("ready") if event["member"] != "local/1"}
        assert len(survivors) == 2, "a member that was not killed was started again"
        ends = run.events_of("after")
        assert {(end["step"], end["updates"]) for end in ends} == {(STEPS, STEPS)}, run.output
        assert len({end["average"] for end in ends}) == 1
