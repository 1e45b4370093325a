"""Local SGD with Keras, several members in one process, compared with the same rounds in NumPy."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
keras = pytest.importorskip("keras")

import shoal.keras as shoal  # noqa: E402
from shoal.core.data.rounds import RoundOrder, local_batches  # noqa: E402
from shoal.core.shares.split import split  # noqa: E402
from shoal.errors import UnsupportedWithLocalSgd  # noqa: E402
from shoal.testing.emulated_speeds import machines  # noqa: E402
from shoal.testing.threaded_world import FixedWorldSession, together  # noqa: E402
from shoal.worker.session.standalone import StandaloneSession  # noqa: E402
from shoal.worker.transport.exchange_broken import ExchangeBroken  # noqa: E402

pytestmark = pytest.mark.keras

SAMPLES, SIZE = 40, 12
IN_EPOCH = -(-SAMPLES // SIZE)
ON_TENSORFLOW = keras.backend.backend() == "tensorflow"
# Keras computes some constants of a loss, such as 1 / samples, in single precision on PyTorch.
BOUND = 1e-10 if ON_TENSORFLOW else 1e-6
if ON_TENSORFLOW:
    import tensorflow as tf

    # Members of one process wait for each other inside TensorFlow's threads: there must be one for each.
    tf.config.threading.set_inter_op_parallelism_threads(8)
only_tensorflow = pytest.mark.skipif(not ON_TENSORFLOW, reason="TensorFlow only")

Optimizer = Callable[[], Any]
Weights = list[Any]


def data() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(SAMPLES, 6)), rng.normal(size=(SAMPLES, 1))


def mlp(*more: Any, kind: type = keras.Sequential) -> Any:
    keras.utils.set_random_seed(3)
    return kind([keras.Input((6,)), keras.layers.Dense(8, activation="tanh"), *more, keras.layers.Dense(1)])


def sgd() -> Any:
    return keras.optimizers.SGD(0.05)


def momentum() -> Any:
    return keras.optimizers.SGD(0.05, momentum=0.875)


def adam() -> Any:
    return keras.optimizers.Adam(0.01)


def decaying() -> Any:
    return keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.05, 3, 0.5))


def compiled(optimizer: Optimizer = momentum, *more: Any, **how: Any) -> Any:
    model = mlp(*more, kind=how.pop("kind", keras.Sequential))
    model.compile(**({"optimizer": optimizer(), "loss": "mse"} | how))
    return model


class RecordRounds(keras.callbacks.Callback):
    """Records the weights and iterations of a member after every round."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[Weights] = []
        self.iterations: list[int] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.weights.append(held(self.model.variables))
        self.iterations.append(int(self.model.optimizer.iterations))


def held(variables: Sequence[Any]) -> Weights:
    return [keras.ops.convert_to_numpy(v).copy() for v in variables if "seed" not in v.path]


def configure(session: StandaloneSession, sync: str, outer: tuple[float, float] = (1.0, 0.0), **more: Any) -> None:
    settings = {"sync": sync, "outer_lr": outer[0], "outer_momentum": outer[1]} | more
    session.settings = msgspec.structs.replace(session.settings, **settings)


def trained(
    members: int,
    sync: str,
    make: Callable[[], Any] = compiled,
    *,
    shares: str = "equal",
    outer: tuple[float, float] = (1.0, 0.0),
    epochs: int = 2,
    catching_up: tuple[int, ...] = (),
    micro: int | None = None,
    emulate: str = "",
    seat: Callable[[FixedWorldSession, Any, Any], None] = lambda _session, _model, _run: None,
    **fit: Any,
) -> list[dict[str, Any]]:
    """Train with `model.fit` and return what each member recorded."""
    models = precise(lambda: [make() for _ in range(members)])

    def body(session: FixedWorldSession) -> dict[str, Any]:
        configure(session, sync, outer, emulate=emulate)
        model, seen = models[session.rank], RecordRounds()
        run = shoal.Run(session, "test", "unused")
        seat(session, model, run)
        batches = shoal.batches(*data(), size=SIZE, shares=shares, micro=micro)
        history = model.fit(batches, epochs=epochs, verbose=0, callbacks=[shoal.Elastic(run=run), seen], **fit)
        trainer = run._trainer
        assert trainer is not None
        optimizer = held(model.optimizer.variables)
        return vars(seen) | {"history": history.history, "run": run, "optimizer": optimizer, "trainer": trainer}

    results: list[dict[str, Any]] = precise(lambda: together(members, body, catching_up))
    return results


