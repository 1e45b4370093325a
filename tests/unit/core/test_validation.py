"""Validation of integer arguments."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shoal.core.validation import checked_int
from shoal.errors import BadSize


def test_integers_of_any_kind_become_int() -> None:
    assert type(checked_int("size", np.int64(3))) is int
    assert checked_int("seed", 0, least=0) == 0


@pytest.mark.parametrize("value", [0, -1, True, 1.0, "3", None, np.float32(2)])
def test_other_values_are_refused_by_name(value: Any) -> None:
    with pytest.raises(BadSize, match="invalid size="):
        checked_int("size", value)
