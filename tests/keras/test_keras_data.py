"""Data of a Keras run is read once per epoch, from any source; joining members get the state of callbacks."""

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
    pytest.skip("TensorFlow only", allow_module_level=True)

import shoal.keras as shoal  # noqa: E402
from shoal.core.data.sample_order import SampleOrder  # noqa: E402
from shoal.core.shares.balancer import ShareBalancer  # noqa: E402
from shoal.errors import BadSize, LoaderDied, NotAttached, SampleFailed, UnusableData, UnusableModel  # noqa: E402
from shoal.keras.data import arrays  # noqa: E402
from shoal.keras.data.arrays import SourceFetcher  # noqa: E402
from shoal.keras.data.batches import IndexedBatches  # noqa: E402
from shoal.keras.data.tf_stream import StreamedBatches  # noqa: E402
from shoal.keras.evaluation import evaluation_request  # noqa: E402
from shoal.testing.threaded_world import FixedWorldSession, together  # noqa: E402
from shoal.worker.data.feed import IndexedFeed  # noqa: E402
from shoal.worker.data.rng_state import RngState  # noqa: E402
from shoal.worker.data.share_loader import ShareLoader  # noqa: E402
from shoal.worker.session.standalone import StandaloneSession  # noqa: E402

pytestmark = pytest.mark.keras

SAMPLES, SIZE = 40, 12
# Members of one process wait for each other inside TensorFlow's threads: there must be one for each.
tf.config.threading.set_inter_op_parallelism_threads(8)
slices = tf.data.Dataset.from_tensor_slices


def data() -> tuple[Any, Any]:
    """Return samples that hold their own number and its double, and labels of two classes."""
    numbers = np.arange(SAMPLES, dtype="float32")
    return np.stack([numbers, 2 * numbers], 1), (numbers % 2).astype("float32").reshape(-1, 1)


def doubled(x: Any, y: Any) -> Any:
    return tf.stack([x[..., 0], x[..., 0] * 2], -1), y


