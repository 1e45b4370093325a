"""The job of `benchmarks.job` in Keras: the same sizes, the same pace and commit log, on TensorFlow."""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

from benchmarks import job as jobs

SIDE = (jobs.PIXELS, jobs.PIXELS, 1)


def one_thread() -> None:
    tf.config.threading.set_inter_op_parallelism_threads(1)
    tf.config.threading.set_intra_op_parallelism_threads(1)


def build_model(name: str) -> Any:
    """Return the model of that name, with the same weights in every process."""
    keras.utils.set_random_seed(0)
    layers = keras.layers
    if name == "cnn":
        conv = [layers.Conv2D(filters, 3, padding="same", activation="relu") for filters in (16, 32)]
        body = [conv[0], layers.MaxPool2D(), conv[1], layers.MaxPool2D(), layers.Flatten()]
        return keras.Sequential(
            [keras.Input(SIDE), *body, layers.Dense(64, activation="relu"), layers.Dense(jobs.CLASSES)]
        )
    hidden = [layers.Dense(units, activation="relu") for units in (4096, 4096, 1536)]
    return keras.Sequential([keras.Input(SIDE), layers.Flatten(), *hidden, layers.Dense(jobs.CLASSES)])


def build_arrays() -> tuple[Any, Any]:
    """Return generated images with labels that can be learnt."""
    images = np.random.default_rng(1).normal(size=(jobs.SAMPLES, *SIDE)).astype("float32")
    return images, images[:, ::7, ::7, 0].reshape(len(images), -1)[:, : jobs.CLASSES].argmax(1)


def build_optimizer() -> Any:
    return keras.optimizers.SGD(jobs.LEARNING_RATE, momentum=jobs.MOMENTUM)


def build_loss(**how: Any) -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **how)
