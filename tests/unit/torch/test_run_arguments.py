"""Numeric arguments of `run.batches` and `run.stream`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import shoal.torch as shoal
from shoal.core.validation import checked_int
from shoal.errors import BadSize

DATA = TensorDataset(torch.zeros(16, 2))


@pytest.mark.parametrize(
    "wrong",
    [
        {"size": 2.5},
        {"size": "64"},
        {"size": True},
        {"size": 0},
        {"micro": 0},
        {"micro": 1.5},
        {"epochs": 0.5},
        {"workers": "2"},
        {"prefetch": 0},
    ],
    ids=str,
)
def test_invalid_number_is_refused_with_its_name_and_value(wrong: dict[str, Any]) -> None:
    ((name, value),) = wrong.items()
    with pytest.raises(BadSize, match=f"{name}=.*{value}") as refused:
        shoal.join().batches(DATA, **{"size": 4, **wrong})
    assert refused.value.do


def test_stream_size_must_be_an_integer() -> None:
    with pytest.raises(BadSize, match="size='64'"):
        shoal.join().stream([[1, 2]], size="64")  # type: ignore[arg-type]


def test_numpy_integer_is_accepted() -> None:
    assert checked_int("size", np.int64(4)) == 4
