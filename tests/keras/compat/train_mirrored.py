"""Training script without Shoal: MultiWorkerMirroredStrategy, its own loop and its own checkpoints."""

import json
import os
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

OUT = Path(os.environ["RECORDS"])
EPOCHS, STEPS, BATCH = 6, 4, 32
CHECKPOINT = OUT / "model.npz"


def main() -> None:
    tf.config.threading.set_intra_op_parallelism_threads(1)
    task = json.loads(os.environ["TF_CONFIG"])["task"]
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    size = strategy.num_replicas_in_sync
    log = (OUT / f"{os.getpid()}.jsonl").open("a", buffering=1)

    def record(event: str, **fields) -> None:
        base = {"event": event, "at": time.time(), "index": task["index"], "size": size, "pid": os.getpid()}
        log.write(json.dumps(base | fields) + "\n")

    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(0.05)
        optimizer.build(model.trainable_variables)
    first = 0
    if CHECKPOINT.exists():
        saved = np.load(CHECKPOINT)
        first = int(saved["epoch"]) + 1
        model.set_weights([saved["kernel"], saved["bias"]])

    @tf.function
    def step(x, y):
        def replica(x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.square(model(x, training=True) - y)) / (BATCH * size)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss

        return strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(replica, args=(x, y)), axis=None)

    record("ready", first=first)
    random = np.random.default_rng(task["index"])
    for epoch in range(first, EPOCHS):
        for _ in range(STEPS):
            x = random.normal(size=(BATCH, 8)).astype("float32")
            loss = float(step(x, x.sum(1, keepdims=True)))
        if task["index"] == 0:
            kernel, bias = model.get_weights()
            np.savez(OUT / "part.npz", epoch=epoch, kernel=kernel, bias=bias)
            os.replace(OUT / "part.npz", CHECKPOINT)
        record("epoch", epoch=epoch, loss=loss)
        # Wait until the test releases it, so that training does not end too early.
        while epoch == 2 and (OUT / "hold").exists():
            time.sleep(0.05)
    print("trained as worker", task["index"], "of", size, flush=True)


if __name__ == "__main__":
    main()