class RecordSamples(keras.layers.Layer):  # type: ignore[misc]
    """Layer that records the samples of this member in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.run: shoal.Run | None = None
        self.steps: list[tuple[int, list[int]]] = []

    def call(self, x: Any) -> Any:
        tf.numpy_function(self._record, [x[:, 0]], [])
        return x * 0.01

    def _record(self, numbers: Any) -> None:
        if self.run is not None and self.run.share:
            self.steps.append((self.run.step, numbers.astype(int).tolist()))


def model_of(*layers: Any, **how: Any) -> Any:
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((2,)), *layers, keras.layers.Dense(1)])
    model.compile(**({"optimizer": keras.optimizers.SGD(0.01), "loss": "mse"} | how))
    return model


def steps_of(members: int, make: Callable[[], Any], epochs: int = 2, **how: Any) -> list[list[list[int]]]:
    """Return, by step, the samples of each member in the order of ranks."""
    how = {"shares": "fixed:" + ",".join(map(str, range(1, members + 1)))} | how

    def body(session: FixedWorldSession) -> list[tuple[int, list[int]]]:
        run = shoal.Run(session, "test", "unused")
        layers[session.rank].run = run
        batches = shoal.batches(make(), size=SIZE, **how)
        models[session.rank].fit(batches, epochs=epochs, verbose=0, callbacks=[shoal.Elastic(run=run)])
        return layers[session.rank].steps

    # Members are threads here and share the generator, so their equal models are built before they start.
    layers = [RecordSamples() for _ in range(members)]
    models = [model_of(layer) for layer in layers]
    recorded = together(members, body)
    last = max(step for records in recorded for step, _ in records)
    steps: list[list[list[int]]] = [[] for _ in range(last + 1)]
    for records in recorded:
        for step, numbers in records:
            steps[step].append(numbers)
    return steps


def check_epochs(steps: list[list[list[int]]], samples: int = SAMPLES, epochs: int = 2) -> None:
    """Check that every sample occurs once per epoch."""
    flat = [[number for part in step for number in part] for step in steps]
    length = -(-samples // SIZE)
    assert len(flat) == epochs * length
    for epoch in range(epochs):
        counted = Counter(number for step in flat[epoch * length : (epoch + 1) * length] for number in step)
        assert counted == dict.fromkeys(range(samples), 1)


# --- tf.data by index


def test_indexed_pipeline_follows_the_sample_order() -> None:
    def pipeline() -> Any:
        return slices(data()).map(doubled).batch(8).prefetch(2)

    assert isinstance(shoal.batches(pipeline(), size=SIZE), IndexedBatches)
    steps = steps_of(2, pipeline)
    check_epochs(steps)
    assert [list(map(len, step)) for step in steps[:4]] == [[4, 8]] * 3 + [[1, 3]], "shares are not 1 to 2"
    order = [[n for part in step for n in part] for step in steps]
    assert order[:4] != order[4:], "epochs have the same order"
    alone = [[n for part in step for n in part] for step in steps_of(1, pipeline)]
    assert order == alone, "the samples of a step depend on the number of members"


PIPELINES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "with its own shuffle": (lambda: slices(data()).shuffle(7).map(doubled).batch(8), {}),
    "single samples": (lambda: slices(data()).shuffle(7), {"batched": False}),
    "mapped batches with a short last one": (lambda: slices(data()).batch(7).map(doubled), {}),
}


@pytest.mark.parametrize("kind", PIPELINES)
def test_every_sample_of_an_indexed_pipeline_counts_once(kind: str) -> None:
    make, how = PIPELINES[kind]
    assert isinstance(shoal.batches(make(), size=SIZE, **how), IndexedBatches)
    check_epochs(steps_of(2, make, **how))


def test_indexing_yields_the_elements_of_the_pipeline() -> None:
    rows, more = slices(data()), tf.Variable(3.0)
    named = tf.data.Dataset.zip({"b": slices(data()[0]), "a": tf.data.Dataset.range(3, 99, 2)})
    filtered = rows.filter(lambda x, y: x[0] != 5)
    pipelines: list[tuple[Any, bool]] = [
        (rows.map(doubled, num_parallel_calls=2, deterministic=False).batch(8).prefetch(2), True),
        (rows.map(lambda x, y: (x + more, y)).batch(8, num_parallel_calls=2).map(lambda x, y: (x * 2, y)), True),
        (rows.batch(5).skip(1).take(4), True),
        (rows.repeat(2).shard(3, 1), False),
        (rows.batch(7).repeat(2).prefetch(1), True),
        (rows.batch(8).map(doubled).repeat(2), True),
        (rows.batch(7).map(doubled).take(5).repeat(2), True),
        (named, False),
        (named.map(lambda row: {"c": row["b"] * 2.0, "a": row["a"]}).batch(7), True),
        (rows.map(lambda x, y: (tf.ensure_shape(tf.numpy_function(np.negative, [x], tf.float32), [2]), y)), False),
        (rows.map(lambda x, y: tf.fill([tf.cast(x[0], tf.int32)], y[0])).map(lambda x: tf.reduce_sum(x)), False),
        (filtered.cache().map(doubled), False),
        (filtered.batch(7).cache().map(doubled), True),
        (rows.batch(8).cache(), True),
    ]
    for pipeline, batched in pipelines:
        batches = shoal.batches(pipeline, size=4, batched=batched, shuffle=False)
        assert isinstance(batches, IndexedBatches), pipeline
        source = batches._source
        ours = source.rows(np.arange(len(source)), 0)
        given = list(pipeline.as_numpy_iterator())
        joined = np.concatenate if batched else np.stack
        theirs = keras.tree.map_structure(lambda *parts: joined(parts), *given)  # noqa: B023
        keras.tree.assert_same_structure(ours, theirs)
        for actual, expected in zip(keras.tree.flatten(ours), keras.tree.flatten(theirs), strict=True):
            np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("last", [lambda rows: rows.repeat(2), lambda rows: rows.repeat(2).map(doubled)])
def test_uneven_batches_are_read_as_a_stream(last: Callable[[Any], Any]) -> None:
    def pipeline() -> Any:
        return last(slices(data()).batch(7).map(doubled))

    assert isinstance(shoal.batches(pipeline(), size=SIZE), StreamedBatches)
    given = Counter(n for step in steps_of(2, pipeline, epochs=1, shares="equal") for part in step for n in part)
    assert given == Counter(2 * list(range(SAMPLES)))


def test_indexing_survives_a_change_of_the_seed() -> None:
    batches = shoal.batches(slices(data()).map(doubled).batch(8), size=SIZE)
    first = batches.example()
    tf.random.set_seed(1)
    np.testing.assert_array_equal(batches.example()[0], first[0])


def test_filtered_pipeline_is_read_as_a_stream() -> None:
    def pipeline() -> Any:
        return slices(data()).filter(lambda x, y: x[0] >= 0).batch(8)

    assert isinstance(shoal.batches(pipeline(), size=SIZE), StreamedBatches)
    assert isinstance(shoal.batches(slices(data()).batch(8), size=SIZE, shards=4), StreamedBatches)
    flat = [number for step in steps_of(2, pipeline, shares="equal") for part in step for number in part]
    assert Counter(flat) == dict.fromkeys(range(SAMPLES), 2)


def test_stream_restarts_when_steps_per_epoch_exceed_it() -> None:
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
    "parts of unequal rank": (lambda: slices(data()), "not batches"),
    "ragged": (lambda: slices(tf.ragged.constant([[1], [2, 3]])).batch(2), "ragged"),
    "a stream that is shuffled": (
        lambda: slices(data()).filter(lambda x, y: True).shuffle(8).batch(8),
        "another order",
    ),
    "a stream that is reshuffled": (
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
def test_unusable_pipeline_is_refused_with_advice(kind: str) -> None:
    make, message = BROKEN[kind]
    with pytest.raises(UnusableData, match=message) as raised:
        shoal.batches(make(), size=4)
    assert raised.value.do


def test_empty_stream_is_refused() -> None:
    empty = shoal.batches(slices(data()).filter(lambda x, y: x[0] < 0).batch(8), size=4)
    with pytest.raises(UnusableData, match="pipeline is empty"):
        model_of().fit(empty, verbose=0, callbacks=[shoal.Elastic(run=alone())])


def test_shuffled_pipeline_is_refused_with_shuffle_false() -> None:
    with pytest.raises(UnusableData, match="another order"):
        shoal.batches(slices(data()).shuffle(8).batch(8), size=SIZE, shuffle=False)


def test_repeated_pipeline_with_an_end_is_accepted() -> None:
    taken = slices(data()).repeat().filter(lambda x, y: True).take(SAMPLES).batch(8)
    assert isinstance(shoal.batches(taken, size=SIZE), StreamedBatches)
    twice = slices(data()).repeat(2).batch(8)
    assert len(shoal.batches(twice, size=SIZE)._source) == 2 * SAMPLES  # type: ignore[attr-defined]


def test_unreadable_sample_is_named() -> None:
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
        return tuple(array[7 * number : 7 * number + 7] for array in data())


@pytest.mark.parametrize(
    ("make", "how"),
    [
        (Items, {"workers": 2}),
        (lambda: Items(workers=2, use_multiprocessing=True), {}),
        (lambda: slices(data()).map(doubled).batch(8), {"workers": 1, "prefetch": 3}),
    ],
    ids=["threads", "processes", "tf.data"],
)
def test_reading_ahead_does_not_change_the_samples(make: Callable[[], Any], how: dict[str, Any]) -> None:
    ahead = steps_of(2, make, **how)
    check_epochs(ahead)
    assert ahead == steps_of(2, make, workers=0)


def test_next_step_is_read_during_the_current_one() -> None:
    main, read = threading.current_thread(), threading.Event()

    class Watched(Items):
        def __getitem__(self, number: int) -> Any:
            if threading.current_thread() is not main:
                read.set()
            return super().__getitem__(number)

    class Wait(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            assert read.wait(120), "nothing is read during the first step"

    run = alone()
    batches = shoal.batches(Watched(), size=7, workers=1, prefetch=1)
    model_of().fit(batches, verbose=0, callbacks=[shoal.Elastic(run=run), Wait()])
    assert run.step == 6


def test_read_ahead_defaults_to_the_workers_of_the_dataset() -> None:
    def workers_of(dataset: Any, **how: Any) -> Any:
        config = shoal.batches(dataset, size=SIZE, **how)._read_ahead  # type: ignore[attr-defined]
        return config.workers, config.processes

    assert workers_of(Items()) == (0, False)
    assert workers_of(Items(workers=3)) == (3, False)
    assert workers_of(Items(workers=1, use_multiprocessing=True)) == (1, True)
    assert workers_of(Items(workers=3), workers=0) == (0, False)
    assert workers_of(slices(data()).batch(8)) == (0, False)
    assert workers_of(slices(data()).batch(8).prefetch(2)) == (1, False)


def test_death_of_a_worker_process_is_reported() -> None:
    class Fatal(Items):
        def __getitem__(self, number: int) -> Any:
            if os.getpid() != parent:
                os._exit(3)
            return super().__getitem__(number)

    parent = os.getpid()
    batches = shoal.batches(Fatal(workers=1, use_multiprocessing=True), size=7)
    with pytest.raises(LoaderDied, match="ended"):
        model_of().fit(batches, verbose=0, callbacks=[shoal.Elastic(run=alone())])


def test_items_of_unequal_size_are_refused() -> None:
    class Uneven(Items):
        def __getitem__(self, number: int) -> Any:
            item = super().__getitem__(number)
            return tuple(array[:5] for array in item) if number == 3 else item

    with pytest.raises(UnusableData, match=r"item 3 .* has 5 samples"):
        model_of().fit(shoal.batches(Uneven(), size=7), verbose=0, callbacks=[shoal.Elastic(run=alone())])


def serialise_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let one thread read at a time: members that are threads of one process share its random generators."""
    lock, parent = threading.RLock(), os.getpid()

    def locked(method: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any) -> Any:
            # A forked worker has no other threads, and the lock may have been held when it was forked.
            with lock if os.getpid() == parent else nullcontext():
                return method(*args)

        return called

    for kind, name in ((arrays.PyDatasetSource, "_item"), (RngState, "seed"), (RngState, "restore")):
        monkeypatch.setattr(kind, name, locked(getattr(kind, name)))


