"""The script under tests of Keras runs with servers: a small model, and two vectors in which servers count samples.

The counters are weights, one in each of two shards, and an optimizer of its own kind counts in them: so what is checked
at the end is what was really applied, shard by shard. As tests/process/servers/train.py does it for torch.
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
    """Takes the numbers of samples off, and adds what was counted of them to the loss."""

    def build(self, shape: Any) -> None:
        self.counted = [self.add_weight(shape=(SAMPLES,), initializer="zeros", name=f"counted{n}") for n in range(2)]

    def call(self, x: Any) -> Any:
        numbers = keras.ops.cast(x[:, 0], "int32")
        for one in self.counted:
            self.add_loss(keras.ops.mean(keras.ops.take(one, numbers)))
        return x[:, 1:]


class CountingSGD(keras.optimizers.SGD):
    """SGD that counts, instead of stepping, in the counters, which are the only vectors of that length."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        if tuple(variable.shape) != (SAMPLES,):
            super().update_step(gradient, variable, learning_rate)
            return
        seen = keras.ops.where(gradient > 0, gradient, np.inf)
        self.assign_add(variable, keras.ops.round(gradient / keras.ops.min(seen)))


def recording(real: Callable[..., Any], record: Callable[..., None]) -> Callable[..., Any]:
    """Tells of every ticket that is begun, and of every one that is pushed."""

    def piece(trainer: Any, batch: Any) -> Any:
        granted = trainer.turn.granted
        told = {"clock": granted.clock, "low": granted.min_clock, "ticket": granted.ticket.key}
        record("begin", samples=granted.ticket.samples, **told)
        time.sleep(PLAN.get("pause_s", 0.0))
        logs = real(trainer, batch)
        if trainer.committed:
            record("commit", step=trainer._session.step, rate=float(trainer.model.optimizer.learning_rate), **told)
            pause_while_held(OUT, trainer._session.step, EPOCHS * SAMPLES // BATCH)
        return logs

    return piece


def main() -> None:
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    run = shoal.join()
    name = f"{run.member.replace('/', '-')}.{os.environ.get('SHOAL_INCARNATION', 'alone')}.jsonl"
    log = (OUT / name).open("a", buffering=1)

    def record(event: str, **fields: Any) -> None:
        base = {"event": event, "member": run.member, "pid": os.getpid(), "at": time.monotonic()}
        log.write(json.dumps(base | fields) + "\n")

    class Drops(logging.Handler):
        def emit(self, told: logging.LogRecord) -> None:
            if told.levelno >= logging.WARNING and told.args:
                record("dropped", whom=told.args[0])

    logging.getLogger("shoal.parameter_server").addHandler(Drops())
    KerasServedTrainer._piece = recording(KerasServedTrainer._piece, record)  # type: ignore[method-assign]
    keras.utils.set_random_seed(abs(hash(run.member)) % 1000)
    x = np.random.default_rng(1).normal(size=(SAMPLES, 16))
    layers = [Counter(), keras.layers.Dense(24, activation="tanh"), keras.layers.BatchNormalization()]
    model = keras.Sequential([keras.Input((17,)), *layers, keras.layers.Dense(1)])
    model.compile(CountingSGD(0.1, momentum=0.9), "mse")
    record("ready", role=os.environ.get("SHOAL_ROLE", "trainer"))
    numbered = np.hstack([np.arange(SAMPLES)[:, None], x])
    data = shoal.batches(numbered, np.sin(x.sum(1, keepdims=True)), size=BATCH, seed=5)
    written = keras.callbacks.CSVLogger(str(OUT / "epochs.csv"))
    lowered = keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.9 * rate if epoch else rate)
    model.fit(data, epochs=EPOCHS, verbose=0, callbacks=[shoal.Elastic(lowered, written)])
    run.save(OUT / "final.keras", model)
    counts = [np.unique(keras.ops.convert_to_numpy(one)).tolist() for one in model.layers[0].counted]
    saved = keras.models.load_model(OUT / "final.keras", {"Counter": Counter}, compile=False)
    record("done", step=run.step, counts=counts, sum=total(model), saved=total(saved))


def total(model: Any) -> float:
    return float(sum(np.abs(keras.ops.convert_to_numpy(v)).sum() for v in model.weights))


if __name__ == "__main__":
    main()
