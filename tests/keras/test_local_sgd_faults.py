"""Members of a Keras run with local SGD die, join and leave within rounds: no sample is lost, and members agree."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.core.data.rounds import RoundOrder
from shoal.testing.conformance import BOUND, KERAS_TENSORFLOW, FrameworkScript, TaskRun
from shoal.testing.run_under_test import closing
from shoal.testing.scripts.task import Floats, TrainingTask, flat, gradients_of, outputs_of

pytestmark = [pytest.mark.keras, pytest.mark.process, pytest.mark.timeout(600)]
if KERAS_TENSORFLOW.missing:
    pytest.skip("Keras on TensorFlow is not installed", allow_module_level=True)

FAULTY = FrameworkScript("faulty keras", Path(__file__).with_name("train_faulty.py"), KERAS_TENSORFLOW.environ)
LENGTH, OUTER = 3, (0.75, 0.5)
SETTINGS = (
    f"sync=local:{LENGTH}",
    f"outer.lr={OUTER[0]}",
    f"outer.momentum={OUTER[1]}",
    *("restarts.infrastructure=1000", "backoff_s=0.05", "backoff_max_s=0.2"),
)
# With equal shares in a world of three, every member has three local batches in a round.
POINTS = ["forward", "forward@2", "backward@1", "in the optimizer@1", "in the exchange", "amid the sums", "after"]
# Metrics are kept in single precision by some layers of Keras.
LOSS_BOUND = 1e-6


def order_of(task: TrainingTask) -> RoundOrder:
    return RoundOrder.of(task.samples, task.batch, LENGTH, task.epochs, task.seed)


def batches_of(events: Iterable[Any]) -> dict[int, tuple[int, dict[str, list[list[int]]]]]:
    """Return, for every committed round, the last world that committed it and the local batches of each member."""
    events = list(events)
    last: dict[int, int] = {}
    for event in events:
        if event["event"] == "commit":
            last[event["step"]] = max(event["world"], last.get(event["step"], 0))
    rounds: dict[int, tuple[int, dict[str, list[list[int]]]]] = {step: (last[step], {}) for step in sorted(last)}
    for event in events:
        if event["event"] == "given" and event["ids"] and last.get(event["step"]) == event["world"]:
            rounds[event["step"]][1].setdefault(event["member"], []).append(event["ids"])
    return rounds


def replayed(task: TrainingTask, events: Iterable[Any]) -> tuple[list[Floats], list[float]]:
    """Return the parameters after every round and the loss of every epoch, computed from the recorded batches."""
    (x, y), order = task.data(), order_of(task)
    start = task.start()
    velocities = [np.zeros_like(value) for value in start]
    trajectory, losses = [], [0.0] * task.epochs
    for step, (_, members) in batches_of(events).items():
        size, epoch = order.size_of(step), order.cursor(step).epoch
        seen = sorted(sample for batches in members.values() for batch in batches for sample in batch)
        assert seen == sorted(order.ids(step, 0, size).tolist()), f"round {step} has other samples than its own"
        changes = [np.zeros_like(value) for value in start]
        for batches in members.values():
            local = [value.copy() for value in start]
            for batch in batches:
                losses[epoch] += float(((outputs_of(local, x[batch, 1:]) - y[batch]) ** 2).sum()) / task.samples
                for value, gradient in zip(local, gradients_of(local, x[batch, 1:], y[batch]), strict=True):
                    value -= task.rate * task.decay**epoch * gradient
            for change, after, before in zip(changes, local, start, strict=True):
                change += sum(map(len, batches)) / size * (after - before)
        for value, velocity, change in zip(start, velocities, changes, strict=True):
            velocity *= OUTER[1]
            velocity += change
            value += OUTER[0] * (change + OUTER[1] * velocity)
        trajectory.append(flat(start))
    return trajectory, losses


def check(run: TaskRun) -> None:
    """Check that each sample counted once per epoch, and that all members agree with a replay of every round."""
    task = run.task
    expected, losses = replayed(task, run.events())
    assert len(expected) == order_of(task).total_steps
    last = {step: world for step, (world, _) in batches_of(run.events()).items()}
    results: dict[int, set[tuple[float, ...]]] = {}
    for commit in run.commits():
        if commit["world"] == last[commit["step"]]:
            results.setdefault(commit["step"], set()).add(tuple(commit["parameters"]))
    for step, parameters in results.items():
        assert len(parameters) == 1, f"members differ after round {step}"
        off = float(np.abs(np.array(next(iter(parameters))) - expected[step]).max())
        assert off < BOUND, f"after round {step} parameters are {off} off"
    done = run.events_of("done")
    assert done
    final = {(event["step"], *event["parameters"]) for event in done}
    assert final == {(len(expected), *next(iter(results[max(results)])))}
    for event in run.events_of("epoch"):
        seen = [c for c in run.commits() if c["pid"] == event["pid"] and c["at"] <= event["at"]]
        newest = max(seen, key=lambda c: c["at"], default=None)
        if newest is None or newest["world"] == last[newest["step"]]:  # else other members repeated its rounds
            off = abs(event["loss"] - losses[event["epoch"]])
            assert off < LOSS_BOUND, f"{event['member']} saw another loss: {event}"


def test_kill_at_any_point_of_a_round_costs_no_sample(tmp_path: Path) -> None:
    task = TrainingTask(epochs=100, momentum=0.0, decay=0.96875)
    with closing(TaskRun(tmp_path, FAULTY, "2:3", SETTINGS, task=task, environ={"POINTS": json.dumps(POINTS)})) as run:
        run.until(lambda: len(list(run.records.glob("*.died"))) == len(POINTS), "all deaths", timeout_s=180)
        run.until_size(3)
        run.release()
        run.finish()
        check(run)
        killed = [e for e in run.journal("ProcessExited") if e["fields"]["signal"] == signal.SIGKILL]
        assert len(killed) == len(POINTS)


def test_rounds_survive_a_notice_a_loss_of_all_and_a_resume_with_fewer(tmp_path: Path) -> None:
    task = TrainingTask(epochs=100, momentum=0.0, decay=0.96875)
    with closing(TaskRun(tmp_path, FAULTY, "1:3", (*SETTINGS, "checkpoint.every_steps=3"), task=task)) as run:
        run.until_size(3)
        first = run.pids()["local/1"]
        run.kill("local/1", signal.SIGTERM)
        run.until_share("local/1", "the restarted member to have a share", but=first)
        assert not run.journal("WorldBroken"), "a notice broke a round"
        run.service_process("agent").kill()
        run.until(lambda: "restored the checkpoint" in run.output, "a checkpoint to be restored")
        restored = run.step()
        run.until_step(restored + 2)
        name = run.name
        run.shoal("stop", name)
        run.finish(exit_code=75)
        stopped = run.step()
        assert stopped + 1 < order_of(task).total_steps
        run.release()
        run.process = run.start("resume", name, "-n", "2:2")
        run.finish()
        assert min(c["step"] for c in run.commits() if c["size"] == 2 and c["step"] > stopped) == stopped + 1
        check(run)