def test_random_numbers_of_a_pydataset_are_the_same_on_every_member(monkeypatch: pytest.MonkeyPatch) -> None:
    class Noisy(Items):
        def __getitem__(self, number: int) -> Any:
            x, y = super().__getitem__(number)
            return x + np.random.normal(size=x.shape).astype("float32"), y

    def losses(members: int, make: Callable[[], Any]) -> Any:
        def body(session: FixedWorldSession) -> Any:
            batches = shoal.batches(make(), size=SIZE, shares="equal")
            run = shoal.Run(session, "test", "unused")
            return models[session.rank].fit(batches, epochs=2, verbose=0, callbacks=[shoal.Elastic(run=run)]).history

        models = [model_of() for _ in range(members)]
        return together(members, body)[0]["loss"]

    alone_ = losses(1, Noisy)
    serialise_reads(monkeypatch)
    np.testing.assert_allclose(losses(2, Noisy), alone_, rtol=1e-4)
    np.testing.assert_allclose(losses(2, lambda: Noisy(workers=1, use_multiprocessing=True)), alone_, rtol=1e-4)


# --- arguments of fit


def alone() -> shoal.Run:
    return shoal.Run(StandaloneSession(), "test", "unused")


def fit(*given: Any, **how: Any) -> Any:
    elastic = how.pop("callbacks", [shoal.Elastic(run=alone())])
    options = {name: how.pop(name) for name in ("class_weight_of_batches", "shuffle_of_batches") if name in how}
    ours = {name.removesuffix("_of_batches"): value for name, value in options.items()}
    batches = shoal.batches(*(given or data()), size=SIZE, **ours)
    return model_of().fit(batches, verbose=0, callbacks=elastic, **how).history["loss"]


