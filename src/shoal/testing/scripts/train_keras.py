"""Task of the conformance suite in Keras, on the backend that KERAS_BACKEND names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

import shoal.keras as shoal
from shoal.testing.scripts.task import RunRecord, TrainingTask


class SampleNumbers(keras.layers.Layer):  # type: ignore[misc]
    """Layer that removes the number of each sample and records it, in every forward pass that is really computed."""

    def __init__(self, record_samples: Callable[[Any], None]) -> None:
        super().__init__()
        self._record_samples = record_samples

    def call(self, x: Any) -> Any:
        if keras.backend.backend() == "tensorflow":
            import tensorflow as tf

            tf.numpy_function(self._record_samples, [x[:, 0]], [])
        elif x.device.type != "meta":
            self._record_samples(x[:, 0].detach().cpu().numpy())
        return x[:, 1:]


class RecordCommits(keras.callbacks.Callback):  # type: ignore[misc]
    """Callback that records every committed step and the loss of every epoch."""

    def __init__(self, run: shoal.Run, record: RunRecord) -> None:
        super().__init__()
        self._run, self._record = run, record

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
        run = self._run
        self._record.commit(run.step - 1, run.world, run.size, parameters(self.model))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._record.write("epoch", epoch=epoch, loss=float((logs or {})["loss"]))


def parameters(model: Any) -> list[Any]:
    return [keras.ops.convert_to_numpy(variable) for variable in model.trainable_variables]


def build(
    task: TrainingTask, record_samples: Callable[[Any], None], *between: Any, kind: type = keras.optimizers.SGD
) -> Any:
    """Return the compiled model of the task, with further layers between its two."""
    layers = keras.layers.Dense(task.width, activation="tanh"), *between, keras.layers.Dense(1)
    model = keras.Sequential([keras.Input((task.features + 1,)), SampleNumbers(record_samples), *layers])
    model.set_weights(task.start())
    model.compile(kind(task.rate, task.momentum), "mse", jit_compile=False)
    return model


def main() -> None:
    keras.config.set_floatx("float64")
    task, run = TrainingTask.read(), shoal.join()
    record = RunRecord(task, run.member)

    def record_samples(numbers: Any) -> None:
        record.given(run.step, run.world, numbers.tolist() if run.share else [])

    model = build(task, record_samples)
    data = shoal.batches(*task.data(), size=task.batch, seed=task.seed)
    record.ready()
    model.fit(data, epochs=task.epochs, verbose=0, callbacks=[shoal.Elastic(), RecordCommits(run, record)])
    record.done(run.step, parameters(model))


if __name__ == "__main__":
    main()
