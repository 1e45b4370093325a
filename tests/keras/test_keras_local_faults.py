"""Members of a Keras run that trains in rounds are killed within them, come and go; nothing is lost, nobody parts."""

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

pytestmark = [pytest.mark.keras, pytest.mark.process, pytest.mark.timeout(300)]
if KERAS_TENSORFLOW.missing:
    pytest.skip("Keras on TensorFlow is not installed", allow_module_level=True)

FAULTY = FrameworkScript("faulty keras", Path(__file__).with_name("faulty.py"), KERAS_TENSORFLOW.environ)
LENGTH, OUTER = 3, (0.75, 0.5)
SETTINGS = (
    f"sync=local:{LENGTH}",
    f"outer.lr={OUTER[0]}",
    f"outer.momentum={OUTER[1]}",
    *("restarts.infrastructure=1000", "backoff_s=0.05", "backoff_max_s=0.2"),
)
# With equal shares of a world of three, everybody has three batches in a round.
POINTS = ["forward", "forward@2", "backward@1", "in the optimizer@1", "in the exchange", "amid the sums", "after"]
# Metrics are kept in single precision by some layers of Keras.
LOSS_BOUND = 1e-6


def order_of(task: TrainingTask) -> RoundOrder:
    return RoundOrder.of(task.samples, task.batch, LENGTH, task.epochs, task.seed)


def batches_of(events: Iterable[Any]) -> dict[int, tuple[int, dict[str, list[list[int]]]]]:
    """For every committed round, the last world that committed it, and the batches that each member trained on."""
    events = list(events)
    last: dict[int, int] = {}
    for one in events:
        if one["event"] == "commit":
            last[one["step"]] = max(one["world"], last.get(one["step"], 0))
    found: dict[int, tuple[int, dict[str, list[list[int]]]]] = {step: (last[step], {}) for step in sorted(last)}
    for one in events:
        if one["event"] == "given" and one["ids"] and last.get(one["step"]) == one["world"]:
            found[one["step"]][1].setdefault(one["member"], []).append(one["ids"])
    return found


def replayed(task: TrainingTask, events: Iterable[Any]) -> tuple[list[Floats], list[float]]:
    """The parameters after every round, and the loss of every epoch, if members trained on what they recorded."""
    (x, y), order = task.data(), order_of(task)
    start = task.start()
    speeds = [np.zeros_like(one) for one in start]
    found, losses = [], [0.0] * task.epochs
    for step, (_, members) in batches_of(events).items():
        size, epoch = order.size_of(step), order.cursor(step).epoch
        seen = sorted(one for lots in members.values() for lot in lots for one in lot)
        assert seen == sorted(order.ids(step, 0, size).tolist()), f"round {step} has other samples than its own"
        changes = [np.zeros_like(one) for one in start]
        for lots in members.values():
            own = [one.copy() for one in start]
            for lot in lots:
                losses[epoch] += float(((outputs_of(own, x[lot, 1:]) - y[lot]) ** 2).sum()) / task.samples
                for one, gradient in zip(own, gradients_of(own, x[lot, 1:], y[lot]), strict=True):
                    one -= task.rate * task.decay**epoch * gradient
            for change, mine, before in zip(changes, own, start, strict=True):
                change += sum(map(len, lots)) / size * (mine - before)
        for one, speed, change in zip(start, speeds, changes, strict=True):
            speed *= OUTER[1]
            speed += change
            one += OUTER[0] * (change + OUTER[1] * speed)
        found.append(flat(start))
    return found, losses


def check(run: TaskRun) -> None:
    """Each sample once an epoch, one result of every round, that of what members did in it, and the same losses."""
    task = run.task
    expected, losses = replayed(task, run.events())
    assert len(expected) == order_of(task).total_steps
    last = {step: world for step, (world, _) in batches_of(run.events()).items()}
    results: dict[int, set[tuple[float, ...]]] = {}
    for one in run.commits():
        if one["world"] == last[one["step"]]:
            results.setdefault(one["step"], set()).add(tuple(one["parameters"]))
    for step, found in results.items():
        assert len(found) == 1, f"members differ after round {step}"
        off = float(np.abs(np.array(next(iter(found))) - expected[step]).max())
        assert off < BOUND, f"after round {step} parameters are {off} off"
    done = run.events_of("done")
    assert done
    assert {(one["step"], *one["parameters"]) for one in done} == {(len(expected), *next(iter(results[max(results)])))}
    for one in run.events_of("epoch"):
        seen = [c for c in run.commits() if c["pid"] == one["pid"] and c["at"] <= one["at"]]
        newest = max(seen, key=lambda c: c["at"], default=None)
        if newest is None or newest["world"] == last[newest["step"]]:  # else its rounds were done again by others
            assert abs(one["loss"] - losses[one["epoch"]]) < LOSS_BOUND, f"{one['member']} saw another loss: {one}"


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
        run.until_share("local/1", "the one that left to be back", but=first)
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
        assert min(one["step"] for one in run.commits() if one["size"] == 2 and one["step"] > stopped) == stopped + 1
        check(run)
