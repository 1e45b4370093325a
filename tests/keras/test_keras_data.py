"""How data gets into a Keras run: each sample once, whoever reads it, from where, and how far ahead."""

from __future__ import annotations

import os
import threading
from collections import Counter, deque
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
keras = pytest.importorskip("keras")
tf = pytest.importorskip("tensorflow")
if keras.backend.backend() != "tensorflow":
    pytest.skip("a matter of TensorFlow", allow_module_level=True)

import shoal.keras as shoal  # noqa: E402
from shoal.errors import BadSize, LoaderDied, NotAttached, SampleFailed, UnusableData, UnusableModel  # noqa: E402
from shoal.keras.data import arrays  # noqa: E402
from shoal.keras.data.batches import IndexedBatches  # noqa: E402
from shoal.keras.data.tf_stream import StreamedBatches  # noqa: E402
from shoal.keras.evaluation import wish  # noqa: E402
from shoal.testing.threaded_world import FixedWorldSession, together  # noqa: E402
from shoal.worker.data.rng_state import RngState  # noqa: E402
from shoal.worker.session.standalone import StandaloneSession  # noqa: E402

pytestmark = pytest.mark.keras

SAMPLES, SIZE = 40, 12
# Members of one process wait for each other inside TensorFlow's threads: there must be one for each.
tf.config.threading.set_inter_op_parallelism_threads(8)
slices = tf.data.Dataset.from_tensor_slices


def data() -> tuple[Any, Any]:
    """Samples that hold their own number, twice, and labels of two classes."""
    numbers = np.arange(SAMPLES, dtype="float32")
    return np.stack([numbers, 2 * numbers], 1), (numbers % 2).astype("float32").reshape(-1, 1)


def doubled(x: Any, y: Any) -> Any:
    return tf.stack([x[..., 0], x[..., 0] * 2], -1), y


class Seen(keras.layers.Layer):  # type: ignore[misc]
    """Notes which samples come through in steps of the run, and by which member."""

    def __init__(self, run: shoal.Run) -> None:
        super().__init__()
        self.run, self.steps = run, []

    def call(self, x: Any) -> Any:
        tf.numpy_function(self._note, [x[:, 0]], [])
        return x * 0.01

    def _note(self, numbers: Any) -> None:
        if self.run.share:
            self.steps.append((self.run.step, numbers.astype(int).tolist()))


def model_of(*layers: Any, **how: Any) -> Any:
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((2,)), *layers, keras.layers.Dense(1)])
    model.compile(**({"optimizer": keras.optimizers.SGD(0.01), "loss": "mse"} | how))
    return model


def steps_of(members: int, make: Callable[[], Any], epochs: int = 2, **how: Any) -> list[list[list[int]]]:
    """By step, the samples that each of several members was given, in the order of their ranks."""
    how = {"shares": "fixed:" + ",".join(map(str, range(1, members + 1)))} | how

    def body(session: FixedWorldSession) -> list[tuple[int, list[int]]]:
        run = shoal.Run(session, "test", "unused")
        seen = Seen(run)
        batches = shoal.batches(make(), size=SIZE, **how)
        model_of(seen).fit(batches, epochs=epochs, verbose=0, callbacks=[shoal.Elastic(run=run)])
        return seen.steps

    found = together(members, body)
    steps: list[list[list[int]]] = [[] for _ in range(max(step for one in found for step, _ in one) + 1)]
    for one in found:
        for step, numbers in one:
            steps[step].append(numbers)
    return steps


def check_epochs(steps: list[list[list[int]]], samples: int = SAMPLES, epochs: int = 2) -> None:
    """Every sample once an epoch."""
    flat = [[number for part in step for number in part] for step in steps]
    length = -(-samples // SIZE)
    assert len(flat) == epochs * length
    for epoch in range(epochs):
        counted = Counter(number for step in flat[epoch * length : (epoch + 1) * length] for number in step)
        assert counted == dict.fromkeys(range(samples), 1)


# --- tf.data by index


def test_an_indexable_pipeline_is_dealt_out_by_the_order() -> None:
    def pipeline() -> Any:
        return slices(data()).map(doubled).batch(8).prefetch(2)

    assert isinstance(shoal.batches(pipeline(), size=SIZE), IndexedBatches)
    steps = steps_of(2, pipeline)
    check_epochs(steps)
    assert [list(map(len, step)) for step in steps[:4]] == [[4, 8]] * 3 + [[1, 3]], "shares of 1 to 2"
    order = [[n for part in step for n in part] for step in steps]
    assert order[:4] != order[4:], "epochs are shuffled anew"
    alone = [[n for part in step for n in part] for step in steps_of(1, pipeline)]
    assert order == alone, "which samples make up a step does not depend on who is there"


PIPELINES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "shuffled by itself": (lambda: slices(data()).shuffle(7).map(doubled).batch(8), {}),
    "single samples": (lambda: slices(data()).shuffle(7), {"batched": False}),
    "batches that are mapped, the last of them short": (lambda: slices(data()).batch(7).map(doubled), {}),
}


