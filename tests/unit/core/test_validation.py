"""Validation of integer arguments."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shoal.core.validation import check_amount, check_counts, check_length, check_names, checked_int
from shoal.errors import BadSize


def test_integers_of_any_kind_become_int() -> None:
    assert type(checked_int("size", np.int64(3))) is int
    assert checked_int("seed", 0, least=0) == 0


@pytest.mark.parametrize("value", [0, -1, True, 1.0, "3", None, np.float32(2)])
def test_other_values_are_refused_by_name(value: Any) -> None:
    with pytest.raises(BadSize, match="invalid size="):
        checked_int("size", value)


def test_values_that_arrive_are_within_their_bounds() -> None:
    check_counts(0, None, 1 << 53)
    check_amount(0.0)
    check_names("x" * 256)
    check_length([1, 2], most=2)


@pytest.mark.parametrize("number", [-1, (1 << 53) + 1, 10**400])
def test_counts_beyond_their_bounds_are_refused_however_large(number: int) -> None:
    with pytest.raises(ValueError, match="expected an integer from 0 to"):
        check_counts(number)


@pytest.mark.parametrize("number", [-1.0, float("nan"), float("inf")])
def test_amounts_are_finite_and_not_negative(number: float) -> None:
    with pytest.raises(ValueError, match="expected a finite number"):
        check_amount(number)


def test_long_names_and_lists_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 256 characters"):
        check_names("a", "x" * 257)
    with pytest.raises(ValueError, match="at most 2 items"):
        check_length([], [1, 2, 3], most=2)
