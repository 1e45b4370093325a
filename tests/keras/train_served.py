"""Training script for tests of Keras runs with servers: a small model, and two vectors in which servers count samples.

The counters are weights, one in each of two shards, and the optimizer counts in them: so the test checks what was
really applied, shard by shard. tests/process/servers/train.py does the same for torch.
"""

import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np

import shoal.keras as shoal
from shoal.keras.modes.served import KerasServedTrainer
from shoal.testing.scripts.hold import pause_while_held

PLAN = json.loads(os.environ.get("FAULTS", "{}"))
OUT = Path(os.environ["RECORDS"])
SAMPLES, BATCH, EPOCHS = PLAN.get("samples", 512), PLAN.get("batch", 64), PLAN.get("epochs", 4)


class Counter(keras.layers.Layer):
    """Strips the number off each sample, and adds the sample's counters to the loss."""

    def build(self, shape: Any) -> None:
        self.counted = [self.add_weight(shape=(SAMPLES,), initializer="zeros", name=f"counted{n}") for n in range(2)]

    def call(self, x: Any) -> Any:
        numbers = keras.ops.cast(x[:, 0], "int32")
        for counter in self.counted:
            self.add_loss(keras.ops.mean(keras.ops.take(counter, numbers)))
        return x[:, 1:]


class CountingSGD(keras.optimizers.SGD):
    """SGD that increments the counters, which are the only vectors of that length, instead of stepping them."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        if tuple(variable.shape) != (SAMPLES,):
            super().update_step(gradient, variable, learning_rate)
            return
        seen = keras.ops.where(gradient > 0, gradient, np.inf)
        self.assign_add(variable, keras.ops.round(gradient / keras.ops.min(seen)))


def recording(method: Callable[..., Any], record: Callable[..., None]) -> Callable[..., Any]:
    """Return a method that records every ticket that is begun, and every one that is pushed."""

    def train_micro_batch(trainer: Any, batch: Any) -> Any:
        granted = trainer.current.granted
        ticket = {"clock": granted.clock, "low": granted.min_clock, "ticket": granted.ticket.key}
        record("begin", samples=granted.ticket.samples, **ticket)
        time.sleep(PLAN.get("pause_s", 0.0))
        logs = method(trainer, batch)
        if trainer.committed:
            record("commit", step=trainer._session.step, rate=float(trainer.model.optimizer.learning_rate), **ticket)
            pause_while_held(OUT, trainer._session.step, EPOCHS * SAMPLES // BATCH)
        return logs

    return train_micro_batch


def main() -> None:
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    run = shoal.join()
    name = f"{run.member.replace('/', '-')}.{os.environ.get('SHOAL_INCARNATION', 'alone')}.jsonl"
    log = (OUT / name).open("a", buffering=1)

    def record(event: str, **fields: Any) -> None:
        base = {"event": event, "member": run.member, "pid": os.getpid(), "at": time.monotonic()}
        log.write(json.dumps(base | fields) + "\n")

    class RecordDrops(logging.Handler):
        def emit(self, entry: logging.LogRecord) -> None:
            if entry.levelno >= logging.WARNING and entry.args:
                record("dropped", whom=entry.args[0])

    logging.getLogger("shoal.parameter_server").addHandler(RecordDrops())
    KerasServedTrainer._train_micro_batch = recording(KerasServedTrainer._train_micro_batch, record)  # type: ignore[method-assign]
    keras.utils.set_random_seed(abs(hash(run.member)) % 1000)
    x = np.random.default_rng(1).normal(size=(SAMPLES, 16))
    layers = [Counter(), keras.layers.Dense(24, activation="tanh"), keras.layers.BatchNormalization()]
    model = keras.Sequential([keras.Input((17,)), *layers, keras.layers.Dense(1)])
    model.compile(CountingSGD(0.1, momentum=0.9), "mse")
    record("ready", role=os.environ.get("SHOAL_ROLE", "trainer"))
    numbered = np.hstack([np.arange(SAMPLES)[:, None], x])
    data = shoal.batches(numbered, np.sin(x.sum(1, keepdims=True)), size=BATCH, seed=5)
    csv = keras.callbacks.CSVLogger(str(OUT / "epochs.csv"))
    decay = keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.9 * rate if epoch else rate)
    model.fit(data, epochs=EPOCHS, verbose=0, callbacks=[shoal.Elastic(decay, csv)])
    run.save(OUT / "final.keras", model)
    counts = [np.unique(keras.ops.convert_to_numpy(counter)).tolist() for counter in model.layers[0].counted]
    saved = keras.models.load_model(OUT / "final.keras", {"Counter": Counter}, compile=False)
    record("done", step=run.step, counts=counts, sum=total(model), saved=total(saved))


def total(model: Any) -> float:
    return float(sum(np.abs(keras.ops.convert_to_numpy(v)).sum() for v in model.weights))


if __name__ == "__main__":
    main()