def test_class_weight_of_fit_and_of_batches_is_honoured() -> None:
    weights = {0: 1.0, 1: 3.0}
    x, y = data()
    theirs = model_of().fit(x, y, batch_size=SAMPLES, class_weight=weights, verbose=0).history["loss"]

    def ours(*given: Any, **how: Any) -> Any:
        batches = shoal.batches(*given, size=SAMPLES, **how.pop("options", {}))
        return model_of().fit(batches, verbose=0, callbacks=[shoal.Elastic(run=alone())], **how).history["loss"]

    np.testing.assert_allclose(ours(x, y, class_weight=weights), theirs, rtol=1e-5)
    np.testing.assert_allclose(ours(x, y, options={"class_weight": weights}), theirs, rtol=1e-5)
    pipeline = slices((x, y)).batch(8)
    np.testing.assert_allclose(ours(pipeline, class_weight=weights), theirs, rtol=1e-5)
    np.testing.assert_allclose(ours(pipeline, options={"shards": 2}, class_weight=weights), theirs, rtol=1e-5)
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
def test_arguments_that_keras_would_ignore_are_refused(how: dict[str, Any], remedy: str) -> None:
    with pytest.raises(UnusableData, match=remedy):
        fit(**how)


def test_steps_per_execution_is_refused() -> None:
    batches = shoal.batches(*data(), size=SIZE)
    with pytest.raises(UnusableModel, match="steps_per_execution"):
        model_of(steps_per_execution=2).fit(batches, verbose=0, callbacks=[shoal.Elastic(run=alone())])


