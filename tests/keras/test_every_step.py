"""Steps of several members in one process compute the same as one process on the whole batch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
keras = pytest.importorskip("keras")

import shoal.keras as shoal  # noqa: E402
from shoal.errors import (  # noqa: E402
    NotAttached,
    SecondTrainingLoop,
    StateDiverged,
    UnusableData,
    UnusableModel,
)
from shoal.testing.threaded_world import FixedWorldSession, together  # noqa: E402
from shoal.worker.session.standalone import StandaloneSession  # noqa: E402

pytestmark = pytest.mark.keras

SAMPLES, SIZE = 40, 12
ON_TENSORFLOW = keras.backend.backend() == "tensorflow"
# Keras computes some constants of a loss, such as 1 / samples, in single precision on PyTorch.
BOUND = 1e-10 if ON_TENSORFLOW else 1e-6
if ON_TENSORFLOW:
    import tensorflow as tf

    # Members of one process wait for each other inside TensorFlow's threads: there must be one for each.
    tf.config.threading.set_inter_op_parallelism_threads(8)
only_tensorflow = pytest.mark.skipif(not ON_TENSORFLOW, reason="TensorFlow only")


def data() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(SAMPLES, 6)), rng.normal(size=(SAMPLES, 1))


def mlp(*more: Any) -> Any:
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Dense(8, activation="tanh"), *more, keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((6,)), *layers])


Prepare = Callable[[], tuple[Any, Any, dict[str, Any]]]


def usual() -> tuple[Any, Any, dict[str, Any]]:
    model = mlp()
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return model, data(), {}


def fitted(members: int, prepare: Prepare, shares: str, epochs: int = 3, **fit: Any) -> list[dict[str, Any]]:
    _float("float64")
    try:
        prepared = [prepare() for _ in range(members)]

        def body(session: FixedWorldSession) -> dict[str, Any]:
            model, given, options = prepared[session.rank]
            run = shoal.Run(session, "test", "unused")
            jit = options.pop("jit", False)
            batches = shoal.batches(*given, size=SIZE, shares=shares, **options)
            elastic = shoal.Elastic(run=run, jit_compile=jit)
            history = model.fit(batches, epochs=epochs, verbose=0, callbacks=[elastic], **fit)
            weights = [keras.ops.convert_to_numpy(v) for v in model.variables]
            return {"weights": weights, "history": history.history, "steps": run.step}

        return together(members, body)
    finally:
        _float("float32")


def _float(name: str) -> None:
    keras.config.set_floatx(name)
    keras.config.set_dtype_policy(name)


def check(prepare: Prepare, shares: str = "fixed:1,2,3", members: int = 3, within: float = BOUND, **fit: Any) -> Any:
    alone = fitted(1, prepare, "equal", **fit)[0]
    results = fitted(members, prepare, shares, **fit)
    for result in results:
        assert result["steps"] == alone["steps"]
        for actual, expected in zip(result["weights"], alone["weights"], strict=True):
            np.testing.assert_allclose(actual, expected, rtol=0, atol=within)
        for name, values in alone["history"].items():
            np.testing.assert_allclose(result["history"][name], values, rtol=1e-5)
        for actual, first in zip(result["weights"], results[0]["weights"], strict=True):
            assert (actual == first).all()
    return alone


def test_members_train_like_one_process_and_report_the_same_metrics() -> None:
    result = check(usual, validation_data=data())
    assert result["steps"] == 12
    assert set(result["history"]) == {"loss", "mae", "val_loss", "val_mae"}


def test_single_process_trains_and_measures_like_plain_keras() -> None:
    _float("float64")
    try:
        model, (x, y), _ = usual()
        theirs = model.fit(x, y, batch_size=10, shuffle=False, epochs=2, verbose=0).history
        other, _, _ = usual()
        run = shoal.Run(StandaloneSession(), "test", "unused")
        batches = shoal.batches(x, y, size=10, shuffle=False)
        ours = other.fit(batches, epochs=2, verbose=0, callbacks=[shoal.Elastic(run=run)]).history
    finally:
        _float("float32")
    for actual, expected in zip(other.variables, model.variables, strict=True):
        actual, expected = keras.ops.convert_to_numpy(actual), keras.ops.convert_to_numpy(expected)
        np.testing.assert_allclose(actual, expected, rtol=0, atol=BOUND)
    assert ours.keys() == theirs.keys()
    for name, values in theirs.items():
        np.testing.assert_allclose(ours[name], values, rtol=1e-5)


# --- kinds of models


def compiled(model: Any, **how: Any) -> Any:
    model.compile(**({"optimizer": keras.optimizers.SGD(0.05, momentum=0.9), "loss": "mse"} | how))
    return model


def embedding() -> tuple[Any, Any, dict[str, Any]]:
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Embedding(20, 4), keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(1)]
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 20, size=(SAMPLES, 5))
    return compiled(keras.Sequential([keras.Input((5,), dtype="int32"), *layers])), (tokens, data()[1]), {}


def frozen() -> tuple[Any, Any, dict[str, Any]]:
    model = mlp()
    model.layers[0].trainable = False
    return compiled(model), data(), {}


def clipped() -> tuple[Any, Any, dict[str, Any]]:
    return compiled(mlp(), optimizer=keras.optimizers.Adam(0.01, global_clipnorm=0.1)), data(), {}


def scheduled() -> tuple[Any, Any, dict[str, Any]]:
    rate = keras.optimizers.schedules.ExponentialDecay(0.05, 3, 0.5)
    return compiled(mlp(), optimizer=keras.optimizers.SGD(rate)), data(), {}


def two_inputs() -> tuple[Any, Any, dict[str, Any]]:
    keras.utils.set_random_seed(2)
    a, b = keras.Input((3,), name="a"), keras.Input((3,), name="b")
    joined = keras.layers.Concatenate()([a, b])
    model = keras.Model({"a": a, "b": b}, keras.layers.Dense(1)(keras.layers.Dense(4, activation="tanh")(joined)))
    x, y = data()
    return compiled(model), ({"a": x[:, :3], "b": x[:, 3:]}, y), {}


def weighted() -> tuple[Any, Any, dict[str, Any]]:
    return compiled(mlp()), (*data(), np.linspace(0.5, 2.0, SAMPLES)), {}


def classes() -> tuple[Any, Any, dict[str, Any]]:
    keras.utils.set_random_seed(4)
    layers = [keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(3, activation="softmax")]
    model = compiled(keras.Sequential([keras.Input((6,)), *layers]), loss="sparse_categorical_crossentropy")
    labels = np.arange(SAMPLES) % 3
    return model, (data()[0], labels), {"class_weight": {0: 1.0, 1: 3.0}}


def regularised() -> tuple[Any, Any, dict[str, Any]]:
    keras.utils.set_random_seed(5)
    layer = keras.layers.Dense(8, activation="tanh", kernel_regularizer="l2")
    return compiled(keras.Sequential([keras.Input((6,)), layer, keras.layers.Dense(1)])), data(), {}


def in_micro_batches() -> tuple[Any, Any, dict[str, Any]]:
    return compiled(mlp()), data(), {"micro": 2}


def custom_step() -> tuple[Any, Any, dict[str, Any]]:
    class Custom(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.hidden, self.out = keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)

        def call(self, x: Any) -> Any:
            return self.out(self.hidden(x))

        def train_step(self, given: Any) -> Any:
            x, y = given
            with tf.GradientTape() as tape:
                loss = keras.ops.mean(keras.ops.square(self(x, training=True) - y))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            for metric in self.metrics:
                metric.update_state(loss, sample_weight=keras.ops.shape(x)[0])
            return {metric.name: metric.result() for metric in self.metrics}

    keras.utils.set_random_seed(6)
    return compiled(Custom()), data(), {}


def with_xla() -> tuple[Any, Any, dict[str, Any]]:
    return compiled(mlp(), jit_compile=True), data(), {"jit": True}


def eagerly() -> tuple[Any, Any, dict[str, Any]]:
    return compiled(mlp(), run_eagerly=True), data(), {}


@pytest.mark.parametrize(
    "prepare",
    [
        embedding,
        frozen,
        clipped,
        scheduled,
        two_inputs,
        weighted,
        classes,
        regularised,
        in_micro_batches,
        pytest.param(custom_step, marks=only_tensorflow),
        pytest.param(with_xla, marks=only_tensorflow),
        eagerly,
    ],
)
def test_members_train_any_model_like_one_process(prepare: Prepare) -> None:
    check(prepare, members=2, shares="fixed:1,3")


def test_batch_normalisation_averages_the_statistics_of_all_members() -> None:
    def normed() -> tuple[Any, Any, dict[str, Any]]:
        x, y = data()
        return compiled(mlp(keras.layers.BatchNormalization())), (x[:SIZE], y[:SIZE]), {}

    # In the first step all members still have the weights of one process, so that the mean of their means is its mean.
    alone, results = fitted(1, normed, "equal", epochs=1)[0], fitted(3, normed, "fixed:1,2,3", epochs=1)
    moving_mean = 4
    for result in results:
        np.testing.assert_allclose(result["weights"][moving_mean], alone["weights"][moving_mean], rtol=0, atol=BOUND)
        for actual, first in zip(result["weights"], results[0]["weights"], strict=True):
            assert (actual == first).all()
    assert abs(alone["weights"][moving_mean]).max() > 1e-4


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_mixed_precision_trains_and_agrees(policy: str) -> None:
    def mixed() -> tuple[Any, Any, dict[str, Any]]:
        keras.config.set_dtype_policy(policy)
        try:
            model = compiled(mlp())
        finally:
            keras.config.set_dtype_policy("float64")
        return model, tuple(array.astype("float32") for array in data()), {}

    alone = fitted(1, mixed, "equal")[0]
    results = fitted(2, mixed, "fixed:1,3")
    assert all((a == b).all() for a, b in zip(results[0]["weights"], results[1]["weights"], strict=True))
    # Which steps overflow in float16, and are skipped by all members, depends on the size of the shares.
    for actual, expected in zip(results[0]["weights"], alone["weights"], strict=True):
        if policy == "mixed_bfloat16":
            np.testing.assert_allclose(actual.astype("float64"), expected.astype("float64"), rtol=0, atol=0.05)
    assert results[0]["history"]["loss"][-1] < results[0]["history"]["loss"][0]


# --- kinds of data


class Items(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, number: int) -> Any:
        x, y = data()
        return x[7 * number : 7 * number + 7], y[7 * number : 7 * number + 7]


def test_every_sample_of_a_pydataset_counts_once_per_epoch() -> None:
    check(lambda: (compiled(mlp()), (Items(),), {}), members=2, shares="fixed:1,2")


@only_tensorflow
def test_members_train_on_a_streamed_pipeline_like_one_process() -> None:
    def streamed() -> tuple[Any, Any, dict[str, Any]]:
        return compiled(mlp()), (tf.data.Dataset.from_tensor_slices(data()).batch(8),), {"shards": 4}

    check(streamed, members=2, shares="equal")


def test_steps_per_epoch_ends_epochs_like_keras() -> None:
    result = check(usual, members=2, shares="fixed:1,2", steps_per_epoch=3)
    assert result["steps"] == 9
    assert len(result["history"]["loss"]) == 3


def test_arrays_have_the_types_that_keras_gives_them() -> None:
    def types(given: Any, label: Any, weight: Any) -> list[str]:
        x, y, weights = shoal.batches({"a": given}, label, weight, size=4).example()
        return [str(x["a"].dtype), str(y.dtype), str(weights.dtype)]

    def theirs(*given: Any) -> list[str]:
        seen: list[str] = []

        class RecordTypes(keras.Model):  # type: ignore[misc]
            def train_step(self, batch: Any) -> dict[str, Any]:
                x, y, weights = batch
                seen[:] = [keras.backend.standardize_dtype(array.dtype) for array in (x["a"], y, weights)]
                return {"loss": keras.ops.mean(x["a"])}

        model = RecordTypes()
        model.built = True
        model.compile("sgd", run_eagerly=True)
        model.fit({"a": given[0]}, given[1], sample_weight=given[2], verbose=0)
        return seen

    double, whole, half = np.ones((8, 2)), np.arange(8), np.ones(8, "float16")
    assert types(double, whole, half) == theirs(double, whole, half) == ["float32", "int64", "float32"]


# --- a script's own loop


@only_tensorflow
@pytest.mark.parametrize("traced", [False, True])
def test_gradient_tape_loop_trains_like_one_process(traced: bool) -> None:
    def looped(members: int, shares: str, micro: int | None = None) -> list[list[Any]]:
        _float("float64")
        models = [mlp() for _ in range(members)]

        def body(session: FixedWorldSession) -> list[Any]:
            model, run = models[session.rank], shoal.Run(session, "test", "unused")
            optimizer = shoal.elastic(keras.optimizers.Adam(0.01), model, run)

            def train(x: Any, y: Any) -> None:
                with tf.GradientTape() as tape:
                    loss = keras.ops.mean(keras.ops.square(model(x, training=True) - y))
                gradients = tape.gradient(loss, model.trainable_variables)
                optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

            step = tf.function(train, reduce_retracing=True) if traced else train
            for x, y in shoal.batches(*data(), size=SIZE, epochs=3, shares=shares, micro=micro):
                step(tf.constant(x), tf.constant(y))
            assert run.step == 12
            return [keras.ops.convert_to_numpy(v) for v in model.variables]

        try:
            return together(members, body)
        finally:
            _float("float32")

    alone = looped(1, "equal")[0]
    for weights in looped(3, "fixed:1,2,3", micro=2):
        for actual, expected in zip(weights, alone, strict=True):
            np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-10)


# --- automatic batch size


def test_members_choose_the_same_automatic_batch() -> None:
    def body(session: FixedWorldSession) -> list[Any]:
        session.settings = msgspec.structs.replace(session.settings, batch="auto:4:40")
        model, _, _ = prepared[session.rank]
        run = shoal.Run(session, "test", "unused")
        model.fit(shoal.batches(*data(), size=8), epochs=30, verbose=0, callbacks=[shoal.Elastic(run=run)])
        assert run._trainer is not None
        assert run._trainer.auto is not None
        return [run.step, *(keras.ops.convert_to_numpy(v).tolist() for v in model.variables)]

    prepared = [usual() for _ in range(2)]
    first, second = together(2, body)
    assert first == second


def test_automatic_batch_refuses_a_learning_rate_schedule() -> None:
    session = StandaloneSession()
    session.settings = msgspec.structs.replace(session.settings, batch="auto:4:40")
    model, given, _ = scheduled()
    run = shoal.Run(session, "test", "unused")
    with pytest.raises(UnusableModel, match="schedule"):
        model.fit(shoal.batches(*given, size=8), verbose=0, callbacks=[shoal.Elastic(run=run)])


# --- refusals


def test_batches_refuse_data_that_cannot_be_split() -> None:
    x, y = data()
    with pytest.raises(UnusableData, match="same number of samples"):
        shoal.batches(x, y[:-1], size=4)
    with pytest.raises(UnusableData, match="arrays are empty"):
        shoal.batches(x[:0], y[:0], size=4)
    with pytest.raises(UnusableData, match=r"(?s)a generator cannot be split into shares.*PyDataset"):
        shoal.batches(((x, y) for _ in range(3)), size=4)
    with pytest.raises(UnusableData, match="a list_iterator cannot be split into shares"):
        shoal.batches(x, iter([1]), size=4)

    class Endless(keras.utils.PyDataset):
        def __getitem__(self, number: int) -> Any:
            return x, y

    with pytest.raises(UnusableData, match="no length"):
        shoal.batches(Endless(), size=4)


def test_batches_refuse_an_unsupported_backend(monkeypatch: Any) -> None:
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(UnusableModel, match="unsupported Keras backend 'jax'"):
        shoal.batches(*data(), size=4)


@only_tensorflow
def test_endless_pipeline_and_distribution_strategy_are_refused() -> None:
    with pytest.raises(UnusableData, match="no end"):
        shoal.batches(tf.data.Dataset.from_tensor_slices(data()).batch(4).repeat(), size=4)
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        model = compiled(mlp())
    with pytest.raises(UnusableModel, match="strategy"):
        model.fit(shoal.batches(*data(), size=8), verbose=0, callbacks=[shoal.Elastic(run=_alone())])


def test_train_step_with_two_optimizer_steps_is_refused() -> None:
    class Twice(keras.Sequential):
        def train_step(self, given: Any) -> Any:
            super().train_step(given)
            return super().train_step(given)

    model = compiled(Twice([keras.Input((6,)), keras.layers.Dense(1)]))
    with pytest.raises(UnusableModel, match="twice"):
        model.fit(shoal.batches(*data(), size=8), verbose=0, callbacks=[shoal.Elastic(run=_alone())])


def test_elastic_callback_without_shoal_batches_is_refused() -> None:
    def fit() -> None:
        compiled(mlp()).fit(*data(), verbose=0, callbacks=[shoal.Elastic(run=_alone())])

    with ThreadPoolExecutor() as other, pytest.raises(NotAttached, match="no data"):
        other.submit(fit).result()


def test_wrapped_optimizer_is_refused() -> None:
    model = compiled(mlp())
    object.__setattr__(model.optimizer, "apply", lambda *_: None)
    with pytest.raises(UnusableModel, match="wrapped"):
        model.fit(shoal.batches(*data(), size=8), verbose=0, callbacks=[shoal.Elastic(run=_alone())])


def test_backup_and_restore_is_refused(tmp_path: Any) -> None:
    with pytest.raises(UnusableModel, match="BackupAndRestore"):
        shoal.Elastic(keras.callbacks.BackupAndRestore(str(tmp_path)))


def test_second_fit_of_a_run_is_refused() -> None:
    model, run = compiled(mlp()), _alone()
    model.fit(shoal.batches(*data(), size=8), verbose=0, callbacks=[shoal.Elastic(run=run)])
    with pytest.raises(SecondTrainingLoop, match="once, with all its epochs"):
        model.fit(shoal.batches(*data(), size=8), verbose=0, callbacks=[shoal.Elastic(run=run)])


def test_model_that_plain_keras_has_trained_can_be_fitted() -> None:
    model = compiled(mlp())
    model.fit(*data(), verbose=0)
    model.evaluate(*data(), verbose=0)
    run = _alone()
    with ThreadPoolExecutor() as other:
        batches, elastic = shoal.batches(*data(), size=8), shoal.Elastic(run=run)
        other.submit(model.fit, batches, verbose=0, callbacks=[elastic]).result()
    assert run.step == 5


def test_plain_keras_can_train_the_model_after_a_fit() -> None:
    model = compiled(mlp())
    model.fit(shoal.batches(*data(), size=8), verbose=0, callbacks=[shoal.Elastic(run=_alone())])
    assert_trains(model)


def test_fit_that_fails_to_begin_restores_the_model() -> None:
    model, (x, y) = compiled(mlp()), data()
    with ThreadPoolExecutor() as other, pytest.raises(NotAttached):
        other.submit(model.fit, x, y, verbose=0, callbacks=[shoal.Elastic(run=_alone())]).result()
    assert_trains(model)
    model.train_step = lambda _batch: {}
    with pytest.raises(UnusableModel, match="not apply"):
        model.fit(shoal.batches(x, y, size=8), verbose=0, callbacks=[shoal.Elastic(run=_alone())])
    del model.train_step
    model.fit(shoal.batches(x, y, size=8), verbose=0, callbacks=[shoal.Elastic(run=_alone())])
    assert_trains(model)


def assert_trains(model: Any) -> None:
    before = [keras.ops.convert_to_numpy(v).copy() for v in model.trainable_variables]
    assert model.fit(*data(), verbose=0).history["loss"]
    model.train_on_batch(*data())
    for variable, value in zip(model.trainable_variables, before, strict=True):
        assert (keras.ops.convert_to_numpy(variable) != value).any()


@only_tensorflow
def test_second_loop_of_a_run_is_refused() -> None:
    model, run = mlp(), _alone()
    optimizer = shoal.elastic(keras.optimizers.Adam(), model, run)
    batches = shoal.batches(*data(), size=8)
    for x, y in batches:
        with tf.GradientTape() as tape:
            loss = keras.ops.mean(keras.ops.square(model(x) - y))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    with pytest.raises(SecondTrainingLoop, match="one loop over all epochs"):
        next(iter(batches))


def _alone() -> Any:
    return shoal.Run(StandaloneSession(), "test", "unused")


# --- callbacks


def test_callbacks_see_the_same_metrics_and_stop_together(tmp_path: Any) -> None:
    _float("float64")
    prepared = [usual() for _ in range(3)]
    _float("float32")
    written: list[int] = []

    class RecordingLogger(keras.callbacks.CSVLogger):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            written.append(epoch)
            super().on_epoch_end(epoch, logs)

    def body(session: FixedWorldSession) -> tuple[int, int, float]:
        model, given, _ = prepared[session.rank]
        run = shoal.Run(session, "test", "unused")
        stop = keras.callbacks.EarlyStopping("loss", patience=1, min_delta=10.0)
        callbacks = [shoal.Elastic(stop, RecordingLogger(str(tmp_path / "log.csv")), run=run)]
        batches = shoal.batches(*given, size=SIZE, shares="fixed:1,2,3")
        model.fit(batches, epochs=9, verbose=0, callbacks=callbacks)
        saved = run._training_state.capture()
        stop.wait = stop.best = -1
        run._training_state.load(saved[0], saved[1])
        return run.step, stop.wait, float(stop.best)

    results = together(3, body)
    assert results[0] == results[1] == results[2]
    assert results[0][:2] == (8, 1)
    assert results[0][2] > 0
    assert written == [0, 1], "a member other than the writer wrote"


def test_next_writer_knows_the_best_score(tmp_path: Any) -> None:
    prepared, path = [usual() for _ in range(2)], str(tmp_path / "best.weights.h5")

    def body(session: FixedWorldSession) -> Any:
        class Judge(keras.callbacks.Callback):  # type: ignore[misc]
            def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                logs["quality"] = [2.0, 3.0, 1.0, 2.5][epoch]
                session.is_writer = session.rank == (0 if epoch < 2 else 1)

        class Note(keras.callbacks.Callback):  # type: ignore[misc]
            def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                if epoch == 1:
                    best.extend(self.model.get_weights())

        model, given, _ = prepared[session.rank]
        best: list[Any] = []
        save = keras.callbacks.ModelCheckpoint(path, "quality", save_best_only=True, save_weights_only=True, mode="max")
        elastic = shoal.Elastic(Judge(), save, Note(), run=shoal.Run(session, "test", "unused"))
        model.fit(shoal.batches(*given, size=SIZE), epochs=4, verbose=0, callbacks=[elastic])
        assert save.best == 3.0
        return best

    best = together(2, body)[0]
    model = mlp()
    model.load_weights(path)
    for actual, expected in zip(model.get_weights(), best, strict=True):
        np.testing.assert_array_equal(actual, expected)


# --- changing shares


@only_tensorflow
def test_changing_shares_do_not_trace_again() -> None:
    traces: list[int] = []

    def body(session: FixedWorldSession) -> None:
        model, given, _ = prepared[session.rank]
        run = shoal.Run(session, "test", "unused")
        model.fit(
            shoal.batches(*given, size=SIZE, shares="fixed:1,2,3", last="keep"),
            epochs=2,
            verbose=0,
            callbacks=[shoal.Elastic(run=run)],
        )
        traces.append(run._trainer._backend.traces)

    prepared = [usual() for _ in range(3)]
    together(3, body)
    assert traces == [1, 1, 1]


@only_tensorflow
@pytest.mark.timeout(600)
def test_suite_passes_on_the_torch_backend() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(
        command, env=os.environ | {"KERAS_BACKEND": "torch"}, capture_output=True, text=True, timeout=380
    )
    assert done.returncode == 0, done.stdout[-3000:]


def test_members_that_drift_apart_are_stopped_and_the_variable_is_named() -> None:
    class Spoiler(keras.callbacks.Callback):
        rank = 0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if self.rank == 1 and batch == 1:
                kernel = self.model.layers[0].kernel
                kernel.assign(kernel + 0.5)

    def body(session: FixedWorldSession) -> None:
        model, given, spoiler = prepared[session.rank], data(), Spoiler()
        spoiler.rank = session.rank
        elastic = shoal.Elastic(spoiler, run=shoal.Run(session, "test", "unused"))
        model.fit(shoal.batches(*given, size=SIZE, shares="equal"), epochs=3, verbose=0, callbacks=[elastic])

    prepared = [usual()[0] for _ in range(2)]
    with pytest.raises(StateDiverged, match=r"kernel differs") as caught:
        together(2, body)
    assert caught.value.where.startswith("before step 3,")


def _model_with(train_step: Callable[[Any, Any], Any], **parts: Any) -> Any:
    """Return a compiled model without `call`, as generative models often are written."""

    class Trained(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            for name, part in parts.items():
                setattr(self, name, part)

    Trained.train_step = train_step
    model = Trained()
    model.compile(keras.optimizers.SGD(0.1))
    return model


def _apply(optimizer: Any, tape: Any, loss: Any, layer: Any) -> None:
    optimizer.apply_gradients(
        zip(tape.gradient(loss, layer.trainable_variables), layer.trainable_variables, strict=True)
    )


def _fit_alone(model: Any, *given: Any) -> Any:
    elastic = shoal.Elastic(run=shoal.Run(StandaloneSession(), "test", "unused"))
    return model.fit(shoal.batches(*given, size=10, shuffle=False), epochs=1, verbose=0, callbacks=[elastic])


@only_tensorflow
def test_model_without_call_trains_on_x_alone_like_plain_keras() -> None:
    def train_step(self: Any, x: Any) -> Any:
        assert not isinstance(x, tuple)
        with tf.GradientTape(persistent=True) as tape:
            loss = keras.ops.mean(self.layer(x) ** 2)
        _apply(self.optimizer, tape, loss, self.layer)
        return {"loss": loss}

    x, _ = data()
    weights = []
    for fit in (_fit_alone, lambda model, x: model.fit(x, batch_size=10, shuffle=False, verbose=0)):
        keras.utils.set_random_seed(5)
        model = _model_with(train_step, layer=keras.layers.Dense(3))
        fit(model, x)
        weights.append([keras.ops.convert_to_numpy(v) for v in model.trainable_variables])
    for actual, expected in zip(*weights, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5)


@pytest.mark.parametrize("frozen", [True, False])
def test_average_that_train_step_assigns_is_refused(frozen: bool) -> None:
    class Averaged(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.average = keras.layers.Dense(1), keras.layers.Dense(1)
            self.average.build((None, 6))
            self.average.trainable = not frozen

        def call(self, x: Any) -> Any:
            return self.layer(x)

        def train_step(self, *given: Any) -> Any:
            logs = super().train_step(*given)
            for weight, average in zip(self.layer.weights, self.average.weights, strict=True):
                average.assign(0.9 * average + 0.1 * weight)
            return logs

    model = compiled(Averaged())
    with pytest.raises(UnusableModel, match=r"assigns the weights .*kernel.* after it applied its optimizer"):
        model.fit(shoal.batches(*data(), size=8), verbose=0, callbacks=[shoal.Elastic(run=_alone())])


class AddedLoss(keras.layers.Layer):
    """Adds the square of its input as a loss: a value for each sample, or their mean."""

    def __init__(self, mean: bool) -> None:
        super().__init__()
        self.mean = mean

    def call(self, x: Any) -> Any:
        self.add_loss(keras.ops.mean(x**2) if self.mean else keras.ops.sum(x**2, axis=-1))
        return x


def test_loss_that_a_layer_adds_for_each_sample_is_refused() -> None:
    """Keras sums it over the share: with three members the gradient once was a third of that of one."""
    model = compiled(keras.Sequential([keras.layers.Dense(3), AddedLoss(mean=False), keras.layers.Dense(1)]))
    with pytest.raises(UnusableModel, match="adds a loss of shape"):
        model.fit(shoal.batches(*data(), size=8), verbose=0, callbacks=[shoal.Elastic(run=_alone())])
    model = compiled(keras.Sequential([keras.layers.Dense(3), AddedLoss(mean=True), keras.layers.Dense(1)]))
    model.fit(shoal.batches(*data(), size=8), verbose=0, callbacks=[shoal.Elastic(run=_alone())])


@only_tensorflow
def test_train_step_for_one_number_of_samples_is_explained() -> None:
    def train_step(self: Any, x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = keras.ops.mean(self.maker(x + keras.random.normal((8, 6))))
        _apply(self.optimizer, tape, loss, self.maker)
        return {"loss": loss}

    model = _model_with(train_step, maker=keras.layers.Dense(3))
    with pytest.raises(tf.errors.InvalidArgumentError) as raised:
        _fit_alone(model, data()[0])
    assert "called train_step with 2 samples" in raised.value.__notes__[0]


@only_tensorflow
def test_second_optimizer_in_train_step_is_refused() -> None:
    other = keras.optimizers.Adam(0.1, name="critic")

    def train_step(self: Any, x: Any) -> Any:
        with tf.GradientTape(persistent=True) as tape:
            loss = keras.ops.mean(self.critic(self.maker(x)) ** 2)
        _apply(self.optimizer, tape, loss, self.maker)
        _apply(other, tape, loss, self.critic)
        return {"loss": loss}

    model = _model_with(train_step, maker=keras.layers.Dense(3), critic=keras.layers.Dense(1))
    with pytest.raises(UnusableModel, match=r"second optimizer, Adam 'critic'"):
        _fit_alone(model, data()[0])
