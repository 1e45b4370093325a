"""Real runs on emulated machines: a slow member is slow, the others wait for it, and the result is the same."""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.process.faults.checked_run import CheckedRun

from shoal.testing.emulated_speeds import machines, step_s

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

BATCH = 32
FAST_S, SLOW_S = 0.032, 0.128
# A member may lose its core between reading the data and starting to count again.
NEARLY = 0.9
COST = machines(1, 0.25, sample_s=FAST_S / (BATCH // 2))


class EmulatedRun(CheckedRun):
    """A run with --emulate."""

    def __init__(self, path: Path, speeds: str, members: str, **plan: Any) -> None:
        self._speeds = speeds
        super().__init__(path, members, shares="equal", **plan)

    def begin(self, *arguments: str) -> subprocess.Popen[bytes]:
        return self.start("run", "--emulate", self._speeds, *arguments)

    def seen(self, what: str, member: str, steps: range) -> list[float]:
        """Return a field of a member's commits with a share, without the first commit of each process."""
        own = [e for e in self.events() if e["member"] == member]
        begun = {e["pid"]: min(c["step"] for c in own if c["pid"] == e["pid"] and "step" in c) for e in own}
        later = [e for e in own if e["event"] == "commit" and e["ids"] and e["step"] > begun[e["pid"]]]
        return [e[what] for e in later if e["step"] in steps]


@contextlib.contextmanager
def emulated_run(path: Path, speeds: str, members: str = "2:2", **plan: Any) -> Iterator[EmulatedRun]:
    stage = EmulatedRun(path, speeds, members, **plan)
    try:
        yield stage
    finally:
        stage.close()


def usual(times_s: list[float]) -> float:
    """Return the lower quartile: other load on the machine makes steps longer, never shorter."""
    assert len(times_s) >= 4
    return statistics.quantiles(times_s, n=4)[0]


def test_quarter_speed_takes_about_four_times_as_long_and_computes_the_same(tmp_path: Path) -> None:
    with emulated_run(tmp_path, "1,0.25", samples=4096, batch=512, epochs=8, width=256) as run:
        run.finish()
        run.check()
        steps = range(64)
        # The shortest steps: a busy machine lengthens the work of both, but not the sleep of the slow one.
        fast_s, slow_s = (min(run.seen("busy_s", member, steps)) for member in ("local/0", "local/1"))
        assert 1.7 < slow_s / fast_s < 12
        fast_waits_s, slow_waits_s = (usual(run.seen("wait_s", member, steps)) for member in ("local/0", "local/1"))
        assert fast_waits_s > slow_waits_s, "the fast member does not wait for the slow one"
        assert fast_waits_s > (slow_s - fast_s) / 2, "the fast member does not wait long enough"


def test_fixed_cost_holds_for_every_step_of_every_member(tmp_path: Path) -> None:
    with emulated_run(tmp_path, COST, batch=BATCH, epochs=2) as run:
        run.finish()
        run.check()
        for member, cost_s in (("local/0", FAST_S), ("local/1", SLOW_S)):
            took_s = run.seen("busy_s", member, range(32))
            assert min(took_s) > NEARLY * cost_s
        assert step_s(COST, (BATCH // 2, BATCH // 2)) == pytest.approx(SLOW_S)


def test_speed_changes_at_the_scheduled_step(tmp_path: Path) -> None:
    cost = machines(1, "1:0.25@12:1@24", sample_s=FAST_S / (BATCH // 2))
    with emulated_run(tmp_path, cost, batch=BATCH, epochs=3) as run:
        run.finish()
        run.check()
        slow, before, after = range(12, 24), range(12), range(24, 48)
        assert min(run.seen("busy_s", "local/1", slow)) > NEARLY * SLOW_S
        for steps in (before, after):
            assert min(run.seen("busy_s", "local/1", steps)) < SLOW_S / 2
        assert min(run.seen("busy_s", "local/0", slow)) < SLOW_S / 2


def test_restarted_member_keeps_its_speed(tmp_path: Path) -> None:
    with emulated_run(tmp_path, COST, "1:2", batch=BATCH, epochs=6) as run:
        run.until_size(2)
        first = run.pids()["local/1"]
        run.kill("local/1")
        run.until(lambda: run.pids().get("local/1", first) != first, "local/1 to be back")
        run.until(lambda: run.world_size() == 2 and _shares_after_restart(run, first) > 5, "local/1 to have a share")
        run.finish()
        run.check()
        restarted = [e for e in run.commits() if e["member"] == "local/1" and e["pid"] != first and e["ids"]]
        assert all(e["busy_s"] > NEARLY * FAST_S * 4 * len(e["ids"]) / (BATCH // 2) for e in restarted)


def test_invalid_setting_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with emulated_run(tmp_path, "1,0.5>0.25@9") as run:
        run.finish(exit_code=3, timeout_s=60)
        assert "S122" in run.output
        assert "did you mean 0.5:0.25@9?" in run.output
        assert not list(run.home.glob("coordinators/*"))


def test_unmodified_script_cannot_be_slowed_down(tmp_path: Path) -> None:
    environ = {**os.environ, "SHOAL_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "shoal.cli.main", "run", "--compat", "torchrun", "--emulate", "1,0.5", __file__]
    refused = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=180, check=False)
    assert refused.returncode == 3
    assert "--emulate does not work with --compat torchrun" in refused.stderr


def _shares_after_restart(run: CheckedRun, first: int) -> int:
    return sum(e["member"] == "local/1" and e["pid"] != first and bool(e["ids"]) for e in run.commits())