def test_shuffle_false_is_accepted_if_batches_do_not_shuffle() -> None:
    assert fit(shuffle=False, shuffle_of_batches=False)
    with pytest.raises(ValueError, match="validation_split"):
        fit(validation_split=0.2)


def test_batches_are_for_training_only() -> None:
    batches, model = shoal.batches(*data(), size=SIZE), model_of()
    for use in (model.evaluate, model.predict):
        with pytest.raises(UnusableData, match="share of the training data"):
            use(batches, verbose=0)
    with pytest.raises(UnusableData, match="validation_data"):
        fit(validation_data=batches)
    with pytest.raises(NotAttached, match="Elastic"):
        fit(callbacks=[])
    with pytest.raises(NotAttached, match="not attached to a training loop"):
        next(iter(shoal.batches(*data(), size=SIZE)))


# --- joining and leaving


class BlockedPipeline:
    """Blocks a pipeline at the sample `first`, to check that work does not wait for it."""

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
        working.join(120)
        try:
            assert self.reached.is_set(), "nothing is read ahead"
            assert not working.is_alive(), f"{what} waits for the pipeline"
        finally:
            self._released.set()


def through(function: Any) -> Any:
    """Return a function for `map` that passes samples through a Python function."""
    return lambda x, y: (tf.ensure_shape(tf.numpy_function(function, [x], tf.float32), [2]), y)


def test_training_ends_while_its_pipeline_is_blocked() -> None:
    held = BlockedPipeline(30)

    class Stop(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            held.reached.wait(120)
            self.model.stop_training = True

    def train() -> None:
        batches = shoal.batches(slices(data()).map(through(held.hold)).batch(8).prefetch(8), size=4, shards=1)
        model_of().fit(batches, verbose=0, callbacks=[shoal.Elastic(run=alone()), Stop()])

    held.check(train, "the end of training")


def test_example_of_a_stream_does_not_wait_for_read_ahead() -> None:
    held = BlockedPipeline(4)

    def after_block(x: Any) -> Any:
        held.reached.wait(120)
        return x

    pipeline = slices(data()).map(through(held.hold)).prefetch(8).map(through(after_block))
    batches = shoal.batches(pipeline, size=4, shards=1, batched=False)
    held.check(batches.example, "the example")


def test_warm_up_step_runs_before_joining_and_leaves_no_trace() -> None:
    layers = keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)
    model = model_of(*layers, optimizer="adam", metrics=["mae"])
    at_join: dict[str, Any] = {}

    def values() -> list[Any]:
        variables = (*model.variables, *model.metrics_variables, *model.optimizer.variables)
        return [keras.ops.convert_to_numpy(variable).tolist() for variable in variables]

    class Joining(StandaloneSession):
        def begin(self, *_: Any, **__: Any) -> None:
            at_join["traces"], at_join["values"] = run._trainer._backend.traces, values()  # type: ignore[union-attr]
            at_join["drawn"] = np.random.random()

    run = shoal.Run(Joining(), "test", "unused")
    batches = shoal.batches(*data(), size=SIZE)
    model._symbolic_build(data_batch=batches.example())
    model.optimizer.build(model.trainable_variables)
    before = values()
    np.random.seed(5)
    model.fit(batches, verbose=0, callbacks=[shoal.Elastic(run=run)])
    assert at_join["traces"] == run._trainer._backend.traces == 1  # type: ignore[union-attr]
    assert at_join["values"] == before
    np.random.seed(5)
    assert at_join["drawn"] == np.random.random()


EPOCHS, LENGTH = 6, 4


class RecordHooks(keras.callbacks.Callback):  # type: ignore[misc]
    """Records the hooks it receives, and halves the learning rate at the end of every epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[int] = []
        self.ended: list[int] = []
        # Not a plain value, so that it is not part of the state.
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


class CaptureSession(StandaloneSession):
    """Session that captures the state at one step."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at, self.state = at, (b"", [])

    def begin(self, fingerprint: str, training_state: Any, on_cpu: bool = True) -> None:
        self.training_state = training_state

    def next_step(self) -> int:
        if self.step == self.at:
            header, buffers = self.training_state.capture()
            self.state = header, [buffer.copy() for buffer in buffers]
        return super().next_step()


