"""Training script without Shoal: ParameterServerStrategy, its own loop and its own checkpoints."""

import json
import os
import time
from pathlib import Path

import numpy as np
import tensorflow as tf

OUT = Path(os.environ["RECORDS"])
ROUNDS, STEPS = 6, 8


def main() -> None:
    tf.config.threading.set_intra_op_parallelism_threads(1)
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    log = (OUT / f"{os.getpid()}.jsonl").open("a", buffering=1)

    def record(event: str, **fields) -> None:
        base = {"event": event, "at": time.time(), "type": resolver.task_type, "pid": os.getpid()}
        log.write(json.dumps(base | {"index": resolver.task_id} | fields) + "\n")

    if resolver.task_type in ("worker", "ps"):
        server = tf.distribute.Server(
            resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id, protocol="grpc"
        )
        record("ready")
        server.join()
    else:
        train(resolver, record)


def train(resolver, record) -> None:
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        weights = tf.Variable(tf.zeros((8, 1)))
        rounds = tf.Variable(0, dtype=tf.int64)
    checkpoints = tf.train.CheckpointManager(tf.train.Checkpoint(weights=weights, rounds=rounds), str(OUT / "tf"), 2)
    checkpoints.restore_or_initialize()
    record("ready", first=int(rounds.numpy()))

    @tf.function
    def step(seed):
        x = tf.random.stateless_normal((32, 8), seed=(seed, 0))
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(x @ weights - tf.reduce_sum(x, 1, keepdims=True)))
        weights.assign_sub(0.05 * tape.gradient(loss, weights))
        return loss

    for number in range(int(rounds.numpy()), ROUNDS):
        losses = [coordinator.schedule(step, args=(tf.constant(number * STEPS + i),)) for i in range(STEPS)]
        coordinator.join()
        rounds.assign_add(1)
        checkpoints.save()
        record("round", round=number, loss=float(np.mean([loss.fetch() for loss in losses])))
        # Wait until the test releases it, so that training does not end too early.
        while number == 2 and (OUT / "hold").exists():
            time.sleep(0.05)
    print("trained with", len(resolver.cluster_spec().job_tasks("worker")), "workers", flush=True)


if __name__ == "__main__":
    main()
