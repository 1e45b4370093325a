"""Thirty random faults in one Keras run, after which everybody holds the same parameters and no sample is lost."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from shoal.testing.conformance import KERAS_TENSORFLOW, FrameworkScript, TaskRun
from shoal.testing.run_under_test import closing
from shoal.testing.scripts.task import TrainingTask

pytestmark = [pytest.mark.keras, pytest.mark.process, pytest.mark.timeout(300)]
if KERAS_TENSORFLOW.missing:
    pytest.skip("Keras on TensorFlow is not installed", allow_module_level=True)

FAULTS = int(os.environ.get("SHOAL_KERAS_FAULTS", "30"))
# On a busy machine there are fewer faults, a third at the least, not a longer test.
LIMIT_S, LEAST = 2.3 * FAULTS, FAULTS // 3
MOST = 3
FAULTY = FrameworkScript("faulty keras", Path(__file__).with_name("faulty.py"), KERAS_TENSORFLOW.environ)
CALM = ("lease_s=2", "restarts.infrastructure=100000", "backoff_s=0.05", "backoff_max_s=0.2")
# Metrics are sums of single steps, in another order.
LOSS_BOUND = 1e-6


class Storm:
    """Random faults, each only if the run can bear it: one member of the newest world is spared."""

    def __init__(self, run: TaskRun, dice: random.Random) -> None:
        self._run, self._dice = run, dice
        self._doomed: set[int] = set()
        self._stopped: list[tuple[float, int]] = []
        self._name, self._wanted = run.name, MOST
        self.faults: list[str] = []

    def strike(self) -> None:
        """One more fault, unless nobody can be spared now."""
        kind = self._dice.choices(["kill", "two", "notice", "hang", "scale"], [12, 2, 3, 1, 2])[0]
        if kind == "scale":
            self._wanted = self._dice.choice([one for one in range(2, MOST + 1) if one != self._wanted])
            self._run.shoal("scale", self._name, f"1:{self._wanted}")
            self.faults.append(f"scale {self._wanted}")
            return
        alive = {pid for pid in self._run.pids().values() if pid not in self._doomed}
        commits = self._run.commits()
        newest = max(commit["world"] for commit in commits)
        holders = {commit["pid"] for commit in commits[-40:] if commit["world"] == newest} & alive
        count = 2 if kind == "two" else 1
        if len(holders) <= count:
            return
        spared = self._dice.choice(sorted(holders))
        for pid in self._dice.sample(sorted(alive - {spared}), count):
            self._doomed.add(pid)
            os.kill(pid, {"notice": signal.SIGTERM, "hang": signal.SIGSTOP}.get(kind, signal.SIGKILL))
            if kind == "hang":
                self._stopped.append((time.monotonic() + self._dice.uniform(0.2, 4.0), pid))
        self.faults.append(kind)

    def wake(self, everybody: bool = False) -> None:
        """Those that have hung long enough go on."""
        for one in [one for one in self._stopped if everybody or time.monotonic() > one[0]]:
            self._stopped.remove(one)
            if one[1] in self._run.pids().values():
                os.kill(one[1], signal.SIGCONT)
                self._doomed.discard(one[1])


def test_random_faults_lose_and_repeat_nothing(tmp_path: Path) -> None:
    seed = int(os.environ.get("SHOAL_STRESS_SEED", str(random.SystemRandom().randrange(10**6))))
    dice = random.Random(seed)
    task = TrainingTask(epochs=100_000, pause_s=0.02)
    with closing(TaskRun(tmp_path, FAULTY, f"1:{MOST}", CALM, task=task)) as run:
        run.until_size(MOST)
        storm = Storm(run, dice)
        deadline = time.monotonic() + LIMIT_S
        while len(storm.faults) < (FAULTS if time.monotonic() < deadline else LEAST):
            assert run.process.poll() is None, run.output[-6000:]
            storm.strike()
            time.sleep(dice.uniform(0.1, 1.2))
            storm.wake()
        storm.wake(everybody=True)
        print(f"seed {seed}, {len(storm.faults)} faults: {', '.join(storm.faults)}")
        assert run.process.poll() is None, run.output[-6000:]
        run.shoal("stop", run.name)
        run.finish(exit_code=75)
        steps = run.step() + 1
        run.check_steps(steps)
        last = [commit for commit in run.commits() if commit["step"] == steps - 1]
        assert len({tuple(commit["parameters"]) for commit in last}) == 1
        reference = task.losses(task.trajectory(steps))
        for one in run.events_of("epoch"):
            assert abs(one["loss"] - reference[one["epoch"]]) < LOSS_BOUND, f"{one['member']} saw another loss: {one}"
        print(f"{steps} steps, {len({commit['world'] for commit in run.commits()})} worlds")
