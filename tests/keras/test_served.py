"""Keras models with parameter servers: training results, refusals, and whole runs that lose no sample."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
keras = pytest.importorskip("keras")

from tests.keras.threaded_servers import ThreadSession, run_threads  # noqa: E402
from tests.process.servers.served_run import ServedRun  # noqa: E402

import shoal.keras as shoal  # noqa: E402
from shoal.core.data.sample_order import SampleOrder  # noqa: E402
from shoal.errors import UnsupportedWithServers  # noqa: E402
from shoal.keras.backends.base import make_backend  # noqa: E402
from shoal.keras.backends.optimizer_guard import OptimizerGuard  # noqa: E402
from shoal.keras.modes.server_shard import KerasShardStore, encode_push  # noqa: E402
from shoal.settings import RunSettings  # noqa: E402
from shoal.testing.conformance import KERAS_TENSORFLOW  # noqa: E402
from shoal.testing.run_under_test import closing  # noqa: E402
from shoal.worker.parameter_server.client import ServerClient, TicketAbandoned  # noqa: E402

pytestmark = [pytest.mark.keras, pytest.mark.timeout(600)]

SAMPLES, SIZE, EPOCHS = 40, 12, 3
STEPS = EPOCHS * 4
ON_TENSORFLOW = keras.backend.backend() == "tensorflow"
# Keras computes some constants of a loss in single precision on PyTorch.
BOUND = 1e-10 if ON_TENSORFLOW else 1e-6
only_tensorflow = pytest.mark.skipif(not ON_TENSORFLOW, reason="TensorFlow only")
if ON_TENSORFLOW:
    import tensorflow as tf

    # Members of one process wait for each other inside TensorFlow's threads: there must be one for each.
    tf.config.threading.set_inter_op_parallelism_threads(8)


@pytest.fixture(autouse=True)
def double() -> Any:
    for name in ("float64", "float32"):
        keras.config.set_floatx(name)
        keras.config.set_dtype_policy(name)
        if name == "float64":
            yield


def data() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(SAMPLES, 6)), rng.normal(size=(SAMPLES, 1))


def model_with(optimizer: Any, *more: Callable[[], Any], seed: int = 3, eager: bool = False) -> Any:
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(8, activation="tanh"), *(layer() for layer in more), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((6,)), *layers])
    model.compile(optimizer, "mse", metrics=["mae"], run_eagerly=eager)
    return model


def normal() -> Any:
    return keras.layers.BatchNormalization(momentum=0.5)


def frozen() -> Any:
    return keras.layers.Dense(8, trainable=False)


def alone(model: Any, callbacks: Any = (), **fit: Any) -> dict[str, Any]:
    """Train with plain Keras on the same batches."""
    how = {"epochs": EPOCHS, "validation_data": data()} | fit
    history = model.fit(*data(), batch_size=SIZE, shuffle=False, verbose=0, callbacks=list(callbacks), **how)
    return {"weights": weights_of(model), "history": history.history}


def weights_of(model: Any) -> list[Any]:
    return [keras.ops.convert_to_numpy(v) for v in model.variables if "seed" not in v.path]


def fitted(
    prepare: Callable[[str], Any],
    trainers: int = 1,
    servers: int = 2,
    callbacks: Callable[[str], list[Any]] = lambda _name: [],
    fit: dict[str, Any] | None = None,
    batching: dict[str, Any] | None = None,
    **settings: Any,
) -> list[dict[str, Any]]:
    """Return the results of `model.fit` on every trainer."""
    members = [f"{role}-{n}" for role, count in (("server", servers), ("trainer", trainers)) for n in range(count)]
    models = {name: prepare(name) for name in members}

    def body(session: ThreadSession) -> dict[str, Any]:
        model, run = models[session.me], shoal.Run(session, "threads", "unused")
        batches = shoal.batches(*data(), size=SIZE, shuffle=False, **(batching or {}))
        how = {"epochs": EPOCHS, "verbose": 0, "validation_data": data()} | (fit or {})
        elastic = shoal.Elastic(*callbacks(session.me), run=run)
        history = model.fit(batches, callbacks=[elastic], **how)
        return {"weights": weights_of(model), "history": history.history, "step": run.step, "model": model}

    return run_threads(trainers, servers, body, **settings)


def check_same(result: dict[str, Any], expected: dict[str, Any]) -> None:
    for actual, weights in zip(result["weights"], expected["weights"], strict=True):
        np.testing.assert_allclose(actual, weights, rtol=0, atol=BOUND)
    assert result["history"].keys() == expected["history"].keys()
    for name, values in expected["history"].items():
        np.testing.assert_allclose(result["history"][name], values, rtol=1e-5)


class KerasServed(ServedRun):
    """One run of train_served.py."""

    script = Path(__file__).with_name("train_served.py")

    def check_counts(self) -> None:
        done, epochs = self.events_of("done"), self.plan["epochs"]
        assert done
        for event in done:
            assert event["counts"] == [[epochs], [epochs]], f"{event['member']} counted {event['counts']}"
            assert event["step"] == self.order().total_steps
        assert len({event["sum"] for event in done}) == 1, "trainers end with different parameters"
        for event in done:
            assert event["saved"] == event["sum"], "another model was saved"
        newest = 0
        for commit in self.commits():
            if commit["ticket"][0] >= newest:  # servers ignore the rates of older tickets
                newest = commit["ticket"][0]
                rate = 0.1 * 0.9 ** (newest // self.order().steps_per_epoch)
                assert abs(commit["rate"] - rate) < 1e-12, f"{commit} has another learning rate than {rate}"
        rows = (self.records / "epochs.csv").read_text().splitlines()
        assert sum(row.startswith("epoch,") for row in rows) == 1, "several trainers wrote at the same time"
        assert len(rows) > epochs // 2, "callbacks wrote too little"


# --- training


class Traced(keras.optimizers.SGD):
    """Counts the calls of its update from Python: one for each variable and trace."""

    calls = 0

    def update_step(self, *arguments: Any) -> None:
        Traced.calls += 1
        super().update_step(*arguments)


@only_tensorflow
def test_single_trainer_with_servers_equals_plain_keras_and_traces_once() -> None:
    """Frozen weights and layer state come from the servers as well."""

    def prepare(name: str) -> Any:
        seed = 3 if name.startswith("server") else 77
        return model_with(Traced(0.05, momentum=0.9, nesterov=True), normal, frozen, seed=seed)

    Traced.calls = 0
    (result,) = fitted(prepare)
    assert result["step"] == STEPS
    assert Traced.calls == len(result["model"].trainable_variables)
    check_same(result, alone(prepare("server")))


def test_schedule_and_averages_equal_plain_keras_when_a_ticket_is_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def prepare(_name: str) -> Any:
        rate = keras.optimizers.schedules.ExponentialDecay(0.05, 2, 0.5)
        return model_with(keras.optimizers.Adam(rate, use_ema=True, ema_momentum=0.8), normal)

    original, abandoned = ServerClient.push, iter([False, False, True])

    def push(*arguments: Any) -> None:
        if next(abandoned, False):
            raise TicketAbandoned("for the test")
        original(*arguments)

    monkeypatch.setattr(ServerClient, "push", push)
    (result,) = fitted(prepare, servers=1)
    check_same(result, alone(prepare("")))
    assert int(result["model"].optimizer.iterations) == STEPS


def decayed(optimizer: Any) -> Any:
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "nadam with its product of decays": lambda: keras.optimizers.Nadam(0.01),
    "weight decay with exclusions": lambda: decayed(keras.optimizers.AdamW(0.01, weight_decay=0.1, clipnorm=0.5)),
    "moving averages": lambda: keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=2),
}


@pytest.mark.parametrize("which", OPTIMIZERS)
def test_shards_step_independently_and_can_be_transferred_within_a_batch(which: str) -> None:
    """Two tickets make a batch; one shard receives all of them before the other receives its first."""
    steps, order = 5, SampleOrder(SAMPLES, SIZE, 2)
    first, second, plain = (model_with(OPTIMIZERS[which]()) for _ in range(3))
    stores = [
        KerasShardStore(make_backend(model, OptimizerGuard(model.optimizer)), order, parts=3)
        for model in (first, second)
    ]
    layouts = [store.layout for store in stores]
    dice = np.random.default_rng(7)
    gradients = [[dice.normal(size=v.shape) for v in plain.trainable_variables] for _ in range(2 * steps)]
    plain.optimizer.build(plain.trainable_variables)
    sizes = [half for step in range(steps) for half in (order.size_of(step) // 2,) * 2]
    for at in range(0, 2 * steps, 2):
        means = [(a + b) / 2 for a, b in zip(gradients[at], gradients[at + 1], strict=True)]
        plain.optimizer.apply([keras.ops.convert_to_tensor(mean) for mean in means], plain.trainable_variables)
    for part in (2, 1):
        for number, (arrays, samples) in enumerate(zip(gradients, sizes, strict=True)):
            if number == steps:  # in the middle of a batch
                stores[1].install(part, *stores[0].capture(part))
            chosen = int(number >= steps)
            model = (first, second)[chosen]
            by_id = {id(v): array for v, array in zip(model.trainable_variables, arrays, strict=True)}
            header, body = encode_push(layouts[chosen], part, by_id, [], (float(samples), number // 2, None))
            data = memoryview(b"".join(array.tobytes() for array in body))
            stores[chosen].apply(part, header, samples, 0.5, data)
        assert stores[1].version(part) == steps
    for actual, expected in zip(second.trainable_variables, plain.trainable_variables, strict=True):
        actual, expected = keras.ops.convert_to_numpy(actual), keras.ops.convert_to_numpy(expected)
        np.testing.assert_allclose(actual, expected, rtol=0, atol=BOUND)
    stores[1].reset(1)
    for variable, initial in zip(layouts[1].parts[1], stores[1]._initial_values[1], strict=True):
        assert (keras.ops.convert_to_numpy(variable) == initial).all()
    assert stores[1].version(1) == 0


def test_servers_use_the_learning_rate_of_callbacks_with_micro_batches() -> None:
    def halved() -> Any:
        return keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2 if epoch else rate)

    def prepare(_name: str) -> Any:
        return model_with(keras.optimizers.SGD(0.1, momentum=0.9))

    (result,) = fitted(prepare, callbacks=lambda _name: [halved()], batching={"micro": 5})
    check_same(result, alone(prepare(""), [halved()]))
    np.testing.assert_allclose(result["history"]["learning_rate"], [0.1, 0.05, 0.025])


@only_tensorflow
def test_gradient_tape_loop_trains_with_servers() -> None:
    def prepare() -> Any:
        return model_with(keras.optimizers.Adam(0.01), normal)

    models = {name: prepare() for name in ("server-0", "trainer-0")}

    def body(session: ThreadSession) -> Any:
        model, run = models[session.me], shoal.Run(session, "threads", "unused")
        optimizer = shoal.elastic(model.optimizer, model, run)

        @tf.function(reduce_retracing=True)
        def train(x: Any, y: Any) -> None:
            with tf.GradientTape() as tape:
                loss = keras.ops.mean(keras.ops.square(model(x, training=True) - y))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

        for x, y in shoal.batches(*data(), size=SIZE, shuffle=False, epochs=EPOCHS, micro=6):
            train(tf.constant(x), tf.constant(y))
        return run.step, weights_of(model)

    ((step, weights),) = run_threads(1, 1, body)
    assert step == STEPS
    reference = prepare()
    for _ in range(EPOCHS):
        for start in range(0, SAMPLES, SIZE):
            # Layer statistics are computed micro-batch by micro-batch.
            x, y = (array[start : start + SIZE] for array in data())
            with tf.GradientTape() as tape:
                parts = [(x[at : at + 6], y[at : at + 6]) for at in range(0, len(x), 6)]
                losses = [keras.ops.sum(keras.ops.square(reference(a, training=True) - b)) for a, b in parts]
                loss = keras.ops.sum(keras.ops.stack(losses)) / len(x)
            gradients = tape.gradient(loss, reference.trainable_variables)
            reference.optimizer.apply_gradients(zip(gradients, reference.trainable_variables, strict=True))
    for actual, expected in zip(weights, weights_of(reference), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=BOUND)


# --- epochs, and members of unequal speed


class Gate(keras.callbacks.Callback):
    """Blocks one trainer after its first ticket until the other has begun the last epoch."""

    opened = threading.Event()

    def __init__(self, held: bool) -> None:
        super().__init__()
        self._held = held

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if not self._held and epoch == EPOCHS - 1:
            Gate.opened.set()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._held:
            assert Gate.opened.wait(60)


def test_epoch_ends_after_a_members_last_ticket_of_it() -> None:
    """With steps_per_epoch Keras counts calls; a member may have more tickets than steps, or none at all."""

    def prepare(_name: str) -> Any:
        return model_with(keras.optimizers.Adam(0.01))

    Gate.opened.clear()
    how: dict[str, Any] = {"fit": {"steps_per_epoch": 3}, "sync": "async", "ticket_sizing": "equal"}
    fast, held = fitted(prepare, trainers=2, callbacks=lambda name: [Gate(name == "trainer-1")], **how)
    assert fast["step"] == held["step"] == 3 * EPOCHS
    for first, second in zip(fast["weights"], held["weights"], strict=True):
        assert (first == second).all(), "trainers end with different parameters"
    assert [math.isnan(loss) for loss in held["history"]["loss"]][1], "a member reported an epoch without a ticket"
    for result in (fast, held):
        assert len(result["history"]["val_loss"]) == EPOCHS
        assert not any(math.isnan(loss) for loss in result["history"]["val_loss"])
    assert fast["history"]["val_loss"][-1] == held["history"]["val_loss"][-1]


class Stop(keras.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.stop_training = True


def test_trainer_that_stops_early_returns_its_ticket() -> None:
    def prepare(_name: str) -> Any:
        return model_with(keras.optimizers.Adam(0.01))

    def stopping(name: str) -> list[Any]:
        return [Stop()] if name == "trainer-0" else []

    early, late = fitted(prepare, trainers=2, callbacks=stopping, sync="stale:0", lease_s=100)
    assert len(early["history"]["loss"]) == 1
    assert early["step"] < late["step"] == STEPS


# --- refusals


def refusal(optimizer: Any, given: Any = None, **settings: Any) -> str:
    """Return the error that a run with servers raises."""
    model = model_with(optimizer)
    run_settings = RunSettings(sync="stale:1", servers=1, checkpoint_every_s=0, **settings)
    session = ThreadSession("trainer-0", "trainer", run_settings, "")
    try:
        run = shoal.Run(session, "threads", "unused")
        batches = shoal.batches(*(given or data()), size=SIZE)
        with pytest.raises(UnsupportedWithServers) as raised:
            model.fit(batches, verbose=0, callbacks=[shoal.Elastic(run=run)])
        return raised.value.what
    finally:
        session.close()


class Forgetful(keras.optimizers.SGD):
    """Optimizer whose configuration lacks an argument of its constructor."""

    def __init__(self, needed: int, **how: Any) -> None:
        super().__init__(**how)


def test_options_that_need_the_whole_gradient_are_refused() -> None:
    adam = keras.optimizers.Adam
    assert "global_clipnorm cannot be used with --sync stale:1" in refusal(adam(global_clipnorm=1.0))
    assert "loss scaling" in refusal(keras.optimizers.LossScaleOptimizer(adam()))
    assert "batch=auto" in refusal(adam(), batch="auto:4:40")
    if ON_TENSORFLOW:
        stream = tf.data.Dataset.from_tensor_slices(data()).filter(lambda *_: True).batch(4)
        assert "a stream" in refusal(adam(), (stream,))


def test_servers_refuse_an_optimizer_that_cannot_be_copied() -> None:
    def prepare(_name: str) -> Any:
        return model_with(Forgetful(3, learning_rate=0.1))

    with pytest.raises(UnsupportedWithServers, match="Forgetful cannot be copied"):
        fitted(prepare, servers=1)


# --- whole runs


@only_tensorflow
@pytest.mark.process
def test_runs_lose_no_sample_when_members_are_killed_and_the_run_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every shard counts every sample once per epoch, and no trainer is further ahead than the bound."""
    for name, value in KERAS_TENSORFLOW.environ.items():
        monkeypatch.setenv(name, value)
    restarts = ("lease_s=4", "restarts.infrastructure=1000", "backoff_s=0.05", "backoff_max_s=0.2")
    settings = ("sync=stale:1", "servers=2", *restarts)
    with closing(KerasServed(tmp_path, "2:2", settings, samples=256, batch=32, epochs=10, pause_s=0.03)) as run:
        run.until(run.replicated, "every part to have a backup")
        run.until_step(5)
        run.kill("local/1")
        run.until_step(run.step() + 10)
        run.kill("local/server-0")
        run.until_step(run.step() + 10)
        run.shoal("stop", run.name)
        run.finish(exit_code=75)
        reached = run.step()
        assert reached < run.order().total_steps, "the run was over before it was stopped"
        run.process = run.start("resume", run.shoal("ps", "--all")[0]["run"])
        run.finish()
        run.check_counts()
        assert run.check_bound(1) == 1, "the bound was never reached, so nothing was tested"
        resumed = max(e["at"] for e in run.events_of("ready"))
        assert min(e["ticket"][0] for e in run.events_of("begin") if e["at"] > resumed) >= reached - 4, (
            "it started over"
        )


@only_tensorflow
def test_suite_passes_on_the_torch_backend() -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-k",
        "not runs and not refuse",
        __file__,
    ]
    environ = os.environ | {"KERAS_BACKEND": "torch"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
