"""Values that a Keras script may log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

keras = pytest.importorskip("keras")
tf = pytest.importorskip("tensorflow")

from shoal.errors import BadMetric  # noqa: E402
from shoal.keras.run import Run  # noqa: E402
from shoal.worker.session.standalone import StandaloneSession  # noqa: E402

pytestmark = [pytest.mark.keras, pytest.mark.timeout(600)]


class MetricsOnly:
    """Trainer that only has metrics."""

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(StandaloneSession(), "alone", str(tmp_path))
    run._trainer = MetricsOnly()  # type: ignore[assignment]
    return run


@pytest.mark.parametrize(
    "make",
    [
        *(lambda: tf.constant(2.0), lambda: tf.constant([[2]]), lambda: tf.Variable(2.0)),
        *(lambda: tf.constant(2.0, tf.bfloat16), lambda: keras.Variable(2.0), lambda: keras.ops.sum([1.0, 1.0])),
    ],
)
def test_scalars_of_tensorflow_and_keras_are_logged(run: Run, make: Any) -> None:
    run.log(two=make())
    assert run._trainer.metrics == {"two": 2.0}  # type: ignore[union-attr]


@pytest.mark.parametrize("make", [lambda: "text", lambda: tf.constant("text"), lambda: tf.zeros(2), lambda: None])
def test_log_refuses_values_that_are_not_numbers(run: Run, make: Any) -> None:
    with pytest.raises(BadMetric, match="bad is a "):
        run.log(fine=1, bad=make())
    assert run._trainer.metrics == {}  # type: ignore[union-attr]
    run._trainer = None
    with pytest.raises(BadMetric, match="bad is a "):
        run.log(bad=make())


def test_log_refuses_a_tensor_inside_a_graph(run: Run) -> None:
    @tf.function
    def traced(x: Any) -> Any:
        run.log(bad=x)
        return x

    # TensorFlow wraps exceptions of types that it does not know.
    with pytest.raises(Exception, match=r"S323(.|\n)*its value is not known while"):
        traced(tf.constant(1.0))
