"""MultiWorkerMirroredStrategy, equal shares: the custom loop that its guide recommends."""

from __future__ import annotations

import json
import os
from typing import Any

import tensorflow as tf

from benchmarks import job as jobs
from benchmarks import keras_job

job = jobs.from_arguments()
keras_job.one_thread()
told = json.loads(os.environ["TF_CONFIG"])
rank, members = told["task"]["index"], len(told["cluster"]["worker"])
strategy = tf.distribute.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = keras_job.build_model(job.model)
    optimizer = keras_job.build_optimizer()
    optimizer.build(model.trainable_variables)
loss_of = keras_job.build_loss(reduction="none")


def replica(images: Any, labels: Any) -> None:
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(loss_of(labels, model(images, training=True))) / job.batch
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))


@tf.function
def train(images: Any, labels: Any) -> None:
    strategy.run(replica, args=(images, labels))


images, labels = keras_job.build_arrays()
share = job.batch // members
steps = len(images) // job.batch
for step in range(100_000_000):
    job.wait_for_turn(step)
    first = step % steps * job.batch + rank * share
    train(tf.constant(images[first : first + share]), tf.constant(labels[first : first + share]))
    job.committed(step, world=1, size=members, samples=share)
