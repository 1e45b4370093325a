"""Training script for the tests of a Keras evaluator."""

import json
import os

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"

import keras
import numpy as np

import shoal.keras as shoal

PLAN = json.loads(os.environ["FAULTS"])
keras.utils.set_random_seed(0)
random = np.random.default_rng(0)
x = random.normal(size=(256, 8)).astype("float32")
y = x.sum(1, keepdims=True)
model = keras.Sequential([keras.Input((8,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)])
model.compile(keras.optimizers.SGD(0.01), "mse", metrics=["mae"])
elastic = shoal.Elastic(
    evaluate=(x[:64], y[:64]),
    best=PLAN["best"],
    patience=PLAN.get("patience"),
    export=os.environ["RECORDS"] + "/best.keras",
)
model.fit(shoal.batches(x, y, size=64), epochs=PLAN["epochs"], verbose=0, callbacks=[elastic])
