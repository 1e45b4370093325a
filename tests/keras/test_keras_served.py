"""Keras models whose parameters are held by servers: what they learn, what is refused, and that nothing is lost."""

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

from tests.keras.town import Placed, town  # noqa: E402
from tests.process.servers.served_run import ServedRun  # noqa: E402

import shoal.keras as shoal  # noqa: E402
from shoal.core.data.sample_order import SampleOrder  # noqa: E402
from shoal.errors import UnsupportedWithServers  # noqa: E402
from shoal.keras.backends.base import backend_of  # noqa: E402
from shoal.keras.backends.optimizer_guard import OptimizerGuard  # noqa: E402
from shoal.keras.modes.server_shard import KerasShardStore, gradients_of  # noqa: E402
from shoal.settings import RunSettings  # noqa: E402
from shoal.testing.conformance import KERAS_TENSORFLOW  # noqa: E402
from shoal.testing.run_under_test import closing  # noqa: E402
from shoal.worker.parameter_server.client import ServerClient, TicketAbandoned  # noqa: E402

pytestmark = [pytest.mark.keras, pytest.mark.timeout(300)]

SAMPLES, SIZE, EPOCHS = 40, 12, 3
STEPS = EPOCHS * 4
ON_TENSORFLOW = keras.backend.backend() == "tensorflow"
# Keras computes some constants of a loss in single precision on PyTorch.
BOUND = 1e-10 if ON_TENSORFLOW else 1e-6
only_tensorflow = pytest.mark.skipif(not ON_TENSORFLOW, reason="a matter of TensorFlow")
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
    layers = [keras.layers.Dense(8, activation="tanh"), *(one() for one in more), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((6,)), *layers])
    model.compile(optimizer, "mse", metrics=["mae"], run_eagerly=eager)
    return model


def normal() -> Any:
    return keras.layers.BatchNormalization(momentum=0.5)


def frozen() -> Any:
    return keras.layers.Dense(8, trainable=False)


def alone(model: Any, callbacks: Any = (), **fit: Any) -> dict[str, Any]:
    """Plain Keras on the same batches."""
    how = {"epochs": EPOCHS, "validation_data": data()} | fit
    found = model.fit(*data(), batch_size=SIZE, shuffle=False, verbose=0, callbacks=list(callbacks), **how)
    return {"weights": weights_of(model), "history": found.history}


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
    """What `model.fit` gives to every trainer."""
    members = [f"{role}-{n}" for role, count in (("server", servers), ("trainer", trainers)) for n in range(count)]
    models = {name: prepare(name) for name in members}

    def body(session: Placed) -> dict[str, Any]:
        model, run = models[session.me], shoal.Run(session, "town", "unused")
        given = shoal.batches(*data(), size=SIZE, shuffle=False, **(batching or {}))
        how = {"epochs": EPOCHS, "verbose": 0, "validation_data": data()} | (fit or {})
        elastic = shoal.Elastic(*callbacks(session.me), run=run)
        found = model.fit(given, callbacks=[elastic], **how)
        return {"weights": weights_of(model), "history": found.history, "step": run.step, "model": model}

    return town(trainers, servers, body, **settings)


def check_same(mine: dict[str, Any], its: dict[str, Any]) -> None:
    for one, other in zip(mine["weights"], its["weights"], strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=BOUND)
    assert mine["history"].keys() == its["history"].keys()
    for name, values in its["history"].items():
        np.testing.assert_allclose(mine["history"][name], values, rtol=1e-5)


class KerasServed(ServedRun):
    """One run of train_served.py."""

    script = Path(__file__).with_name("train_served.py")

    def check_counts(self) -> None:
        done, epochs = self.events_of("done"), self.plan["epochs"]
        assert done
        for one in done:
            assert one["counts"] == [[epochs], [epochs]], f"{one['member']} found {one['counts']}"
            assert one["step"] == self.order().total_steps
        assert len({one["sum"] for one in done}) == 1, "trainers end with different parameters"
        for one in done:
            assert one["saved"] == one["sum"], "another model was saved"
        newest = 0
        for one in self.commits():
            if one["ticket"][0] >= newest:  # others count for nothing
                newest = one["ticket"][0]
                rate = 0.1 * 0.9 ** (newest // self.order().steps_per_epoch)
                assert abs(one["rate"] - rate) < 1e-12, f"{one} has another learning rate than {rate}"
        rows = (self.records / "epochs.csv").read_text().splitlines()
        assert sum(row.startswith("epoch,") for row in rows) == 1, "several trainers wrote at a time"
        assert len(rows) > epochs // 2, "nobody wrote what callbacks write"


# --- what is learned


class Traced(keras.optimizers.SGD):
    """Counts how often its step for a variable is called from Python: once for each trace."""

    calls = 0

    def update_step(self, *given: Any) -> None:
        Traced.calls += 1
        super().update_step(*given)


@only_tensorflow
def test_one_trainer_with_servers_trains_and_measures_as_keras_does_without_tracing_again() -> None:
    """Weights that are frozen, and what layers keep, come from the servers as well."""

    def prepare(name: str) -> Any:
        seed = 3 if name.startswith("server") else 77
        return model_with(Traced(0.05, momentum=0.9, nesterov=True), normal, frozen, seed=seed)

    Traced.calls = 0
    (found,) = fitted(prepare)
    assert found["step"] == STEPS
    assert Traced.calls == len(found["model"].trainable_variables)
    check_same(found, alone(prepare("server")))


def test_a_schedule_and_averages_are_those_of_one_process_and_a_ticket_done_again_leaves_no_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def prepare(_name: str) -> Any:
        rate = keras.optimizers.schedules.ExponentialDecay(0.05, 2, 0.5)
        return model_with(keras.optimizers.Adam(rate, use_ema=True, ema_momentum=0.8), normal)

    real, tries = ServerClient.push, iter([False, False, True])

    def push(*given: Any) -> None:
        if next(tries, False):
            raise TicketAbandoned("it does not count")
        real(*given)

    monkeypatch.setattr(ServerClient, "push", push)
    (found,) = fitted(prepare, servers=1)
    check_same(found, alone(prepare("")))
    assert int(found["model"].optimizer.iterations) == STEPS


def decayed(optimizer: Any) -> Any:
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "nadam, which keeps a product of decays": lambda: keras.optimizers.Nadam(0.01),
    "weight decay but for some": lambda: decayed(keras.optimizers.AdamW(0.01, weight_decay=0.1, clipnorm=0.5)),
    "averages": lambda: keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=2),
}