@pytest.mark.parametrize("kind", PIPELINES)
def test_every_sample_of_an_indexable_pipeline_counts_once(kind: str) -> None:
    make, how = PIPELINES[kind]
    assert isinstance(shoal.batches(make(), size=SIZE, **how), IndexedBatches)
    check_epochs(steps_of(2, make, **how))


def test_what_is_computed_by_number_is_what_the_pipeline_gives() -> None:
    rows, more = slices(data()), tf.Variable(3.0)
    named = tf.data.Dataset.zip({"b": slices(data()[0]), "a": tf.data.Dataset.range(3, 99, 2)})
    filtered = rows.filter(lambda x, y: x[0] != 5)
    several: list[tuple[Any, bool]] = [
        (rows.map(doubled, num_parallel_calls=2, deterministic=False).batch(8).prefetch(2), True),
        (rows.map(lambda x, y: (x + more, y)).batch(8, num_parallel_calls=2).map(lambda x, y: (x * 2, y)), True),
        (rows.batch(5).skip(1).take(4), True),
        (rows.repeat(2).shard(3, 1), False),
        (rows.batch(7).repeat(2).prefetch(1), True),
        (rows.batch(8).map(doubled).repeat(2), True),
        (rows.batch(7).map(doubled).take(5).repeat(2), True),
        (named, False),
        (named.map(lambda one: {"c": one["b"] * 2.0, "a": one["a"]}).batch(7), True),
        (rows.map(lambda x, y: (tf.ensure_shape(tf.numpy_function(np.negative, [x], tf.float32), [2]), y)), False),
        (rows.map(lambda x, y: tf.fill([tf.cast(x[0], tf.int32)], y[0])).map(lambda x: tf.reduce_sum(x)), False),
        (filtered.cache().map(doubled), False),
        (filtered.batch(7).cache().map(doubled), True),
        (rows.batch(8).cache(), True),
    ]
    for pipeline, batched in several:
        found = shoal.batches(pipeline, size=4, batched=batched, shuffle=False)
        assert isinstance(found, IndexedBatches), pipeline
        source = found._source
        ours = source.rows(np.arange(len(source)), 0)
        given = list(pipeline.as_numpy_iterator())
        joined = np.concatenate if batched else np.stack
        theirs = keras.tree.map_structure(lambda *parts: joined(parts), *given)  # noqa: B023
        keras.tree.assert_same_structure(ours, theirs)
        for one, other in zip(keras.tree.flatten(ours), keras.tree.flatten(theirs), strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("last", [lambda one: one.repeat(2), lambda one: one.repeat(2).map(doubled)])
def test_batches_of_which_others_than_the_last_are_short_are_read_as_a_stream(last: Callable[[Any], Any]) -> None:
    def pipeline() -> Any:
        return last(slices(data()).batch(7).map(doubled))

    assert isinstance(shoal.batches(pipeline(), size=SIZE), StreamedBatches)
    given = Counter(n for step in steps_of(2, pipeline, epochs=1, shares="equal") for part in step for n in part)
    assert given == Counter(2 * list(range(SAMPLES)))


def test_a_seed_that_is_set_meanwhile_does_no_harm() -> None:
    batches = shoal.batches(slices(data()).map(doubled).batch(8), size=SIZE)
    first = batches.few()
    tf.random.set_seed(1)
    np.testing.assert_array_equal(batches.few()[0], first[0])


def test_a_pipeline_that_cannot_be_indexed_is_read_as_a_stream() -> None:
    def pipeline() -> Any:
        return slices(data()).filter(lambda x, y: x[0] >= 0).batch(8)

    assert isinstance(shoal.batches(pipeline(), size=SIZE), StreamedBatches)
    assert isinstance(shoal.batches(slices(data()).batch(8), size=SIZE, shards=4), StreamedBatches)
    flat = [number for step in steps_of(2, pipeline, shares="equal") for part in step for number in part]
    assert Counter(flat) == dict.fromkeys(range(SAMPLES), 2)


def test_a_stream_goes_on_from_its_start_when_steps_per_epoch_ask_for_more_than_it_has() -> None:
    run = alone()
    batches = shoal.batches(slices(data()).batch(8), size=20, shards=2)
    history = model_of().fit(batches, epochs=2, steps_per_epoch=5, verbose=0, callbacks=[shoal.Elastic(run=run)])
    assert run.step == 10
    assert len(history.history["loss"]) == 2


BROKEN: dict[str, tuple[Callable[[], Any], str]] = {
    "infinite": (lambda: slices(data()).batch(8).repeat(), "no end"),
    "infinite, of unknown length": (lambda: slices(data()).repeat().filter(lambda x, y: True).batch(8), "no end"),
    "empty": (lambda: slices(data()).take(0).batch(8), "empty"),
    "samples": (lambda: slices((data()[0], data()[1][:, 0])), "not batches"),
    "unlike parts": (lambda: slices(data()), "not batches"),
    "ragged": (lambda: slices(tf.ragged.constant([[1], [2, 3]])).batch(2), "ragged"),
    "a stream that is shuffled": (
        lambda: slices(data()).filter(lambda x, y: True).shuffle(8).batch(8),
        "another order",
    ),
    "a stream that is shuffled anew": (
        lambda: slices(data()).filter(lambda x, y: True).shuffle(8, seed=1).batch(8),
        "another order",
    ),
    "a stream in any order": (
        lambda: (
            slices(data()).filter(lambda x, y: True).map(doubled, num_parallel_calls=2, deterministic=False).batch(8)
        ),
        "another order",
    ),
    "a random part": (lambda: slices(data()).shuffle(8).take(9).batch(3), "another order"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_pipeline_that_cannot_be_shared_out_is_refused_with_the_remedy(kind: str) -> None:
    make, told = BROKEN[kind]
    with pytest.raises(UnusableData, match=told) as raised:
        shoal.batches(make(), size=4)
    assert raised.value.do


def test_a_stream_without_samples_is_refused() -> None:
    nothing = shoal.batches(slices(data()).filter(lambda x, y: x[0] < 0).batch(8), size=4)
    with pytest.raises(UnusableData, match="pipeline is empty"):
        model_of().fit(nothing, verbose=0, callbacks=[shoal.Elastic(run=alone())])


def test_a_pipeline_that_shuffles_is_not_left_to_do_so() -> None:
    with pytest.raises(UnusableData, match="another order"):
        shoal.batches(slices(data()).shuffle(8).batch(8), size=SIZE, shuffle=False)


def test_a_pipeline_that_something_ends_is_used_though_it_repeats() -> None:
    taken = slices(data()).repeat().filter(lambda x, y: True).take(SAMPLES).batch(8)
    assert isinstance(shoal.batches(taken, size=SIZE), StreamedBatches)
    twice = slices(data()).repeat(2).batch(8)
    assert len(shoal.batches(twice, size=SIZE)._source) == 2 * SAMPLES  # type: ignore[attr-defined]


def test_a_sample_that_cannot_be_read_says_which() -> None:
    def checked(x: Any, y: Any) -> Any:
        with tf.control_dependencies([tf.debugging.assert_less(x[0], 17.0)]):
            return tf.identity(x), y

    with pytest.raises(SampleFailed, match="cannot be read"):
        model_of().fit(
            shoal.batches(slices(data()).map(checked).batch(8), size=SIZE),
            verbose=0,
            callbacks=[shoal.Elastic(run=alone())],
        )


# --- reading ahead


class Items(keras.utils.PyDataset):  # type: ignore[misc]
    """Items of 7 samples, and a short one."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, number: int) -> Any:
        return tuple(one[7 * number : 7 * number + 7] for one in data())


@pytest.mark.parametrize(
    ("make", "how"),
    [
        (Items, {"workers": 2}),
        (lambda: Items(workers=2, use_multiprocessing=True), {}),
        (lambda: slices(data()).map(doubled).batch(8), {"workers": 1, "prefetch": 3}),
    ],
    ids=["threads", "processes", "tf.data"],
)
def test_what_is_read_ahead_is_what_would_be_read(make: Callable[[], Any], how: dict[str, Any]) -> None:
    ahead = steps_of(2, make, **how)
    check_epochs(ahead)
    assert ahead == steps_of(2, make, workers=0)


def test_the_next_step_is_read_while_one_is_computed() -> None:
    here, read = threading.current_thread(), threading.Event()

    class Watched(Items):
        def __getitem__(self, number: int) -> Any:
            if threading.current_thread() is not here:
                read.set()
            return super().__getitem__(number)

    class Wait(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            assert read.wait(20), "nobody reads while the first step is not yet done"

    run = alone()
    batches = shoal.batches(Watched(), size=7, workers=1, prefetch=1)
    model_of().fit(batches, verbose=0, callbacks=[shoal.Elastic(run=run), Wait()])
    assert run.step == 6


def test_a_pydataset_says_itself_who_reads_it() -> None:
    def reading(dataset: Any, **how: Any) -> Any:
        found = shoal.batches(dataset, size=SIZE, **how)._reading  # type: ignore[attr-defined]
        return found.workers, found.processes

    assert reading(Items()) == (0, False)
    assert reading(Items(workers=3)) == (3, False)
    assert reading(Items(workers=1, use_multiprocessing=True)) == (1, True)
    assert reading(Items(workers=3), workers=0) == (0, False)
    assert reading(slices(data()).batch(8)) == (0, False)
    assert reading(slices(data()).batch(8).prefetch(2)) == (1, False)


def test_a_worker_that_dies_is_told() -> None:
    class Fatal(Items):
        def __getitem__(self, number: int) -> Any:
            if os.getpid() != here:
                os._exit(3)
            return super().__getitem__(number)

    here = os.getpid()
    batches = shoal.batches(Fatal(workers=1, use_multiprocessing=True), size=7)
    with pytest.raises(LoaderDied, match="ended"):
        model_of().fit(batches, verbose=0, callbacks=[shoal.Elastic(run=alone())])


def test_items_that_are_not_alike_are_told_rather_than_lost() -> None:
    class Uneven(Items):
        def __getitem__(self, number: int) -> Any:
            found = super().__getitem__(number)
            return tuple(one[:5] for one in found) if number == 3 else found

    with pytest.raises(UnusableData, match=r"item 3 .* has 5 samples"):
        model_of().fit(shoal.batches(Uneven(), size=7), verbose=0, callbacks=[shoal.Elastic(run=alone())])


def one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members have random generators of their own; as threads of one process they share them."""
    turn, here = threading.RLock(), os.getpid()

    def taking_turns(method: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any) -> Any:
            # A worker that was forked is alone, and cannot wait for threads that it does not have.
            with turn if os.getpid() == here else nullcontext():
                return method(*args)

        return called

    for kind, name in ((arrays.PyDatasetSource, "_item"), (RngState, "seed"), (RngState, "restore")):
        monkeypatch.setattr(kind, name, taking_turns(getattr(kind, name)))


def test_random_numbers_of_a_pydataset_are_the_same_whoever_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Noisy(Items):
        def __getitem__(self, number: int) -> Any:
            x, y = super().__getitem__(number)
            return x + np.random.normal(size=x.shape).astype("float32"), y

    def losses(members: int, make: Callable[[], Any]) -> Any:
        def body(session: FixedWorldSession) -> Any:
            found = shoal.batches(make(), size=SIZE, shares="equal")
            run = shoal.Run(session, "test", "unused")
            return models[session.rank].fit(found, epochs=2, verbose=0, callbacks=[shoal.Elastic(run=run)]).history

        models = [model_of() for _ in range(members)]
        return together(members, body)[0]["loss"]

    alone_ = losses(1, Noisy)
    one_at_a_time(monkeypatch)
    np.testing.assert_allclose(losses(2, Noisy), alone_, rtol=1e-4)
    np.testing.assert_allclose(losses(2, lambda: Noisy(workers=1, use_multiprocessing=True)), alone_, rtol=1e-4)


# --- what is passed to fit


def alone() -> shoal.Run:
    return shoal.Run(StandaloneSession(), "test", "unused")


def fit(*given: Any, **how: Any) -> Any:
    elastic = how.pop("callbacks", [shoal.Elastic(run=alone())])
    options = {name: how.pop(name) for name in ("class_weight_of_batches", "shuffle_of_batches") if name in how}
    ours = {name.removesuffix("_of_batches"): value for name, value in options.items()}
    found = shoal.batches(*(given or data()), size=SIZE, **ours)
    return model_of().fit(found, verbose=0, callbacks=elastic, **how).history["loss"]


def test_class_weight_is_honoured_wherever_it_is_passed() -> None:
    weights = {0: 1.0, 1: 3.0}
    x, y = data()
    theirs = model_of().fit(x, y, batch_size=SAMPLES, class_weight=weights, verbose=0).history["loss"]

    def ours(*given: Any, **how: Any) -> Any:
        found = shoal.batches(*given, size=SAMPLES, **how.pop("made", {}))
        return model_of().fit(found, verbose=0, callbacks=[shoal.Elastic(run=alone())], **how).history["loss"]

    np.testing.assert_allclose(ours(x, y, class_weight=weights), theirs, rtol=1e-5)
    np.testing.assert_allclose(ours(x, y, made={"class_weight": weights}), theirs, rtol=1e-5)
    pipeline = slices((x, y)).batch(8)
    np.testing.assert_allclose(ours(pipeline, class_weight=weights), theirs, rtol=1e-5)
    np.testing.assert_allclose(ours(pipeline, made={"shards": 2}, class_weight=weights), theirs, rtol=1e-5)
    assert abs(ours(x, y)[0] - theirs[0]) > 1e-3


@pytest.mark.parametrize(
    ("how", "remedy"),
    [
        ({"sample_weight": np.ones(SAMPLES)}, "sample_weight"),
        ({"y": data()[1]}, r"shoal.batches\(x, y"),
        ({"batch_size": 4}, "size="),
        ({"shuffle": False}, "shuffle=False"),
        ({"initial_epoch": 1, "epochs": 2}, "resume"),
        ({"class_weight": {0: 2.0}, "class_weight_of_batches": {0: 1.0}}, "pass it to one"),
    ],
    ids=lambda given: next(iter(given)) if isinstance(given, dict) else "",
)
def test_what_keras_would_ignore_is_refused(how: dict[str, Any], remedy: str) -> None:
    with pytest.raises(UnusableData, match=remedy):
        fit(**how)


def test_steps_that_keras_would_do_together_are_refused() -> None:
    found = shoal.batches(*data(), size=SIZE)
    with pytest.raises(UnusableModel, match="steps_per_execution"):
        model_of(steps_per_execution=2).fit(found, verbose=0, callbacks=[shoal.Elastic(run=alone())])


def test_what_says_the_same_as_the_batches_is_fine() -> None:
    assert fit(shuffle=False, shuffle_of_batches=False)
    with pytest.raises(ValueError, match="validation_split"):
        fit(validation_split=0.2)


def test_batches_are_for_training_only() -> None:
    found, model = shoal.batches(*data(), size=SIZE), model_of()
    for use in (model.evaluate, model.predict):
        with pytest.raises(UnusableData, match="share of the training data"):
            use(found, verbose=0)
    with pytest.raises(UnusableData, match="validation_data"):
        fit(validation_data=found)
    with pytest.raises(NotAttached, match="Elastic"):
        fit(callbacks=[])
    with pytest.raises(NotAttached, match="nobody trains"):
        next(iter(shoal.batches(*data(), size=SIZE)))


# --- coming and going


class Held:
    """A pipeline that goes no further than the sample `first`, and work that must not wait for what is behind it."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.reached, self._released = threading.Event(), threading.Event()

    def hold(self, x: Any) -> Any:
        if x[0] >= self.first:
            self.reached.set()
            self._released.wait(60)
        return x

    def check(self, work: Callable[[], Any], what: str) -> None:
        working = threading.Thread(target=work, daemon=True)
        working.start()
        working.join(30)
        try:
            assert self.reached.is_set(), "nothing is read ahead"
            assert not working.is_alive(), what
        finally:
            self._released.set()


def through(function: Any) -> Any:
    """For `map`: samples go through a function in Python."""
    return lambda x, y: (tf.ensure_shape(tf.numpy_function(function, [x], tf.float32), [2]), y)


def test_a_stream_is_let_go_of_though_its_pipeline_is_held_up() -> None:
    held = Held(30)

    class Stop(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            held.reached.wait(20)
            self.model.stop_training = True

    def train() -> None:
        batches = shoal.batches(slices(data()).map(through(held.hold)).batch(8).prefetch(8), size=4, shards=1)
        model_of().fit(batches, verbose=0, callbacks=[shoal.Elastic(run=alone()), Stop()])

    held.check(train, "the end of the training waits for what nobody wants")


def test_a_first_look_at_a_stream_waits_for_no_more_than_it_wants() -> None:
    held = Held(4)

    def looked_at(x: Any) -> Any:
        held.reached.wait(20)
        return x

    pipeline = slices(data()).map(through(held.hold)).prefetch(8).map(through(looked_at))
    batches = shoal.batches(pipeline, size=4, shards=1, batched=False)
    held.check(batches.few, "a look at the first samples waits for what is read ahead")


def test_the_first_step_is_got_over_with_before_joining_and_changes_nothing() -> None:
    layers = keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)
    model = model_of(*layers, optimizer="adam", metrics=["mae"])
    found: dict[str, Any] = {}

    def numbers() -> list[Any]:
        held = (*model.variables, *model.metrics_variables, *model.optimizer.variables)
        return [keras.ops.convert_to_numpy(one).tolist() for one in held]

    class Joining(StandaloneSession):
        def begin(self, *_: Any, **__: Any) -> None:
            found["traces"], found["now"] = run._trainer._backend.traces, numbers()  # type: ignore[union-attr]
            found["drawn"] = np.random.random()

    run = shoal.Run(Joining(), "test", "unused")
    batches = shoal.batches(*data(), size=SIZE)
    model._symbolic_build(data_batch=batches.few())
    model.optimizer.build(model.trainable_variables)
    before = numbers()
    np.random.seed(5)
    model.fit(batches, verbose=0, callbacks=[shoal.Elastic(run=run)])
    assert found["traces"] == run._trainer._backend.traces == 1  # type: ignore[union-attr]
    assert found["now"] == before
    np.random.seed(5)
    assert found["drawn"] == np.random.random()


EPOCHS, LENGTH = 6, 4


class Told(keras.callbacks.Callback):  # type: ignore[misc]
    """Counts what it is told, and lowers the learning rate at the end of every epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[int] = []
        self.ended: list[int] = []
        # No plain value, so that it is not handed over.
        self.own: deque[Any] = deque()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.begun.append(epoch)
        self.own.append(("begin", epoch))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.ended.append(epoch)
        self.own.append(("end", epoch))
        self.model.optimizer.learning_rate = 0.5 * float(self.model.optimizer.learning_rate)

    def on_test_begin(self, logs: Any = None) -> None:
        self.own.append(("validate", len(self.ended)))


class Boundary(StandaloneSession):
    """Keeps the state of the run at one step."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at, self.state = at, (b"", [])

    def begin(self, fingerprint: str, keeper: Any, on_cpu: bool = True) -> None:
        self.keeper = keeper

    def next_step(self) -> int:
        if self.step == self.at:
            header, buffers = self.keeper.capture()
            self.state = header, [one.copy() for one in buffers]
        return super().next_step()


class Hung(Boundary):
    """Is given the state of a later step when it comes to one."""

    def __init__(self, at: int, later: Boundary) -> None:
        super().__init__(at)
        self.later: Boundary | None = later

    def next_step(self) -> int:
        if self.step == self.at and self.later is not None:
            self.keeper.load(*self.later.state)
            self.step, self.later = self.later.at, None
        return StandaloneSession.turn(self)


@pytest.mark.parametrize("later", [4 * LENGTH, 4 * LENGTH + 2], ids=["between epochs", "amid an epoch"])
def test_a_member_that_missed_epochs_ends_and_validates_none_of_them_again(later: int) -> None:
    def fitted(session: Boundary) -> tuple[Told, dict[str, list[float]], list[Any]]:
        told, model = Told(), model_of()
        elastic = shoal.Elastic(told, run=shoal.Run(session, "test", "unused"))
        batches = shoal.batches(*data(), size=10)
        history = model.fit(batches, epochs=EPOCHS, validation_data=data(), verbose=0, callbacks=[elastic]).history
        return told, history, [keras.ops.convert_to_numpy(one) for one in model.variables]

    there = Boundary(later)
    theirs, usual, weights = fitted(there)
    assert theirs.begun == theirs.ended == list(range(EPOCHS))
    ours, history, mine = fitted(Hung(LENGTH + 2, there))
    assert ours.begun == ours.ended == list(range(EPOCHS)), "with what was handed over, each epoch is seen once"
    own = 3 if later % LENGTH == 0 else 4
    ends = [number for what, number in ours.own if what == "end"]
    assert ends == [0, *range(own, EPOCHS)], "epochs that others have ended"
    assert sum(what == "validate" for what, _ in ours.own) == len(ends)
    assert history.keys() == usual.keys()
    for name, values in usual.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-5, err_msg=name)
    for one, other in zip(mine, weights, strict=True):
        np.testing.assert_array_equal(one, other)


class Judge(keras.callbacks.Callback):  # type: ignore[misc]
    """Says how good the model was after each epoch."""

    def __init__(self, *qualities: float) -> None:
        super().__init__()
        # No plain value, so that it is not handed over.
        self.qualities = deque(qualities)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        logs["quality"] = self.qualities[epoch]


def test_who_joins_asks_for_as_large_an_improvement_as_the_others() -> None:
    def fitted(session: Boundary) -> int:
        stop = keras.callbacks.EarlyStopping("quality", min_delta=1.0, patience=2, mode="min")
        run = shoal.Run(session, "test", "unused")
        elastic = shoal.Elastic(Judge(10.0, 9.8, 9.6, 9.4, 9.2, 9.0), stop, run=run)
        model_of().fit(shoal.batches(*data(), size=10), epochs=EPOCHS, verbose=0, callbacks=[elastic])
        return run.step

    there = Boundary(LENGTH + 2)
    assert fitted(there) == fitted(Hung(0, there)) == 3 * LENGTH


def test_who_goes_on_with_a_run_waits_as_long_as_its_script_says() -> None:
    def fitted(session: Boundary, patience: int) -> int:
        stop = keras.callbacks.EarlyStopping("quality", patience=patience, mode="max")
        run = shoal.Run(session, "test", "unused")
        elastic = shoal.Elastic(Judge(*range(10, 4, -1)), stop, run=run)
        model_of().fit(shoal.batches(*data(), size=10), epochs=EPOCHS, verbose=0, callbacks=[elastic])
        return run.step

    there = Boundary(2 * LENGTH + 2)
    assert fitted(there, 9) == EPOCHS * LENGTH
    assert fitted(Hung(0, there), 2) == 3 * LENGTH, "the others have waited for one epoch by then, which counts"


class Noting(keras.callbacks.Callback):  # type: ignore[misc]
    """Finds things in all the ways that callbacks keep them; `limit` it is told."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit, self.began = limit, 0
        self.seen, self.counts, self.streak = [], np.zeros(2), 0

    def on_train_begin(self, logs: Any = None) -> None:
        self.began = 100 + self.limit

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.seen.append(epoch)
        self.counts += 1
        self.streak = 0 if epoch == 1 else 7


class Watched(Hung):
    """Notes what a callback has before and after the state of the others is there."""

    def __init__(self, at: int, later: Boundary, noting: Noting) -> None:
        super().__init__(at, later)
        self.noting, self.streaks = noting, []

    def next_step(self) -> int:
        if self.step == self.at and self.later is not None:
            before = self.noting.streak
            step = super().next_step()
            self.streaks = [before, self.noting.streak]
            return step
        return super().next_step()


def test_all_that_a_callback_has_found_is_handed_over_and_nothing_that_it_was_told() -> None:
    def fit(session: Boundary, noting: Noting) -> None:
        elastic = shoal.Elastic(noting, run=shoal.Run(session, "test", "unused"))
        model_of().fit(shoal.batches(*data(), size=10), epochs=EPOCHS, verbose=0, callbacks=[elastic])

    there, ours = Boundary(2 * LENGTH + 2), Noting(5)
    fit(there, Noting(3))
    watched = Watched(LENGTH + 2, there, ours)
    fit(watched, ours)
    assert ours.limit == 5
    assert ours.began == 103, "it began when the others did"
    assert ours.seen == list(range(EPOCHS))
    assert ours.counts.tolist() == [EPOCHS] * 2
    assert watched.streaks == [7, 0], "what has become again what it was made as is handed over too"


def two_outputs() -> tuple[Any, Any, Any]:
    """A model with a metric that has a number for each of its outputs, and data for it."""
    x, y = data()
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Rescaling(0.01), keras.layers.Dense(2)])
    model.compile("sgd", "mse", metrics=[keras.metrics.R2Score(class_aggregation=None)])
    return model, x, np.concatenate([y, 1 - y], 1)


@pytest.mark.parametrize("later", [LENGTH, LENGTH + 2], ids=["between epochs", "amid an epoch"])
def test_a_metric_with_a_number_for_each_class_is_one_of_every_epoch_for_joiners_too(later: int) -> None:
    def fitted(session: Boundary) -> tuple[shoal.Run, dict[str, list[Any]]]:
        run, (model, x, y) = shoal.Run(session, "test", "unused"), two_outputs()
        found, elastic = shoal.batches(x, y, size=10), shoal.Elastic(run=run)
        return run, model.fit(found, epochs=3, verbose=0, callbacks=[elastic]).history

    there = Boundary(later)
    run, usual = fitted(there)
    assert [one.shape for one in usual["r2_score"]] == [(2,)] * 3
    assert run._trainer.metrics.keys() == {"loss"}, "only numbers can be shown with a run"
    _, joined = fitted(Hung(2, there))
    for name, values in usual.items():
        np.testing.assert_allclose(joined[name], values, rtol=1e-5, err_msg=name)


def test_an_evaluator_shows_what_is_a_number() -> None:
    model, x, y = two_outputs()
    found = wish((x, y), model, best="min:loss")
    assert found is not None
    assert found.score().keys() == {"loss"}


class Holds(keras.callbacks.Callback):  # type: ignore[misc]
    """Has brought something large along, and finds something large while training."""

    def __init__(self) -> None:
        super().__init__()
        self.brought, self.found = np.ones(1 << 20), None

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.found = np.full((2, 1 << 17), epoch, "float32")


def test_who_joins_has_the_best_weights_however_large() -> None:
    def fitted(session: Boundary) -> tuple[Any, Holds]:
        stop = keras.callbacks.EarlyStopping("quality", patience=9, mode="max", restore_best_weights=True)
        holds, model = Holds(), model_of(keras.layers.Rescaling(0.001), keras.layers.Dense(1 << 19))
        elastic = shoal.Elastic(Judge(*range(10, 4, -1)), stop, holds, run=shoal.Run(session, "test", "unused"))
        model.fit(shoal.batches(*data(), size=10), epochs=EPOCHS, verbose=0, callbacks=[elastic])
        return model.get_weights(), holds

    there = Boundary(LENGTH + 2)
    theirs, _ = fitted(there)
    ours, holds = fitted(Hung(0, there))
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one, other)
    assert (holds.found == EPOCHS - 1).all()
    sizes = [one.nbytes for one in there.state[1]]
    assert 4 << 18 in sizes, "what was found is handed over"
    assert 8 << 20 not in sizes, "what the script itself brings is not"


