"""Conformance suite of frameworks: the same scenarios with real processes over every framework front.

A framework under test is a script that trains `shoal.testing.scripts.task` and records what that module asks for. To
add one, write such a script and run the scenarios over it::

    MINE = FrameworkScript("mine", Path("train_mine.py"), needs=("mine",))

    @pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
    def test_my_framework_conforms(scenario, tmp_path):
        scenario(MINE, tmp_path)
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from shoal import exit_codes
from shoal.testing import assertions, scripts
from shoal.testing.assertions import Given
from shoal.testing.emulated_speeds import machines
from shoal.testing.run_under_test import RunUnderTest, closing
from shoal.testing.scripts.task import RECORDS, TrainingTask
from shoal.testing.wait import TIMEOUT_S

# In float64 only the order of summation differs, about 1e-16 a step. A sample that is lost or counted twice shows in
# the third or fourth digit.
BOUND = 1e-10
# Keras on PyTorch computes losses in single precision, whatever `floatx` is.
SINGLE_BOUND = 1e-5

_SCRIPTS = Path(scripts.__file__).parent
_KERAS = "numpy,keras,shoal.keras,shoal.keras.backends.{},shoal.testing.scripts.task,websockets.sync.client,psutil"


@dataclass(frozen=True)
class FrameworkScript:
    """A framework under test: its script for the task, and the environment that the script needs.

    Its parameters may differ by `bound` from those of the same training in NumPy.
    """

    name: str
    script: Path
    environ: Mapping[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    bound: float = BOUND

    @property
    def missing(self) -> list[str]:
        """Packages that it needs and that are not installed."""
        return [package for package in self.needs if importlib.util.find_spec(package) is None]


def _keras(backend: str) -> dict[str, str]:
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1"}
    # Imported once, before members are forked.
    return {"KERAS_BACKEND": backend, "SHOAL_PRELOAD": _KERAS.format(backend), **quiet}


TORCH = FrameworkScript("torch", _SCRIPTS / "train_torch.py", needs=("torch",))
KERAS_TENSORFLOW = FrameworkScript(
    "keras on tensorflow", _SCRIPTS / "train_keras.py", _keras("tensorflow"), ("keras", "tensorflow")
)
KERAS_TORCH = FrameworkScript(
    "keras on torch", _SCRIPTS / "train_keras.py", _keras("torch"), ("keras", "torch"), SINGLE_BOUND
)
BACKENDS = (TORCH, KERAS_TENSORFLOW, KERAS_TORCH)


class TaskRun(RunUnderTest):
    """A run of a framework's script, with checks of its records."""

    def __init__(
        self,
        path: Path,
        backend: FrameworkScript,
        members: str,
        settings: tuple[str, ...] = (),
        emulate: str = "",
        task: TrainingTask | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.backend, self.task = backend, task or TrainingTask()
        self._emulate = ("--emulate", emulate) if emulate else ()
        path.mkdir(parents=True, exist_ok=True)
        super().__init__(
            path, backend.script, members, settings, {**backend.environ, **self.task.environ(), **(environ or {})}
        )

    def begin(self, *arguments: str) -> subprocess.Popen[bytes]:
        return self.start("run", *self._emulate, *arguments)

    def until_share(self, member: str, what: str, but: int = 0, after: float = 0.0) -> None:
        """Block until a member has computed samples of a committed step, after this time and not in process `but`."""

        def has_share() -> bool:
            last = self.step()
            own = (event for event in self.events_of("given") if event["member"] == member and event["pid"] != but)
            return any(event["ids"] and event["step"] <= last for event in own if event["at"] > after)

        self.until(has_share, what)

    def given(self) -> Given:
        """Return the samples that each member computed of every committed step."""
        return assertions.given(self.events())

    def shares(self) -> dict[int, dict[str, int]]:
        """Return how many samples each member computed of each step."""
        return {
            step: {member: len(ids) for member, ids in members.items()} for (step, _), members in self.given().items()
        }

    def check(self) -> None:
        """Fail unless everything holds that is promised for a run that trained to its end."""
        total = self.task.order.total_steps
        self.check_steps(total)
        assertions.check_end(self.task, self.events())
        assert {entry["fields"]["step"] for entry in self.journal("MemberDone")} == {total}

    def check_steps(self, steps: int) -> None:
        """Fail unless each of the first steps had its samples once and one result, that of a single process."""
        assertions.check_results(self.task, self.events(), steps, self.backend.bound)
        assertions.check_samples(self.task, self.events(), steps)
        self.check_worlds()


# --- scenarios


def slow_member_join_and_loss(backend: FrameworkScript, path: Path) -> None:
    """Give a slow member a smaller share, add a member in mid-epoch, kill one and wait until it is back."""
    speeds = machines(1, 0.25, 1, sample_s=0.002)
    with closing(TaskRun(path, backend, "2:2", emulate=speeds)) as run:
        size = run.task.batch

        def unequal() -> bool:
            dealt = list(run.shares().values())[-4:]
            return len(dealt) == 4 and all(4 * shares.get("local/1", size) < size for shares in dealt)

        run.until(unequal, "the slow member to get less than a quarter")
        before = run.pids()
        run.shoal("scale", run.name, "2:3")
        run.until_share("local/2", "the newcomer to train")
        run.kill("local/0")
        run.until_share("local/0", "the lost member to train again", but=before["local/0"])
        assert run.pids()["local/1"] == before["local/1"], "a member was restarted because of the loss of another"
        run.release()
        run.finish()
        run.check()
        assert run.journal("ProcessExited")[0]["fields"]["signal"] == signal.SIGKILL


def hang_stop_and_resume_with_fewer(backend: FrameworkScript, path: Path) -> None:
    """Stop a member's process until it is left behind, wake it, stop the run, and resume it with fewer members."""
    # Two long epochs, so that the stop falls into the middle of one.
    task = TrainingTask(samples=1800, epochs=2)
    with closing(TaskRun(path, backend, "2:3", ("lease_s=2",), task=task)) as run:
        run.until_size(3)
        pid = run.pids()["local/2"]
        os.kill(pid, signal.SIGSTOP)
        run.until_size(2)
        os.kill(pid, signal.SIGCONT)
        woken = run.commits()[-1]["at"]
        run.until_share("local/2", "the member that hung to train again", after=woken)
        assert run.pids()["local/2"] == pid, "the process that woke up was replaced"
        name = run.name
        run.shoal("stop", name)
        run.finish(exit_code=exit_codes.RESUMABLE)
        stopped_at = run.step()
        assert stopped_at + 1 < task.order.total_steps
        run.release()
        run.process = run.start("resume", name, "-n", "2:2")
        run.finish()
        run.check()
        later = [commit for commit in run.commits() if commit["step"] > stopped_at]
        assert min(commit["step"] for commit in later) == stopped_at + 1, "resumed at another step"
        assert {commit["size"] for commit in later} == {2}


def standalone(backend: FrameworkScript, path: Path) -> None:
    """Run the same script without `shoal run`: one process computes what all members compute together."""
    task = TrainingTask(epochs=3)
    path.mkdir(parents=True, exist_ok=True)
    environ = {**os.environ, **backend.environ, **task.environ(), RECORDS: str(path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(backend.script)]
    ran = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert ran.returncode == 0, ran.stderr
    (done,) = _done(path)
    total = task.order.total_steps
    assert done["step"] == total
    off = float(np.abs(np.array(done["parameters"]) - task.trajectory(total)[-1]).max())
    assert off < backend.bound, f"standalone parameters differ by {off}"


def _done(path: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for file in path.glob("*.jsonl") for line in file.read_text().splitlines()]
    return [line for line in lines if line["event"] == "done"]


Scenario = Callable[[FrameworkScript, Path], None]
SCENARIOS: tuple[Scenario, ...] = (
    slow_member_join_and_loss,
    hang_stop_and_resume_with_fewer,
    standalone,
)