@pytest.mark.parametrize("which", OPTIMIZERS)
def test_every_shard_steps_for_itself_and_can_be_handed_over_at_any_time(which: str) -> None:
    """Two tickets make a batch; one shard has taken in all of them before the other has the first."""
    steps, order = 5, SampleOrder(SAMPLES, SIZE, 2)
    first, second, plain = (model_with(OPTIMIZERS[which]()) for _ in range(3))
    vaults = [
        KerasShardStore(backend_of(model, OptimizerGuard(model.optimizer)), order, parts=3) for model in (first, second)
    ]
    layouts = [vault.layout for vault in vaults]
    dice = np.random.default_rng(7)
    gradients = [[dice.normal(size=v.shape) for v in plain.trainable_variables] for _ in range(2 * steps)]
    plain.optimizer.build(plain.trainable_variables)
    sizes = [half for step in range(steps) for half in (order.size_of(step) // 2,) * 2]
    for at in range(0, 2 * steps, 2):
        means = [(a + b) / 2 for a, b in zip(gradients[at], gradients[at + 1], strict=True)]
        plain.optimizer.apply([keras.ops.convert_to_tensor(one) for one in means], plain.trainable_variables)
    for part in (2, 1):
        for number, (given, samples) in enumerate(zip(gradients, sizes, strict=True)):
            if number == steps:  # in the middle of a batch
                vaults[1].install(part, *vaults[0].capture(part))
            chosen = int(number >= steps)
            model = (first, second)[chosen]
            named = {id(v): one for v, one in zip(model.trainable_variables, given, strict=True)}
            how, body = gradients_of(layouts[chosen], part, named, [], (float(samples), number // 2, None))
            vaults[chosen].apply(part, how, samples, memoryview(b"".join(one.tobytes() for one in body)))
        assert vaults[1].version(part) == steps
    for mine, its in zip(second.trainable_variables, plain.trainable_variables, strict=True):
        mine, its = keras.ops.convert_to_numpy(mine), keras.ops.convert_to_numpy(its)
        np.testing.assert_allclose(mine, its, rtol=0, atol=BOUND)
    vaults[1].reset(1)
    for mine, its in zip(layouts[1].parts[1], vaults[1]._built[1], strict=True):
        assert (keras.ops.convert_to_numpy(mine) == its).all()
    assert vaults[1].version(1) == 0


def test_servers_follow_the_learning_rate_of_callbacks_and_micro_batches_change_nothing() -> None:
    def halved() -> Any:
        return keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2 if epoch else rate)

    def prepare(_name: str) -> Any:
        return model_with(keras.optimizers.SGD(0.1, momentum=0.9))

    (found,) = fitted(prepare, callbacks=lambda _name: [halved()], batching={"micro": 5})
    check_same(found, alone(prepare(""), [halved()]))
    np.testing.assert_allclose(found["history"]["learning_rate"], [0.1, 0.05, 0.025])


@only_tensorflow
def test_a_loop_with_a_gradient_tape_trains_with_servers_too() -> None:
    def prepare() -> Any:
        return model_with(keras.optimizers.Adam(0.01), normal)

    models = {name: prepare() for name in ("server-0", "trainer-0")}

    def body(session: Placed) -> Any:
        model, run = models[session.me], shoal.Run(session, "town", "unused")
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

    ((step, found),) = town(1, 1, body)
    assert step == STEPS
    reference = prepare()
    for _ in range(EPOCHS):
        for start in range(0, SAMPLES, SIZE):
            # Statistics of layers are those of the pieces that were computed.
            x, y = (one[start : start + SIZE] for one in data())
            with tf.GradientTape() as tape:
                parts = [(x[at : at + 6], y[at : at + 6]) for at in range(0, len(x), 6)]
                losses = [keras.ops.sum(keras.ops.square(reference(a, training=True) - b)) for a, b in parts]
                loss = keras.ops.sum(keras.ops.stack(losses)) / len(x)
            gradients = tape.gradient(loss, reference.trainable_variables)
            reference.optimizer.apply_gradients(zip(gradients, reference.trainable_variables, strict=True))
    for mine, its in zip(found, weights_of(reference), strict=True):
        np.testing.assert_allclose(mine, its, rtol=0, atol=BOUND)


# --- epochs, and members that are not alike


class Gate(keras.callbacks.Callback):
    """Holds one trainer up after its first ticket until the other has begun the last epoch."""

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


def test_an_epoch_ends_for_each_member_with_its_last_ticket_of_it_however_many_it_had() -> None:
    """With steps_per_epoch Keras counts calls; a member may have more tickets than steps, or none at all."""

    def prepare(_name: str) -> Any:
        return model_with(keras.optimizers.Adam(0.01))

    Gate.opened.clear()
    how: dict[str, Any] = {"fit": {"steps_per_epoch": 3}, "sync": "async", "ticket_sizing": "equal"}
    fast, held = fitted(prepare, trainers=2, callbacks=lambda name: [Gate(name == "trainer-1")], **how)
    assert fast["step"] == held["step"] == 3 * EPOCHS
    for mine, its in zip(fast["weights"], held["weights"], strict=True):
        assert (mine == its).all(), "trainers end with different parameters"
    assert [math.isnan(one) for one in held["history"]["loss"]][1], "a member told of an epoch that it did not see"
    for found in (fast, held):
        assert len(found["history"]["val_loss"]) == EPOCHS
        assert not any(math.isnan(one) for one in found["history"]["val_loss"])
    assert fast["history"]["val_loss"][-1] == held["history"]["val_loss"][-1]


class Stop(keras.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.stop_training = True


def test_a_trainer_that_stops_early_gives_its_ticket_back() -> None:
    def prepare(_name: str) -> Any:
        return model_with(keras.optimizers.Adam(0.01))

    def stopping(name: str) -> list[Any]:
        return [Stop()] if name == "trainer-0" else []

    early, late = fitted(prepare, trainers=2, callbacks=stopping, sync="stale:0", lease_s=100)
    assert len(early["history"]["loss"]) == 1
    assert early["step"] < late["step"] == STEPS


# --- what cannot be done


def refused(optimizer: Any, given: Any = None, **settings: Any) -> str:
    model = model_with(optimizer)
    found = RunSettings(sync="stale:1", servers=1, checkpoint_every_s=0, **settings)
    session = Placed("trainer-0", "trainer", found, "")
    try:
        run = shoal.Run(session, "town", "unused")
        batches = shoal.batches(*(given or data()), size=SIZE)
        with pytest.raises(UnsupportedWithServers) as raised:
            model.fit(batches, verbose=0, callbacks=[shoal.Elastic(run=run)])
        return raised.value.what
    finally:
        session.close()


class Forgetful(keras.optimizers.SGD):
    """An optimizer whose configuration does not tell what it is made with."""

    def __init__(self, needed: int, **how: Any) -> None:
        super().__init__(**how)


def test_what_needs_the_whole_gradient_is_refused() -> None:
    adam = keras.optimizers.Adam
    assert "global_clipnorm cannot be used with --sync stale:1" in refused(adam(global_clipnorm=1.0))
    assert "loss scaling" in refused(keras.optimizers.LossScaleOptimizer(adam()))
    assert "chosen while training" in refused(adam(), batch="auto:4:40")
    if ON_TENSORFLOW:
        stream = tf.data.Dataset.from_tensor_slices(data()).filter(lambda *_: True).batch(4)
        assert "a stream" in refused(adam(), (stream,))


def test_an_optimizer_that_cannot_be_made_anew_is_refused_by_the_servers() -> None:
    def prepare(_name: str) -> Any:
        return model_with(Forgetful(3, learning_rate=0.1))

    with pytest.raises(UnsupportedWithServers, match="Forgetful cannot be made anew"):
        fitted(prepare, servers=1)


# --- whole runs


@only_tensorflow
@pytest.mark.process
def test_runs_lose_no_sample_when_a_trainer_and_a_server_are_killed_and_the_run_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every shard counts every sample exactly once an epoch, and nobody is ever further ahead than the bound."""
    for name, value in KERAS_TENSORFLOW.environ.items():
        monkeypatch.setenv(name, value)
    calm = ("lease_s=4", "restarts.infrastructure=1000", "backoff_s=0.05", "backoff_max_s=0.2")
    settings = ("sync=stale:1", "servers=2", *calm)
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
        assert min(e["ticket"][0] for e in run.events_of("begin") if e["at"] > resumed) >= reached - 4, "it began anew"


@only_tensorflow
def test_all_of_this_holds_on_the_torch_backend() -> None:
    here = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-k",
        "not runs and not refused",
        __file__,
    ]
    environ = os.environ | {"KERAS_BACKEND": "torch"}
    done = subprocess.run(here, env=environ, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