def precise(compute: Callable[[], Any]) -> Any:
    """Compute in double precision."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    try:
        return compute()
    finally:
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy("float32")


def check_same(members: list[dict[str, Any]]) -> None:
    for member in members[1:]:
        assert len(member["weights"]) == len(members[0]["weights"])
        for weights, first in zip(member["weights"], members[0]["weights"], strict=True):
            assert all((a == b).all() for a, b in zip(weights, first, strict=True))
        assert member["iterations"] == members[0]["iterations"]
        assert member["history"] == members[0]["history"]


def check_close(actual: Weights, expected: Weights, within: float = BOUND) -> None:
    for value, reference in zip(actual, expected, strict=True):
        np.testing.assert_allclose(value, reference, rtol=0, atol=within)


# --- the same in NumPy


def simulated(
    order: RoundOrder,
    speeds: Sequence[int],
    rate: Callable[[float], float],
    decay: float,
    outer: tuple[float, float] = (1.0, 0.0),
) -> tuple[list[Weights], list[float]]:
    """Return the weights after every round, and its summed losses, for members of these speeds with momentum."""
    (x, y), start = data(), held(compiled().variables)
    inner = [[np.zeros_like(value) for value in start] for _ in speeds]
    outer_velocities = [np.zeros_like(value) for value in start]
    trajectory, losses, done = [], [], 0
    for step in range(order.total_steps):
        size, batches = order.size_of(step), order.batches_in(step)
        first, loss, change = 0, 0.0, [np.zeros_like(value) for value in start]
        for member, share in enumerate(split(size, speeds)):
            local = [value.copy() for value in start]
            sizes = local_batches(share, SIZE, len(speeds))
            for number, samples in enumerate(sizes):
                ids = order.ids(step, first, first + samples)
                first += samples
                loss += samples * _momentum_step(
                    local, inner[member], x[ids], y[ids], rate(done + number * batches // len(sizes)), decay
                )
            for total, after, before in zip(change, local, start, strict=True):
                total += share / size * (after - before)
        for before, total, velocity in zip(start, change, outer_velocities, strict=True):
            velocity *= outer[1]
            velocity += total
            before += outer[0] * (total + outer[1] * velocity)
        done += batches
        trajectory.append([value.copy() for value in start])
        losses.append(loss)
    return trajectory, losses


def _momentum_step(weights: Weights, velocities: Weights, x: Any, y: Any, rate: float, decay: float) -> float:
    """Do one step with momentum; return the mean loss before it."""
    first, bias, second, last = weights
    hidden = np.tanh(x @ first + bias)
    off = hidden @ second + last - y
    out = 2 * off / len(x)
    inside = (out @ second.T) * (1 - hidden**2)
    for value, velocity, gradient in zip(
        weights, velocities, [x.T @ inside, inside.sum(0), hidden.T @ out, out.sum(0)], strict=True
    ):
        velocity *= decay
        velocity -= rate * gradient
        value += velocity
    return float((off**2).mean())


@pytest.mark.parametrize(
    ("sync", "speeds", "outer", "micro"),
    [
        ("local:2", (1,), (1.0, 0.0), None),
        ("local:3", (1, 3), (0.5, 0.5), None),
        ("local:2", (1, 2, 5), (0.75, 0.25), 3),
    ],
)
def test_rounds_equal_their_simulation_in_numpy(
    sync: str, speeds: tuple[int, ...], outer: tuple[float, float], micro: int | None
) -> None:
    order = RoundOrder.of(SAMPLES, SIZE, int(sync[-1]), epochs=2)
    expected, losses = precise(lambda: simulated(order, speeds, lambda _: 0.05, 0.875, outer))
    shares = f"fixed:{','.join(map(str, speeds))}" if len(speeds) > 1 else "equal"
    members = trained(len(speeds), sync, shares=shares, outer=outer, micro=micro)
    check_same(members)
    seen = members[0]
    assert seen["run"].step == len(seen["weights"]) == order.total_steps
    for weights, simulated_weights in zip(seen["weights"], expected, strict=True):
        check_close(weights, simulated_weights)
    per_epoch = np.array(losses).reshape(2, -1).sum(1) / SAMPLES
    np.testing.assert_allclose(seen["history"]["loss"], per_epoch, rtol=1e-5)


def test_rounds_of_one_batch_with_plain_averaging_equal_steps() -> None:
    # Shares of 8 and 4 are one batch each.
    stepped, local = (trained(2, sync, lambda: compiled(sgd), shares="fixed:2,1") for sync in ("step", "local:1"))
    for after_step, after_round in zip(stepped[0]["weights"], local[0]["weights"], strict=True):
        check_close(after_step, after_round)
    np.testing.assert_allclose(stepped[0]["history"]["loss"], local[0]["history"]["loss"], rtol=1e-5)


def test_single_member_does_all_its_steps_in_sequence() -> None:
    def normed() -> Any:
        return compiled(adam, keras.layers.BatchNormalization(), keras.layers.Dropout(0.0))

    stepped, local = trained(1, "step", normed)[0], trained(1, "local:3", normed)[0]
    assert len(local["weights"]) == 4
    check_close(stepped["weights"][-1], local["weights"][-1])
    check_close(stepped["optimizer"], local["optimizer"])
    assert stepped["history"].keys() == local["history"].keys()
    for name, values in stepped["history"].items():
        np.testing.assert_allclose(local["history"][name], values, rtol=1e-5)


def test_members_agree_bitwise_and_keep_their_own_moments() -> None:
    members = trained(
        3, "local:2", lambda: compiled(adam, keras.layers.BatchNormalization()), shares="fixed:1,2,5", outer=(0.7, 0.9)
    )
    check_same(members)
    moving_mean = 4
    assert abs(members[0]["weights"][-1][moving_mean]).max() > 1e-4
    assert any((a != b).any() for a, b in zip(members[0]["optimizer"], members[1]["optimizer"], strict=True))


def test_number_of_local_batches_follows_the_speed() -> None:
    sample_s, speeds = 0.006, (1, 0.25)
    text = machines(*speeds, sample_s=sample_s)
    members = trained(2, "local:1000", shares="model", epochs=8, emulate=text)
    check_same(members)
    for member, speed in zip(members, speeds, strict=True):
        step = member["trainer"].current
        assert step.data_s + step.compute_s >= 0.99 * sample_s / speed * step.samples, (
            "not all of its batches were slowed down"
        )
    assert members[0]["run"].share > members[1]["run"].share


def test_catching_up_member_receives_the_result_of_the_others() -> None:
    members = trained(
        3, "local:2", lambda: compiled(adam, keras.layers.BatchNormalization()), outer=(0.7, 0.5), catching_up=(2,)
    )
    check_same(members)
    assert members[2]["weights"]


def test_catching_up_member_does_not_step_its_own_optimizer() -> None:
    def make() -> Any:
        model = compiled(adam)
        model.optimizer.build(model.trainable_variables)
        for moment in model.optimizer.variables[2:]:
            moment.assign(keras.ops.ones(moment.shape, "float64"))
        return model

    members = trained(2, "local:1000", make, epochs=1, catching_up=(1,))
    as_before = [all((moment == 1.0).all() for moment in seen["optimizer"][2:]) for seen in members]
    assert as_before == [False, True]
    assert members[1]["iterations"] == [IN_EPOCH]


# --- schedules


@pytest.mark.parametrize("speeds", [(5, 1), (1, 2, 6)])
def test_iterations_and_schedules_count_global_batches(speeds: tuple[int, ...]) -> None:
    order = RoundOrder.of(SAMPLES, SIZE, 3, epochs=2)
    expected, _ = precise(lambda: simulated(order, speeds, lambda at: 0.05 * 0.5 ** (at / 3), 0.0))
    members = trained(len(speeds), "local:3", lambda: compiled(decaying), shares=f"fixed:{','.join(map(str, speeds))}")
    check_same(members)
    assert members[0]["iterations"] == [3, 4, 7, 8]
    for weights, simulated_weights in zip(members[0]["weights"], expected, strict=True):
        # Keras keeps the rate of a schedule in single precision.
        check_close(weights, simulated_weights, within=1e-6)


def test_scheduler_callback_is_called_once_per_epoch() -> None:
    rates: list[float] = []

    class Note(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            rates.append(float(self.model.optimizer.learning_rate))

    def body(session: FixedWorldSession) -> None:
        configure(session, "local:2")
        run = shoal.Run(session, "test", "unused")
        halving = keras.callbacks.LearningRateScheduler(lambda epoch, _rate: 0.5**epoch)
        batches = shoal.batches(*data(), size=SIZE)
        compiled().fit(batches, epochs=3, verbose=0, callbacks=[shoal.Elastic(halving, Note(), run=run)])

    together(1, body)
    assert rates == [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]


def test_steps_per_epoch_counts_global_batches() -> None:
    order = RoundOrder.of(SAMPLES, SIZE, 2, epochs=3, every=3)
    expected, losses = precise(lambda: simulated(order, (2, 1), lambda _: 0.05, 0.875))
    members = trained(2, "local:2", shares="fixed:2,1", epochs=3, steps_per_epoch=3)
    check_same(members)
    seen = members[0]
    # Epochs of Keras end after 3, 6 and 9 batches, those of the data after 4 and 8: rounds are 2 1, 1 2, 2 1.
    assert seen["iterations"] == [2, 3, 4, 6, 8, 9]
    assert len(seen["history"]["loss"]) == 3
    for weights, simulated_weights in zip(seen["weights"], expected, strict=False):
        check_close(weights, simulated_weights)
    sizes = [order.size_of(step) for step in range(6)]
    means = [sum(losses[i : i + 2]) / sum(sizes[i : i + 2]) for i in (0, 2, 4)]
    np.testing.assert_allclose(seen["history"]["loss"], means, rtol=1e-5)


# --- a script's own loop


@only_tensorflow
@pytest.mark.parametrize("traced", [False, True])
def test_gradient_tape_loop_does_the_same_rounds(traced: bool) -> None:
    speeds, outer = (1, 3), (0.5, 0.5)
    order = RoundOrder.of(SAMPLES, SIZE, 3, epochs=2)
    expected, _ = precise(lambda: simulated(order, speeds, lambda _: 0.05, 0.875, outer))
    models = precise(lambda: [mlp() for _ in speeds])

    def body(session: FixedWorldSession) -> tuple[int, int, Weights]:
        configure(session, "local:3", outer)
        model, run = models[session.rank], shoal.Run(session, "test", "unused")
        optimizer = shoal.elastic(momentum(), model, run)

        def train(x: Any, y: Any) -> None:
            with tf.GradientTape() as tape:
                loss = keras.ops.mean(keras.ops.square(model(x, training=True) - y))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

        step = tf.function(train, reduce_retracing=True) if traced else train
        for x, y in shoal.batches(*data(), size=SIZE, epochs=2, shares="fixed:1,3", micro=4):
            step(tf.constant(x), tf.constant(y))
        return run.step, int(optimizer.iterations), held(model.variables)

    for steps, iterations, weights in precise(lambda: together(2, body)):
        assert (steps, iterations) == (order.total_steps, 2 * IN_EPOCH)
        check_close(weights, expected[-1])


# --- rounds that do not commit


class Breaking(FixedWorldSession):
    """Session whose world breaks on request, and is back for the next step."""

    broken = False
    broke = 0

    def fail(self, broken: ExchangeBroken) -> None:
        self.broken = True
        self.broke += 1

    def next_step(self) -> int:
        self.broken = False
        return super().next_step()

    def begin_commit(self) -> bool:
        if getattr(self, "refuses", False) and self.step == 1:
            self.refuses = False
            self.fail(ExchangeBroken("for the test"))
            return False
        return True


class Counting(keras.Sequential):
    """Model that calls `on_batch` after every batch it computes."""

    on_batch: Callable[[int], None]
    count = 0

    def train_step(self, given: Any) -> Any:
        logs = super().train_step(given)
        self.count += 1
        self.on_batch(len(given[0]))
        return logs


@pytest.mark.parametrize("at", [2, 3, 6, 0])
def test_uncommitted_round_leaves_no_trace(at: int) -> None:
    # In the second or the last batch of the first round, or in the middle of a later one; 0: when all is summed.
    def make() -> Any:
        layers = keras.layers.BatchNormalization(), keras.layers.Dropout(0.25)
        return compiled(adam, *layers, kind=Counting, run_eagerly=True)

    def seat(session: FixedWorldSession, model: Any, _run: Any) -> None:
        session.__class__ = Breaking

        def on_batch(_samples: int) -> None:
            if breaks and at and model.count == at:
                session.fail(ExchangeBroken("for the test"))

        model.on_batch = on_batch
        session.refuses = breaks and not at  # type: ignore[attr-defined]
        sessions.append(session)

    sessions: list[Any] = []
    breaks = False
    (undisturbed,) = trained(1, "local:3", make, outer=(0.7, 0.9), seat=seat)
    breaks = True
    (disturbed,) = trained(1, "local:3", make, outer=(0.7, 0.9), seat=seat)
    assert [session.broke for session in sessions] == [0, 1]
    check_same([undisturbed, disturbed])
    assert all((a == b).all() for a, b in zip(undisturbed["optimizer"], disturbed["optimizer"], strict=True))
    first, second = (seen["trainer"]._outer.velocities for seen in (undisturbed, disturbed))
    assert all((a.value == b.value).all() for a, b in zip(first, second, strict=True))


def test_batch_that_does_not_fit_into_memory_is_computed_in_micro_batches() -> None:
    def seat(session: FixedWorldSession, model: Any, _run: Any) -> None:
        def on_batch(samples: int) -> None:
            last[session.rank] = samples
            # In the second batch of a round: the first one has been applied.
            if session.rank == limited and samples > 4 and model.count > 1:
                raise MemoryError("for the test")

        model.on_batch = on_batch

    def make() -> Any:
        return compiled(adam, kind=Counting, run_eagerly=True)

    results = []
    for limited in (None, 1):
        last = [0, 0]
        members = trained(2, "local:2", make, seat=seat)
        check_same(members)
        assert last == [8, 8 if limited is None else 2]
        results.append(members[0])
    check_close(results[0]["weights"][-1], results[1]["weights"][-1])


# --- the state


def test_pending_snapshots_are_copied_before_a_round_changes_variables() -> None:
    seen: dict[str, list[Weights]] = {"session": [], "state": []}

    def seat(session: FixedWorldSession, model: Any, run: Any) -> None:
        def note(caller: str) -> Callable[[], None]:
            return lambda: seen[caller].append(held(model.variables))

        session.before_change, run._training_state.before_change = note("session"), note("state")  # type: ignore[method-assign]

    (member,) = trained(1, "local:3", lambda: compiled(adam), seat=seat)
    starts = [precise(lambda: held(compiled().variables)), *member["weights"][:-1]]
    for noted in seen.values():
        for before in starts:
            assert any(all((a == b).all() for a, b in zip(now, before, strict=True)) for now in noted)


def test_outer_momentum_is_part_of_the_state() -> None:
    (member,) = trained(1, "local:2", lambda: compiled(adam), outer=(0.7, 0.9))
    run, trainer = member["run"], member["trainer"]
    header, buffers = run._training_state.capture()
    saved = [raw.copy() for raw in buffers]
    held_before = [velocity.value.copy() for velocity in trainer._outer.velocities]
    assert all(value.any() for value in held_before)
    for velocity in trainer._outer.velocities:
        velocity.value[...] = 7.0
    run._training_state.load(header, saved)
    for velocity, before in zip(trainer._outer.velocities, held_before, strict=True):
        assert (velocity.value == before).all()


# --- refusals


def check_refused(match: str, optimizer: Optimizer = adam, given: Any = None, **settings: Any) -> None:
    session = StandaloneSession()
    configure(session, "local:2", **settings)
    batches = shoal.batches(*(given or data()), size=8)
    with pytest.raises(UnsupportedWithLocalSgd, match=match):
        compiled(optimizer).fit(batches, verbose=0, callbacks=[shoal.Elastic(run=shoal.Run(session, "test", "unused"))])


def test_unsupported_options_are_refused() -> None:
    check_refused("batch=auto", batch="auto:4:40")
    check_refused("use_ema", lambda: keras.optimizers.Adam(0.01, use_ema=True))
    check_refused("gradient_accumulation_steps", lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2))


@only_tensorflow
def test_streamed_pipeline_is_refused() -> None:
    stream = tf.data.Dataset.from_tensor_slices(data()).filter(lambda *_: True).batch(4)
    check_refused("read as a stream", given=(stream,))


@only_tensorflow
@pytest.mark.timeout(600)
def test_suite_passes_on_the_torch_backend() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(
        command, env=os.environ | {"KERAS_BACKEND": "torch"}, capture_output=True, text=True, timeout=380
    )
    assert done.returncode == 0, done.stdout[-3000:]
