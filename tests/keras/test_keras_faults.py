"""Members of Keras runs die at every point of a step, at random, and all at once; no sample is lost or repeated."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from shoal.testing.conformance import KERAS_TENSORFLOW, Backend, TaskRun
from shoal.testing.scripts.task import Task
from shoal.testing.stage import closing

pytestmark = [pytest.mark.keras, pytest.mark.process, pytest.mark.timeout(300)]
if KERAS_TENSORFLOW.missing:
    pytest.skip("Keras on TensorFlow is not installed", allow_module_level=True)

FAULTY = Backend("faulty keras", Path(__file__).with_name("faulty.py"), KERAS_TENSORFLOW.environ)
CALM = ("budget.infrastructure=1000", "backoff_s=0.05", "backoff_max_s=0.2")
POINTS = ["forward", "backward", "in the exchange", "in the optimizer", "after", *["amid the sums"] * 3]
# Metrics are kept in single precision by some layers of Keras.
LOSS_BOUND = 1e-6


def check_losses(run: TaskRun, steps: int) -> None:
    """Whoever was there at the end of an epoch saw its loss, all of it, whenever they came in."""
    reference = run.task.losses(run.task.trajectory(steps))
    told = run.of("epoch")
    assert told
    for one in told:
        off = abs(one["loss"] - reference[one["epoch"]])
        assert off < LOSS_BOUND, f"{one['member']} saw {one['loss']} for epoch {one['epoch']}, {off} off"


def test_a_kill_at_any_point_of_a_step_costs_no_sample(tmp_path: Path) -> None:
    task = Task(epochs=30, decay=0.96875)
    with closing(TaskRun(tmp_path, FAULTY, "2:3", CALM, task=task, environ={"POINTS": json.dumps(POINTS)})) as run:
        run.until(lambda: len(list(run.records.glob("*.died"))) == len(POINTS), "all deaths")
        run.until_size(3)
        run.release()
        run.finish()
        run.check()
        killed = [e for e in run.journal("ProcessExited") if e["fields"]["signal"] == signal.SIGKILL]
        assert len(killed) == len(POINTS)
        check_losses(run, task.order.total_steps)
