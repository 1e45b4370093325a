"""Shoal for Keras: model.fit with its data and its callback, and a commit log."""

from __future__ import annotations

import time
from typing import Any

import keras

import shoal.keras as shoal
from benchmarks import job as jobs
from benchmarks import keras_job

job = jobs.from_arguments()
keras_job.one_thread()
model = keras_job.build_model(job.model)
model.compile(keras_job.build_optimizer(), keras_job.build_loss())
run = shoal.join()


class Log(keras.callbacks.Callback):
    """Callback that waits for the gate and the pace before a step and logs its commit after it."""

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        job.wait_for_turn(run.step)
        time.sleep(job.pace_s)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        job.committed(run.step - 1, world=run.world, size=run.size, samples=run.share)


images, labels = keras_job.build_arrays()
data = shoal.batches(images, labels, size=job.batch, last="drop")
model.fit(data, epochs=1_000_000, verbose=0, callbacks=[shoal.Elastic(), Log()])
