"""The conformance suite's script for Keras, with points of a step at which a member kills itself.

POINTS lists the points, one death each: the last member of a world of three dies at the next point once it has a share.
``forward@1`` is the second time it passes the point in one step, which happens only where steps are rounds. With STREAM
the data is a tf.data pipeline that can only be read from its start, with PIPELINE one that is indexed and read ahead.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

import shoal.keras as shoal
from shoal.testing.scripts.task import RECORDS, RunRecord, TrainingTask
from shoal.testing.scripts.train_keras import RecordCommits, build, parameters
from shoal.worker.collectives.flat_buffers import FlatBuffers

task = TrainingTask.read()
run = shoal.join()
RECORDS_DIRECTORY = Path(os.environ[RECORDS])
POINTS = json.loads(os.environ.get("POINTS", "[]"))
FIRST_STEP = 4
# While sums arrive: some members have all of them, and some never will. In the last step of an epoch.
DURING_SUMS = "amid the sums"
passed: Counter[tuple[str, int, int]] = Counter()


def die_at(point: str, step: int | None = None) -> None:
    """Kill this process if this is the next point, and this the member that dies."""
    died = len(list(RECORDS_DIRECTORY.glob("*.died")))
    wanted, _, times = (POINTS[died] if died < len(POINTS) else "").partition("@")
    passed[point, run.step, run.world] += 1
    chosen = run.size == 3 and run.rank == 2 and run.share > 0 and run.step > FIRST_STEP
    ends_epoch = step is None or (step + 1) % task.order.steps_per_epoch == 0
    if chosen and ends_epoch and wanted == point and passed[point, run.step, run.world] > int(times or 0):
        (RECORDS_DIRECTORY / f"{died}.died").touch()
        os.kill(os.getpid(), signal.SIGKILL)


class DieInBackward(keras.layers.Layer):
    """Identity that may kill the process in the backward pass."""

    def call(self, x: Any) -> Any:
        @tf.custom_gradient
        def same(x: Any) -> Any:
            def back(gradient: Any) -> Any:
                tf.numpy_function(lambda: die_at("backward"), [], [])
                return gradient

            return tf.identity(x), back

        return same(x)


class DieInOptimizer(keras.optimizers.SGD):
    """SGD that may kill the process when half of the variables have been changed."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        super().update_step(gradient, variable, learning_rate)
        if len(variable.shape) == 1 and variable.shape[0] > 1:
            tf.numpy_function(lambda: die_at("in the optimizer"), [], [])


class RaiseLearningRate(keras.callbacks.Callback):
    """Doubles the learning rate at the end of every epoch; halved when the next begins, it is the task's."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        optimizer = self.model.optimizer
        optimizer.learning_rate = 2 * task.decay * float(optimizer.learning_rate)


def halve_after_first(epoch: int, rate: float) -> float:
    return rate / 2 if epoch else rate


class DieBeforeRecord(RecordCommits):
    """Records commits, unless it kills the process before."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        die_at("after")
        super().on_train_batch_end(batch, logs)


def dying(method: Callable[..., None], point: str, wait_s: float) -> Callable[..., None]:
    """Return a method that may kill the process after it has begun, or up to `wait_s` later."""

    def call(*arguments: Any) -> None:
        if wait_s:
            threading.Timer(random.uniform(0, wait_s), die_at, [point, run.step]).start()
        method(*arguments)
        if not wait_s:
            die_at(point)

    return call


def main() -> None:
    keras.config.set_floatx("float64")
    record = RunRecord(task, run.member)
    FlatBuffers.send = dying(FlatBuffers.send, "in the exchange", 0.0)  # type: ignore[method-assign]
    FlatBuffers.finish = dying(FlatBuffers.finish, DURING_SUMS, 0.002)  # type: ignore[method-assign]

    def on_batch(numbers: Any) -> None:
        record.given(run.step, run.world, numbers.tolist() if run.share else [])
        die_at("forward")

    model = build(task, on_batch, DieInBackward(), kind=DieInOptimizer)
    data = task.data()
    if "STREAM" in os.environ:
        pipeline = tf.data.Dataset.from_tensor_slices(data).filter(lambda x, y: True).batch(30)
        batches = shoal.batches(pipeline, size=task.batch, seed=task.seed, shares="equal", shards=4)
    elif "PIPELINE" in os.environ:
        pipeline = tf.data.Dataset.from_tensor_slices(data).map(lambda x, y: (x, y)).batch(30)
        batches = shoal.batches(pipeline, size=task.batch, seed=task.seed, workers=1, prefetch=2)
    else:
        batches = shoal.batches(*data, size=task.batch, seed=task.seed, shares="equal")
    record.ready()
    elastic = shoal.Elastic(keras.callbacks.LearningRateScheduler(halve_after_first), RaiseLearningRate())
    model.fit(batches, epochs=task.epochs, verbose=0, callbacks=[elastic, DieBeforeRecord(run, record)])
    record.done(run.step, parameters(model))


if __name__ == "__main__":
    main()
