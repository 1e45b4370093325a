"""Thirty random faults in one Keras run: all members end with the same parameters, and no sample is lost."""

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

pytestmark = [pytest.mark.keras, pytest.mark.process, pytest.mark.timeout(600)]
if KERAS_TENSORFLOW.missing:
    pytest.skip("Keras on TensorFlow is not installed", allow_module_level=True)

FAULTS = int(os.environ.get("SHOAL_KERAS_FAULTS", "30"))
# A busy machine gets fewer faults, at least a third, rather than a longer test.
LIMIT_S, MIN_FAULTS = 2.3 * FAULTS, FAULTS // 3
MAX_MEMBERS = 3
FAULTY = FrameworkScript("faulty keras", Path(__file__).with_name("train_faulty.py"), KERAS_TENSORFLOW.environ)
SETTINGS = ("lease_s=2", "restarts.infrastructure=100000", "backoff_s=0.05", "backoff_max_s=0.2")
# Metrics are summed in another order than in the reference.
LOSS_BOUND = 1e-6


class RandomFaults:
    """Random faults, none of which the run cannot survive: one member of the newest world is spared."""

    def __init__(self, run: TaskRun, dice: random.Random) -> None:
        self._run, self._dice = run, dice
        self._faulted: set[int] = set()
        self._stopped: list[tuple[float, int]] = []
        self._name, self._wanted = run.name, MAX_MEMBERS
        self.done: list[str] = []

    def cause_fault(self) -> None:
        """Cause one fault, unless too few members hold the state."""
        kind = self._dice.choices(["kill", "two", "notice", "hang", "scale"], [12, 2, 3, 1, 2])[0]
        if kind == "scale":
            self._wanted = self._dice.choice([count for count in range(2, MAX_MEMBERS + 1) if count != self._wanted])
            self._run.shoal("scale", self._name, f"1:{self._wanted}")
            self.done.append(f"scale {self._wanted}")
            return
        alive = {pid for pid in self._run.pids().values() if pid not in self._faulted}
        commits = self._run.commits()
        newest = max(commit["world"] for commit in commits)
        holders = {commit["pid"] for commit in commits[-40:] if commit["world"] == newest} & alive
        count = 2 if kind == "two" else 1
        if len(holders) <= count:
            return
        spared = self._dice.choice(sorted(holders))
        for pid in self._dice.sample(sorted(alive - {spared}), count):
            self._faulted.add(pid)
            os.kill(pid, {"notice": signal.SIGTERM, "hang": signal.SIGSTOP}.get(kind, signal.SIGKILL))
            if kind == "hang":
                self._stopped.append((time.monotonic() + self._dice.uniform(0.2, 4.0), pid))
        self.done.append(kind)

    def resume(self, at_once: bool = False) -> None:
        """Resume processes that have been stopped long enough; all of them with `at_once`."""
        for due, pid in [stopped for stopped in self._stopped if at_once or time.monotonic() > stopped[0]]:
            self._stopped.remove((due, pid))
            if pid in self._run.pids().values():
                os.kill(pid, signal.SIGCONT)
                self._faulted.discard(pid)


def test_random_faults_lose_and_repeat_nothing(tmp_path: Path) -> None:
    seed = int(os.environ.get("SHOAL_STRESS_SEED", "1"))
    dice = random.Random(seed)
    task = TrainingTask(epochs=100_000, pause_s=0.02)
    with closing(TaskRun(tmp_path, FAULTY, f"1:{MAX_MEMBERS}", SETTINGS, task=task)) as run:
        run.until_size(MAX_MEMBERS)
        faults = RandomFaults(run, dice)
        deadline = time.monotonic() + LIMIT_S
        while len(faults.done) < (FAULTS if time.monotonic() < deadline else MIN_FAULTS):
            assert run.process.poll() is None, run.output[-6000:]
            faults.cause_fault()
            time.sleep(dice.uniform(0.1, 1.2))
            faults.resume()
        faults.resume(at_once=True)
        print(f"seed {seed}, {len(faults.done)} faults: {', '.join(faults.done)}")
        assert run.process.poll() is None, run.output[-6000:]
        run.shoal("stop", run.name)
        run.finish(exit_code=75)
        steps = run.step() + 1
        run.check_steps(steps)
        last = [commit for commit in run.commits() if commit["step"] == steps - 1]
        assert len({tuple(commit["parameters"]) for commit in last}) == 1
        reference = task.losses(task.trajectory(steps))
        for event in run.events_of("epoch"):
            off = abs(event["loss"] - reference[event["epoch"]])
            assert off < LOSS_BOUND, f"{event['member']} saw another loss: {event}"
        print(f"{steps} steps, {len({commit['world'] for commit in run.commits()})} worlds")
