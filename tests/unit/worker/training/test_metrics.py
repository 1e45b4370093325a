"""Metrics that a script logs: numbers of any framework, and nothing else."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from shoal.errors import BadMetric
from shoal.torch.run import Run
from shoal.worker.session.standalone import StandaloneSession
from shoal.worker.training.metrics import check_metrics, finite_metrics

NUMBERS = [
    *(2, 2.0, Decimal(2), Fraction(2), np.float32(2), np.int64(2), np.array(2.0), np.array([[2]], np.uint8)),
    *(torch.tensor(2), torch.tensor([2.0], requires_grad=True), torch.tensor(2.0, dtype=torch.bfloat16)),
]
OTHERS = [
    *("text", "2.0", b"2", None, 2j, [2.0], {"a": 2.0}, object(), np.complex64(2), np.array("2"), np.zeros(2)),
    *(np.zeros(0), torch.zeros(2), torch.zeros(0), torch.tensor(2j), torch.zeros((), device="meta")),
]


class SymbolicTensor:
    """A tensor of a graph, whose value is not known yet."""

    shape = (None, 3)


@pytest.fixture
def run(tmp_path: Any) -> Run:
    return Run(StandaloneSession(), "alone", str(tmp_path))


@pytest.mark.parametrize("value", NUMBERS)
def test_scalar_of_any_framework_is_logged(run: Run, value: Any) -> None:
    assert check_metrics({"two": value}) == {"two": 2.0}
    run.log(two=value)
    assert run._trainer._status()["metrics"] == {"two": 2.0}


@pytest.mark.parametrize("value", [*OTHERS, SymbolicTensor()])
def test_value_that_is_not_a_number_is_refused_by_log(run: Run, value: Any) -> None:
    with pytest.raises(BadMetric, match="bad is a ") as raised:
        check_metrics({"fine": 1, "bad": value})
    assert "run.log(bad=" in raised.value.do
    with pytest.raises(BadMetric, match="bad is a "):
        run.log(fine=1, bad=value)
    assert run._trainer._status()["metrics"] == {}, "a part of the call was logged"


def test_error_for_an_array_names_its_shape() -> None:
    with pytest.raises(BadMetric) as raised:
        check_metrics({"bad": np.zeros((2, 3))})
    assert raised.value.why == "its shape is (2, 3)"


def test_value_is_refused_in_an_uncommitted_step_too(run: Run) -> None:
    class Uncommitted:
        committed = False

    run._trainer.current = Uncommitted()  # type: ignore[assignment]
    with pytest.raises(BadMetric, match="bad is a str"):
        run.log(bad="text")


def test_logging_a_tensor_does_not_wait_for_its_device(run: Run) -> None:
    run.log(loss=torch.tensor(1.0, requires_grad=True))
    logged = run._trainer.metrics["loss"]
    assert isinstance(logged, torch.Tensor)
    assert not logged.requires_grad


def test_infinite_metrics_are_left_out_of_heartbeats() -> None:
    assert finite_metrics({"a": 1, "nan": math.nan, "inf": torch.tensor(math.inf)}) == {"a": 1.0}
