"""The best shares for emulated machines."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.testing.emulated_speeds import best_shares, machines, step_s

SPEEDS = st.floats(0.001, 1)


@given(st.lists(SPEEDS, min_size=1, max_size=3), st.integers(0, 12), st.floats(0, 0.1))
def test_no_split_is_faster_than_the_best_shares(speeds: list[float], size: int, fixed_s: float) -> None:
    text = machines(*speeds, sample_s=0.002, fixed_s=fixed_s)
    best = best_shares(text, size, len(speeds))
    assert sum(best) == size
    every = [split for split in product(range(size + 1), repeat=len(speeds)) if sum(split) == size]
    assert step_s(text, best) == min(step_s(text, split) for split in every)


def test_best_shares_follow_the_schedule() -> None:
    text = machines(1, "1:0.25@10", sample_s=0.002)
    assert best_shares(text, 60, 2, step=9) == (30, 30)
    assert best_shares(text, 60, 2, step=10) == (48, 12)


def test_best_shares_of_stretched_work_are_unknown() -> None:
    with pytest.raises(ValueError, match="sample_s"):
        best_shares("1,0.5", 60, 2)
