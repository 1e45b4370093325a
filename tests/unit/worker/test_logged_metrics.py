"""What a script may log: numbers of any kind, and nothing else."""

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
from shoal.worker.training.metrics import checked, finite

NUMBERS = [
    *(2, 2.0, Decimal(2), Fraction(2), np.float32(2), np.int64(2), np.array(2.0), np.array([[2]], np.uint8)),
    *(torch.tensor(2), torch.tensor([2.0], requires_grad=True), torch.tensor(2.0, dtype=torch.bfloat16)),
]
OTHERS = [
    *("text", "2.0", b"2", None, 2j, [2.0], {"a": 2.0}, object(), np.complex64(2), np.array("2"), np.zeros(2)),
    *(np.zeros(0), torch.zeros(2), torch.zeros(0), torch.tensor(2j), torch.zeros((), device="meta")),
]


class Unknown:
    """A tensor of a graph, whose value nobody knows yet."""

    shape = (None, 3)


@pytest.fixture
def run(tmp_path: Any) -> Run:
    return Run(StandaloneSession(), "alone", str(tmp_path))


@pytest.mark.parametrize("value", NUMBERS)
def test_whatever_is_one_number_is_logged(run: Run, value: Any) -> None:
    assert checked({"two": value}) == {"two": 2.0}
    run.log(two=value)
    assert run._trainer._status()["metrics"] == {"two": 2.0}


@pytest.mark.parametrize("value", [*OTHERS, Unknown()])
def test_what_is_no_number_is_refused_where_it_is_logged(run: Run, value: Any) -> None:
    with pytest.raises(BadMetric, match="bad is a ") as raised:
        checked({"fine": 1, "bad": value})
    assert "run.log(bad=" in raised.value.do
    with pytest.raises(BadMetric, match="bad is a "):
        run.log(fine=1, bad=value)
    assert run._trainer._status()["metrics"] == {}, "a part of it was taken"


def test_of_an_array_its_shape_is_told() -> None:
    with pytest.raises(BadMetric) as raised:
        checked({"bad": np.zeros((2, 3))})
    assert raised.value.why == "its shape is (2, 3)"


def test_it_is_refused_also_in_a_step_that_does_not_count(run: Run) -> None:
    class Uncommitted:
        committed = False

    run._trainer.turn = Uncommitted()  # type: ignore[assignment]
    with pytest.raises(BadMetric, match="bad is a str"):
        run.log(bad="text")


def test_a_number_that_a_device_still_computes_is_not_waited_for(run: Run) -> None:
    run.log(loss=torch.tensor(1.0, requires_grad=True))
    kept = run._trainer.metrics["loss"]
    assert isinstance(kept, torch.Tensor)
    assert not kept.requires_grad


def test_what_is_not_finite_is_left_out_of_what_is_told() -> None:
    assert finite({"a": 1, "nan": math.nan, "inf": torch.tensor(math.inf)}) == {"a": 1.0}