def test_an_evaluator_weighs_samples_as_validation_does() -> None:
    (x, y), model = data(), model_of(keras.layers.Rescaling(0.01))
    weights = np.where(y[:, 0] == 1, 3.0, 0.0)
    found = wish((x, y, weights), model, best="min:loss")
    assert found is not None
    assert found.score() == model.evaluate(x, y, sample_weight=weights, verbose=0, return_dict=True)


@pytest.mark.parametrize(
    "wrong",
    [{"size": 2.5}, {"size": "64"}, {"size": True}, {"size": 0}, {"micro": 0}, {"micro": 1.5}, {"epochs": 0.5}],
    ids=str,
)
def test_numbers_that_are_none_are_refused_where_they_are_passed(wrong: dict[str, Any]) -> None:
    ((name, value),) = wrong.items()
    with pytest.raises(BadSize, match=f"{name}=.*{value}") as refused:
        shoal.batches(*data(), **{"size": SIZE, **wrong})
    assert refused.value.do


def test_shards_are_for_pipelines() -> None:
    with pytest.raises(UnusableData, match="shards=4 cannot be used with arrays"):
        shoal.batches(*data(), size=SIZE, shards=4)
    with pytest.raises(BadSize, match="shards=0"):
        shoal.batches(slices(data()).batch(4), size=SIZE, shards=0)


def test_sizes_may_be_numbers_of_numpy() -> None:
    assert shoal.batches(*data(), size=np.int64(SIZE)).size == SIZE
