"""Local training: members are killed during a round, join and leave; no sample is lost or repeated."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.process.faults.checked_run import CheckedRun

from shoal.core.data.rounds import RoundOrder

pytestmark = [pytest.mark.process, pytest.mark.faults, pytest.mark.timeout(600)]

LENGTH = 4
POINTS = ("forward", "backward", "before the optimizer", "in the optimizer", "after")
# A member that is late for the first world would miss the round in which it is to die.
ALL = ("regroup_s=60",)


class LocalRun(CheckedRun):
    """A run in local mode, whose steps are rounds."""

    def __init__(self, path: Path, members: str, settings: tuple[str, ...] = (), **plan: Any) -> None:
        super().__init__(path, members, (f"sync=local:{LENGTH}", *settings), **plan)

    def order(self) -> RoundOrder:
        plan = self.plan
        return RoundOrder.of(plan.get("samples", 512), plan.get("batch", 64), LENGTH, plan.get("epochs", 4), 5)

    def check(self) -> None:
        """Fail unless each sample counted once an epoch and all members agree after every round."""
        total = self.order().total_steps
        self.check_steps(total)
        done = [e for e in self.events() if e["event"] == "done"]
        assert done
        assert len({e["alike"] for e in done}) == 1, "members end with different parameters or schedules"
        finished = [e["fields"]["step"] for e in self.journal() if e["kind"] == "MemberDone"]
        assert set(finished) == {total}


@contextlib.contextmanager
def local_run(path: Path, members: str, **how: Any) -> Iterator[LocalRun]:
    stage = LocalRun(path, members, **how)
    try:
        yield stage
    finally:
        stage.close()


def test_kill_at_any_point_of_a_round_costs_no_sample(tmp_path: Path) -> None:
    # Die in the middle of a round and, in every other round, in its first batch. With learned shares a member could
    # have fewer batches than that.
    deaths = [
        {"member": f"local/{i}", "step": 2 + 2 * i, "point": point, "piece": i % 3} for i, point in enumerate(POINTS)
    ]
    with local_run(tmp_path, "2:5", settings=ALL, die=deaths, pause_s=0.02, epochs=8, shares="equal") as run:
        run.finish()
        run.check()
        killed = [e for e in run.journal() if e["kind"] == "ProcessExited" and e["fields"]["signal"] == 9]
        assert len(killed) == len(POINTS)


def test_kill_at_the_end_of_a_round_costs_no_sample(tmp_path: Path) -> None:
    # With equal shares every member has LENGTH batches a round: the last one is number LENGTH - 1.
    deaths = [
        {"member": f"local/{i}", "step": 2 + 3 * i, "point": point, "piece": LENGTH - 1}
        for i, point in enumerate(("before the optimizer", "in the optimizer", "after"))
    ]
    with local_run(tmp_path, "2:3", settings=ALL, die=deaths, pause_s=0.02, epochs=8, shares="equal") as run:
        run.finish()
        run.check()
        killed = [e for e in run.journal() if e["kind"] == "ProcessExited" and e["fields"]["signal"] == 9]
        # After the last batch of a round, the member already counts the next round's step.
        assert len(killed) >= 2


def test_joining_members_receive_the_state_and_the_outer_momentum(tmp_path: Path) -> None:
    settings = ("outer.lr=0.7", "outer.momentum=0.5")
    with local_run(tmp_path, "1:4", settings=settings, pause_s=0.03, epochs=16) as run:
        run.until_size(4)
        for name in ("local/0", "local/2", "local/3"):
            run.kill(name)
        run.until(lambda: any(c["size"] == 1 for c in run.commits()), "a world of one")
        run.until(lambda: run.world_size() > 1, "a member to come back")
        run.finish()
        run.check()


def test_notice_during_a_round_takes_effect_at_its_end(tmp_path: Path) -> None:
    with local_run(tmp_path, "2:3", pause_s=0.03, epochs=12) as run:
        run.until_size(3)
        run.kill("local/1", signal.SIGTERM)
        run.finish()
        run.check()
        broken = [e for e in run.journal() if e["kind"] == "WorldBroken"]
        assert not broken, "a planned change broke a round"


def test_stopped_run_resumes_at_the_exact_round_with_another_number_of_members(tmp_path: Path) -> None:
    with local_run(tmp_path, "3:3", settings=("outer.momentum=0.5",), pause_s=0.05, epochs=12) as run:
        run.until_step(3)
        name = run.shoal("ps")[0]["run"]
        run.shoal("stop", name)
        run.process.wait(180)
        stopped = run.step()
        assert 3 <= stopped < 23
        run.process = run.start("resume", name, "-n", "2:2")
        run.finish()
        resumed = [c["step"] for c in run.commits() if c["size"] == 2]
        assert min(resumed) == stopped + 1
        run.check()


def test_unmodified_script_cannot_train_in_rounds(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "shoal.cli.main", "run", "--compat", "torchrun", "--sync", "local:2", __file__]
    environ = {**os.environ, "SHOAL_HOME": str(tmp_path)}
    refused = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=180, check=False)
    assert refused.returncode == 3
    assert "S103" in refused.stderr