class SuspendedSession(CaptureSession):
    """Session of a member that loads the state of a later step when it reaches `at`."""

    def __init__(self, at: int, later: CaptureSession) -> None:
        super().__init__(at)
        self.later: CaptureSession | None = later

    def next_step(self) -> int:
        if self.step == self.at and self.later is not None:
            self.training_state.load(*self.later.state)
            self.step, self.later = self.later.at, None
        return StandaloneSession.next_step(self)


@pytest.mark.parametrize("later", [4 * LENGTH, 4 * LENGTH + 2], ids=["between epochs", "within an epoch"])
def test_member_that_missed_epochs_does_not_end_or_validate_them(later: int) -> None:
    def fitted(session: CaptureSession) -> tuple[RecordHooks, dict[str, list[float]], list[Any]]:
        hooks, model = RecordHooks(), model_of()
        elastic = shoal.Elastic(hooks, run=shoal.Run(session, "test", "unused"))
        batches = shoal.batches(*data(), size=10)
        history = model.fit(batches, epochs=EPOCHS, validation_data=data(), verbose=0, callbacks=[elastic]).history
        return hooks, history, [keras.ops.convert_to_numpy(variable) for variable in model.variables]

    other = CaptureSession(later)
    theirs, usual, weights = fitted(other)
    assert theirs.begun == theirs.ended == list(range(EPOCHS))
    ours, history, own_weights = fitted(SuspendedSession(LENGTH + 2, other))
    assert ours.begun == ours.ended == list(range(EPOCHS)), "with the loaded state, each epoch is seen once"
    resumed = 3 if later % LENGTH == 0 else 4
    ends = [number for what, number in ours.own if what == "end"]
    assert ends == [0, *range(resumed, EPOCHS)], "it ended epochs that were ended before"
    assert sum(what == "validate" for what, _ in ours.own) == len(ends)
    assert history.keys() == usual.keys()
    for name, values in usual.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-5, err_msg=name)
    for actual, expected in zip(own_weights, weights, strict=True):
        np.testing.assert_array_equal(actual, expected)


class Judge(keras.callbacks.Callback):  # type: ignore[misc]
    """Logs a given quality of the model after each epoch."""

    def __init__(self, *qualities: float) -> None:
        super().__init__()
        # Not a plain value, so that it is not part of the state.
        self.qualities = deque(qualities)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        logs["quality"] = self.qualities[epoch]


def test_joining_member_uses_the_same_min_delta() -> None:
    def fitted(session: CaptureSession) -> int:
        stop = keras.callbacks.EarlyStopping("quality", min_delta=1.0, patience=2, mode="min")
        run = shoal.Run(session, "test", "unused")
        elastic = shoal.Elastic(Judge(10.0, 9.8, 9.6, 9.4, 9.2, 9.0), stop, run=run)
        model_of().fit(shoal.batches(*data(), size=10), epochs=EPOCHS, verbose=0, callbacks=[elastic])
        return run.step

    other = CaptureSession(LENGTH + 2)
    assert fitted(other) == fitted(SuspendedSession(0, other)) == 3 * LENGTH


def test_resumed_run_uses_the_patience_of_its_script() -> None:
    def fitted(session: CaptureSession, patience: int) -> int:
        stop = keras.callbacks.EarlyStopping("quality", patience=patience, mode="max")
        run = shoal.Run(session, "test", "unused")
        elastic = shoal.Elastic(Judge(*range(10, 4, -1)), stop, run=run)
        model_of().fit(shoal.batches(*data(), size=10), epochs=EPOCHS, verbose=0, callbacks=[elastic])
        return run.step

    other = CaptureSession(2 * LENGTH + 2)
    assert fitted(other, 9) == EPOCHS * LENGTH
    assert fitted(SuspendedSession(0, other), 2) == 3 * LENGTH, "the epoch waited before the resume does not count"


class StatefulCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Keeps state in all the ways that callbacks do; `limit` is a setting of the script."""

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


class WatchedSession(SuspendedSession):
    """Records an attribute of a callback before and after the state is loaded."""

    def __init__(self, at: int, later: CaptureSession, callback: StatefulCallback) -> None:
        super().__init__(at, later)
        self.callback, self.streaks = callback, []

    def next_step(self) -> int:
        if self.step == self.at and self.later is not None:
            before = self.callback.streak
            step = super().next_step()
            self.streaks = [before, self.callback.streak]
            return step
        return super().next_step()


def test_changed_attributes_of_callbacks_are_transferred_and_settings_are_not() -> None:
    def fit(session: CaptureSession, callback: StatefulCallback) -> None:
        elastic = shoal.Elastic(callback, run=shoal.Run(session, "test", "unused"))
        model_of().fit(shoal.batches(*data(), size=10), epochs=EPOCHS, verbose=0, callbacks=[elastic])

    other, ours = CaptureSession(2 * LENGTH + 2), StatefulCallback(5)
    fit(other, StatefulCallback(3))
    watched = WatchedSession(LENGTH + 2, other, ours)
    fit(watched, ours)
    assert ours.limit == 5
    assert ours.began == 103, "the state of on_train_begin was not transferred"
    assert ours.seen == list(range(EPOCHS))
    assert ours.counts.tolist() == [EPOCHS] * 2
    assert watched.streaks == [7, 0], "an attribute that is back at its initial value was not transferred"


def two_outputs() -> tuple[Any, Any, Any]:
    """Return a model with a metric that has one number per output, and data for it."""
    x, y = data()
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Rescaling(0.01), keras.layers.Dense(2)])
    model.compile("sgd", "mse", metrics=[keras.metrics.R2Score(class_aggregation=None)])
    return model, x, np.concatenate([y, 1 - y], 1)


@pytest.mark.parametrize("later", [LENGTH, LENGTH + 2], ids=["between epochs", "within an epoch"])
def test_joining_member_reports_metrics_with_one_number_per_class(later: int) -> None:
    def fitted(session: CaptureSession) -> tuple[shoal.Run, dict[str, list[Any]]]:
        run, (model, x, y) = shoal.Run(session, "test", "unused"), two_outputs()
        batches, elastic = shoal.batches(x, y, size=10), shoal.Elastic(run=run)
        return run, model.fit(batches, epochs=3, verbose=0, callbacks=[elastic]).history

    other = CaptureSession(later)
    run, usual = fitted(other)
    assert [score.shape for score in usual["r2_score"]] == [(2,)] * 3
    assert run._trainer.metrics.keys() == {"loss"}, "a metric that is not a number was logged"
    _, joined = fitted(SuspendedSession(2, other))
    for name, values in usual.items():
        np.testing.assert_allclose(joined[name], values, rtol=1e-5, err_msg=name)


def test_evaluator_reports_only_scalar_metrics() -> None:
    model, x, y = two_outputs()
    request = evaluation_request((x, y), model, best="min:loss")
    assert request is not None
    assert request.score().keys() == {"loss"}


class LargeAttributes(keras.callbacks.Callback):  # type: ignore[misc]
    """Has a large attribute from the start, and another one from training."""

    def __init__(self) -> None:
        super().__init__()
        self.initial, self.learned = np.ones(1 << 20), None

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.learned = np.full((2, 1 << 17), epoch, "float32")


def test_joining_member_gets_large_best_weights() -> None:
    def fitted(session: CaptureSession) -> tuple[Any, LargeAttributes]:
        stop = keras.callbacks.EarlyStopping("quality", patience=9, mode="max", restore_best_weights=True)
        holds, model = LargeAttributes(), model_of(keras.layers.Rescaling(0.001), keras.layers.Dense(1 << 19))
        elastic = shoal.Elastic(Judge(*range(10, 4, -1)), stop, holds, run=shoal.Run(session, "test", "unused"))
        model.fit(shoal.batches(*data(), size=10), epochs=EPOCHS, verbose=0, callbacks=[elastic])
        return model.get_weights(), holds

    other = CaptureSession(LENGTH + 2)
    theirs, _ = fitted(other)
    ours, holds = fitted(SuspendedSession(0, other))
    for actual, expected in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(actual, expected)
    assert (holds.learned == EPOCHS - 1).all()
    sizes = [buffer.nbytes for buffer in other.state[1]]
    assert 4 << 18 in sizes, "the learned attribute was not transferred"
    assert 8 << 20 not in sizes, "the initial attribute was transferred"


def test_evaluator_weights_samples_like_keras() -> None:
    (x, y), model = data(), model_of(keras.layers.Rescaling(0.01))
    weights = np.where(y[:, 0] == 1, 3.0, 0.0)
    request = evaluation_request((x, y, weights), model, best="min:loss")
    assert request is not None
    assert request.score() == model.evaluate(x, y, sample_weight=weights, verbose=0, return_dict=True)


@pytest.mark.parametrize(
    "wrong",
    [{"size": 2.5}, {"size": "64"}, {"size": True}, {"size": 0}, {"micro": 0}, {"micro": 1.5}, {"epochs": 0.5}],
    ids=str,
)
def test_invalid_sizes_are_refused(wrong: dict[str, Any]) -> None:
    ((name, value),) = wrong.items()
    with pytest.raises(BadSize, match=f"{name}=.*{value}") as refused:
        shoal.batches(*data(), **{"size": SIZE, **wrong})
    assert refused.value.do


def test_shards_are_refused_without_a_pipeline() -> None:
    with pytest.raises(UnusableData, match="shards=4 cannot be used with arrays"):
        shoal.batches(*data(), size=SIZE, shards=4)
    with pytest.raises(BadSize, match="shards=0"):
        shoal.batches(slices(data()).batch(4), size=SIZE, shards=0)


def test_numpy_integers_are_accepted_as_sizes() -> None:
    assert shoal.batches(*data(), size=np.int64(SIZE)).size == SIZE


def indexed_feed(batches: Any) -> IndexedFeed:
    source = batches._source
    order = SampleOrder(len(source), batches.size)
    return IndexedFeed(order, ShareLoader(order, SourceFetcher(source, order)), ShareBalancer())


def test_members_notice_other_arrays_and_other_validation_data() -> None:
    def drawn(seed: int) -> tuple[str, str]:
        rng = np.random.default_rng(seed)
        batches = shoal.batches(rng.normal(size=(20, 3)), rng.normal(size=20), size=5)
        batches._validation_data = (rng.normal(size=(8, 3)), rng.normal(size=8))
        return batches.signatures(indexed_feed(batches)), batches.validation_signatures()

    assert drawn(1) == drawn(1)
    assert all(ours != theirs for ours, theirs in zip(drawn(1), drawn(2), strict=True))


class DrawnItems(keras.utils.PyDataset):
    """Items that were drawn at the start, or are drawn whenever they are read."""

    def __init__(self, seed: int, *, redrawn: bool = False) -> None:
        super().__init__()
        self._rng, self._redrawn = np.random.default_rng(seed), redrawn
        self._items = [(self._rng.normal(size=(4, 3)), np.arange(4)) for _ in range(3)]

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Any:
        return (self._rng.normal(size=(4, 3)), np.arange(4)) if self._redrawn else self._items[index]


def test_members_notice_other_items_of_a_pydataset(capsys: pytest.CaptureFixture[str]) -> None:
    def drawn(seed: int, *, redrawn: bool = False) -> str:
        batches = shoal.batches(DrawnItems(seed, redrawn=redrawn), size=4)
        return batches.signatures(indexed_feed(batches))

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)
    assert not capsys.readouterr().err
    assert drawn(1, redrawn=True) == "random"
    assert "warning[S352] sample 0 differs each time it is read" in capsys.readouterr().err


def test_members_notice_another_order_of_a_stream(capsys: pytest.CaptureFixture[str]) -> None:
    def drawn(seed: int, *, redrawn: bool = False) -> str:
        rng = np.random.default_rng(seed)
        order = rng.permutation(64)
        spec = tf.TensorSpec((1,), tf.float32)
        stream = tf.data.Dataset.from_generator(
            lambda: ([float(n)] for n in (rng.permutation(64) if redrawn else order)), output_signature=spec
        )
        batches = shoal.batches(stream, size=4, batched=False, shards=4)
        return batches.signatures(None)

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)
    assert not capsys.readouterr().err
    assert drawn(1, redrawn=True) == "random"
    assert "warning[S352] shard 0 of the stream begins with other samples" in capsys.readouterr().err


def test_data_without_labels_is_x_itself() -> None:
    x = np.zeros((20, 3))
    assert shoal.batches(x, size=5).example().shape == (2, 3)
    assert shoal.batches({"a": x}, size=5).example()["a"].shape == (2, 3)
    assert [len(part) for part in shoal.batches((x, x), size=5).example()] == [2, 2]
    assert len(shoal.batches([x, x, x], size=5).example()) == 1  # one x of three inputs, not x, y and weights
