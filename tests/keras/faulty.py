"""The conformance suite's script for Keras, with points of a step at which members kill themselves.

POINTS lists them, one death each: the next one is died at by the last member of a world of three, once it has a share;
``forward@1`` is the second time that it gets there in a step, which it does only where steps are rounds.
With STREAM the data is a tf.data pipeline that can only be read from its start, with PIPELINE one that can be indexed,
and that is read ahead.
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
PLACE = Path(os.environ[RECORDS])
POINTS = json.loads(os.environ.get("POINTS", "[]"))
FIRST_STEP = 4
# While the sums are coming in: some have all of them, and some never will. In the last step of an epoch.
TORN = "amid the sums"
passed: Counter[tuple[str, int, int]] = Counter()


def die(point: str, step: int | None = None) -> None:
    """The end, if it is this point's turn and that of this member."""
    died = len(list(PLACE.glob("*.died")))
    wanted, _, times = (POINTS[died] if died < len(POINTS) else "").partition("@")
    passed[point, run.step, run.world] += 1
    mine = run.size == 3 and run.rank == 2 and run.share > 0 and run.step > FIRST_STEP
    ends = step is None or (step + 1) % task.order.steps_per_epoch == 0
    if mine and ends and wanted == point and passed[point, run.step, run.world] > int(times or 0):
        (PLACE / f"{died}.died").touch()
        os.kill(os.getpid(), signal.SIGKILL)


class Between(keras.layers.Layer):
    """Does nothing on the way forward, and may kill on the way back."""

    def call(self, x: Any) -> Any:
        @tf.custom_gradient
        def same(x: Any) -> Any:
            def back(gradient: Any) -> Any:
                tf.numpy_function(lambda: die("backward"), [], [])
                return gradient

            return tf.identity(x), back

        return same(x)


class Fatal(keras.optimizers.SGD):
    """Momentum that may kill when half of the variables have been changed."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        super().update_step(gradient, variable, learning_rate)
        if len(variable.shape) == 1 and variable.shape[0] > 1:
            tf.numpy_function(lambda: die("in the optimizer"), [], [])


class Raise(keras.callbacks.Callback):
    """Raises the learning rate at the end of every epoch; lowered by half when one begins, it is that of the task."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        optimizer = self.model.optimizer
        optimizer.learning_rate = 2 * task.decay * float(optimizer.learning_rate)


def lowered(epoch: int, rate: float) -> float:
    return rate / 2 if epoch else rate


class Last(RecordCommits):
    """Records commits, unless it kills before."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        die("after")
        super().on_train_batch_end(batch, logs)


def fatal(real: Callable[..., None], point: str, wait_s: float) -> Callable[..., None]:
    """A method that may kill when it has begun, or a moment later."""

    def begun(*given: Any) -> None:
        if wait_s:
            threading.Timer(random.uniform(0, wait_s), die, [point, run.step]).start()
        real(*given)
        if not wait_s:
            die(point)

    return begun


def main() -> None:
    keras.config.set_floatx("float64")
    record = RunRecord(task, run.member)
    FlatBuffers.send = fatal(FlatBuffers.send, "in the exchange", 0.0)  # type: ignore[method-assign]
    FlatBuffers.finish = fatal(FlatBuffers.finish, TORN, 0.002)  # type: ignore[method-assign]

    def tell(numbers: Any) -> None:
        record.given(run.step, run.world, numbers.tolist() if run.share else [])
        die("forward")

    model = build(task, tell, Between(), kind=Fatal)
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
    elastic = shoal.Elastic(keras.callbacks.LearningRateScheduler(lowered), Raise())
    model.fit(batches, epochs=task.epochs, verbose=0, callbacks=[elastic, Last(run, record)])
    record.done(run.step, parameters(model))


if __name__ == "__main__":
    main()
