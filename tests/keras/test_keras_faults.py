"""Members of Keras runs die at every point of a step, at random, and all at once; no sample is lost or repeated."""

from __future__ import annotations

import json
import signal
from collections import Counter
from pathlib import Path

import pytest

from shoal.testing.conformance import KERAS_TENSORFLOW, FrameworkScript, TaskRun
from shoal.testing.run_under_test import closing
from shoal.testing.scripts.task import TrainingTask

pytestmark = [pytest.mark.keras, pytest.mark.process, pytest.mark.timeout(300)]
if KERAS_TENSORFLOW.missing:
    pytest.skip("Keras on TensorFlow is not installed", allow_module_level=True)

FAULTY = FrameworkScript("faulty keras", Path(__file__).with_name("faulty.py"), KERAS_TENSORFLOW.environ)
CALM = ("restarts.infrastructure=1000", "backoff_s=0.05", "backoff_max_s=0.2")
POINTS = ["forward", "backward", "in the exchange", "in the optimizer", "after", *["amid the sums"] * 3]
# Metrics are kept in single precision by some layers of Keras.
LOSS_BOUND = 1e-6


def check_losses(run: TaskRun, steps: int) -> None:
    """Whoever was there at the end of an epoch saw its loss, all of it, whenever they came in."""
    reference = run.task.losses(run.task.trajectory(steps))
    told = run.events_of("epoch")
    assert told
    for one in told:
        off = abs(one["loss"] - reference[one["epoch"]])
        assert off < LOSS_BOUND, f"{one['member']} saw {one['loss']} for epoch {one['epoch']}, {off} off"


def test_kill_at_any_point_of_a_step_costs_no_sample(tmp_path: Path) -> None:
    task = TrainingTask(epochs=50, decay=0.96875)
    with closing(TaskRun(tmp_path, FAULTY, "2:3", CALM, task=task, environ={"POINTS": json.dumps(POINTS)})) as run:
        run.until(lambda: len(list(run.records.glob("*.died"))) == len(POINTS), "all deaths", timeout_s=180)
        run.until_size(3)
        run.release()
        run.finish()
        run.check()
        killed = [e for e in run.journal("ProcessExited") if e["fields"]["signal"] == signal.SIGKILL]
        assert len(killed) == len(POINTS)
        check_losses(run, task.order.total_steps)


def test_a_notice_costs_no_step_and_all_members_lost_cost_no_more_than_back_to_the_checkpoint(tmp_path: Path) -> None:
    task = TrainingTask(epochs=20, decay=0.96875)
    settings = (*CALM, "checkpoint.every_steps=3")
    with closing(TaskRun(tmp_path, FAULTY, "1:2", settings, task=task)) as run:
        run.until_size(2)
        run.until_step(5)
        first = run.pids()["local/1"]
        run.kill("local/1", signal.SIGTERM)
        run.until_share("local/1", "the one that left to be back", but=first)
        assert not run.journal("WorldBroken"), "a notice broke a world"
        assert any(e["fields"]["member"] == "local/1" for e in run.journal("MemberLeft")), "it went without a word"
        run.service_process("agent").kill()
        run.until(lambda: "restored the checkpoint" in run.output, "a checkpoint to be restored")
        run.release()
        run.finish()
        run.check()
        check_losses(run, task.order.total_steps)


def test_what_was_read_ahead_for_a_member_that_dies_is_read_by_another(tmp_path: Path) -> None:
    task = TrainingTask(epochs=12)
    environ = {"PIPELINE": "1", "POINTS": json.dumps(["forward", "in the exchange"])}
    with closing(TaskRun(tmp_path, FAULTY, "2:3", CALM, task=task, environ=environ)) as run:
        run.until(lambda: len(list(run.records.glob("*.died"))) == 2, "all deaths")
        run.release()
        run.finish()
        run.check()


def test_a_tf_data_pipeline_is_read_exactly_once_whoever_dies(tmp_path: Path) -> None:
    task = TrainingTask(samples=210, batch=16, epochs=6)
    environ = {"STREAM": "1", "POINTS": json.dumps(["forward", "in the exchange", "after"])}
    with closing(TaskRun(tmp_path, FAULTY, "2:3", CALM, task=task, environ=environ)) as run:
        run.until(lambda: len(list(run.records.glob("*.died"))) == 3, "all deaths")
        run.release()
        run.finish()
        counted = Counter(one for given in run.given().values() for ids in given.values() for one in ids)
        assert counted == dict.fromkeys(range(task.samples), task.epochs)
        done = run.events_of("done")
        assert len({(one["step"], *one["parameters"]) for one in done}) == 1, "members end with different parameters"
        losses: dict[int, set[float]] = {}
        for one in run.events_of("epoch"):
            losses.setdefault(one["epoch"], set()).add(one["loss"])
        assert losses.keys() == set(range(task.epochs))
        assert all(len(seen) == 1 for seen in losses.values()), f"members saw different losses: {losses}"
