"""Restart with BackupAndRestore: a lost process is started again and loads its last backup."""

from __future__ import annotations

import time
from typing import Any

import keras

from benchmarks import job as jobs
from benchmarks import keras_job

BACKUP_STEPS = 50

job = jobs.from_arguments()
keras_job.one_thread()
model = keras_job.build_model(job.model)
model.compile(keras_job.build_optimizer(), keras_job.build_loss())


class Log(keras.callbacks.Callback):
    """Callback that keeps the pace before a step and logs its commit after it."""

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        time.sleep(job.pace_s)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        job.committed(int(model.optimizer.iterations) - 1, world=1, size=1, samples=job.batch)


images, labels = keras_job.build_arrays()
backup = keras.callbacks.BackupAndRestore(str(job.directory / "backup"), save_freq=BACKUP_STEPS)
model.fit(images, labels, batch_size=job.batch, epochs=1_000_000, verbose=0, callbacks=[backup, Log()])
