"""Members of Keras runs die at every point of a step, and all at once: no sample is lost or repeated."""

from __future__ import annotations

import json
import signal
from collections import Counter
from pathlib import Path

import pytest

from shoal.testing.conformance import KERAS_TENSORFLOW, FrameworkScript, TaskRun
from shoal.testing.run_under_test import closing
from shoal.testing.scripts.task import TrainingTask

pytestmark = [pytest.mark.keras, pytest.mark.process, pytest.mark.timeout(600)]
if KERAS_TENSORFLOW.missing:
    pytest.skip("Keras on TensorFlow is not installed", allow_module_level=True)

FAULTY = FrameworkScript("faulty keras", Path(__file__).with_name("train_faulty.py"), KERAS_TENSORFLOW.environ)
SETTINGS = ("restarts.infrastructure=1000", "backoff_s=0.05", "backoff_max_s=0.2")
POINTS = ["forward", "backward", "in the exchange", "in the optimizer", "after", *["amid the sums"] * 3]
# Metrics are kept in single precision by some layers of Keras.
LOSS_BOUND = 1e-6


def check_losses(run: TaskRun, steps: int) -> None:
    """Check that every member at the end of an epoch saw the loss of the whole epoch, whenever it joined."""
    reference = run.task.losses(run.task.trajectory(steps))
    events = run.events_of("epoch")
    assert events
    for event in events:
        off = abs(event["loss"] - reference[event["epoch"]])
        assert off < LOSS_BOUND, f"{event['member']} saw {event['loss']} for epoch {event['epoch']}, {off} off"


def test_kill_at_any_point_of_a_step_costs_no_sample(tmp_path: Path) -> None:
    task = TrainingTask(epochs=50, decay=0.96875)
    with closing(TaskRun(tmp_path, FAULTY, "2:3", SETTINGS, task=task, environ={"POINTS": json.dumps(POINTS)})) as run:
        run.until(lambda: len(list(run.records.glob("*.died"))) == len(POINTS), "all deaths", timeout_s=180)
        run.until_size(3)
        run.release()
        run.finish()
        run.check()
        killed = [e for e in run.journal("ProcessExited") if e["fields"]["signal"] == signal.SIGKILL]
        assert len(killed) == len(POINTS)
        check_losses(run, task.order.total_steps)


def test_notice_costs_no_step_and_loss_of_all_members_restores_the_checkpoint(tmp_path: Path) -> None:
    task = TrainingTask(epochs=20, decay=0.96875)
    settings = (*SETTINGS, "checkpoint.every_steps=3")
    with closing(TaskRun(tmp_path, FAULTY, "1:2", settings, task=task)) as run:
        run.until_size(2)
        run.until_step(5)
        first = run.pids()["local/1"]
        run.kill("local/1", signal.SIGTERM)
        run.until_share("local/1", "the restarted member to have a share", but=first)
        assert not run.journal("WorldBroken"), "a notice broke a world"
        assert any(e["fields"]["member"] == "local/1" for e in run.journal("MemberLeft")), "it did not leave cleanly"
        run.service_process("agent").kill()
        run.until(lambda: "restored the checkpoint" in run.output, "a checkpoint to be restored")
        run.release()
        run.finish()
        run.check()
        check_losses(run, task.order.total_steps)


def test_batches_read_ahead_by_a_lost_member_are_read_by_another(tmp_path: Path) -> None:
    task = TrainingTask(epochs=12)
    environ = {"PIPELINE": "1", "POINTS": json.dumps(["forward", "in the exchange"])}
    with closing(TaskRun(tmp_path, FAULTY, "2:3", SETTINGS, task=task, environ=environ)) as run:
        run.until(lambda: len(list(run.records.glob("*.died"))) == 2, "all deaths")
        run.release()
        run.finish()
        run.check()


def test_streamed_pipeline_is_read_exactly_once_when_members_die(tmp_path: Path) -> None:
    task = TrainingTask(samples=210, batch=16, epochs=6)
    environ = {"STREAM": "1", "POINTS": json.dumps(["forward", "in the exchange", "after"])}
    with closing(TaskRun(tmp_path, FAULTY, "2:3", SETTINGS, task=task, environ=environ)) as run:
        run.until(lambda: len(list(run.records.glob("*.died"))) == 3, "all deaths")
        run.release()
        run.finish()
        counted = Counter(sample for given in run.given().values() for ids in given.values() for sample in ids)
        assert counted == dict.fromkeys(range(task.samples), task.epochs)
        done = run.events_of("done")
        assert len({(event["step"], *event["parameters"]) for event in done}) == 1, (
            "members end with different parameters"
        )
        losses: dict[int, set[float]] = {}
        for event in run.events_of("epoch"):
            losses.setdefault(event["epoch"], set()).add(event["loss"])
        assert losses.keys() == set(range(task.epochs))
        assert all(len(seen) == 1 for seen in losses.values()), f"members saw different losses: {losses}"
