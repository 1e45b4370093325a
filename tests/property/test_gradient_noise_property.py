from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.batch.gradient_noise import GradientNoise, estimate

SHARES = st.lists(st.integers(0, 5000), min_size=2, max_size=12).filter(lambda s: sum(b > 0 for b in s) >= 2)
VALUES = st.floats(1e-3, 1e6)


@given(SHARES, st.fractions(0, 10**6), st.fractions(0, 10**6))
def test_every_split_gives_the_true_noise_in_expectation(
    shares: list[int], variance: Fraction, signal: Fraction
) -> None:
    """The estimator is linear in the squares, so their expectations must give the truth, here in exact arithmetic.

    E|g_i|² = |G|² + S/b_i, and E|g|² = |G|² + S/B whatever the split, since g is the mean over all samples.
    """
    size = sum(shares)
    expected = [signal + variance / b if b else Fraction(10**9) for b in shares]
    seen = estimate(shares, expected, signal + variance / size)  # type: ignore[arg-type]
    assert seen is not None
    assert (seen.variance, seen.signal) == (variance, signal)


@given(SHARES, VALUES, VALUES, st.floats(1e-3, 1e3))
def test_scaled_gradients_have_the_same_noise_scale(
    shares: list[int], variance: float, signal: float, factor: float
) -> None:
    scales = []
    for by in (1.0, factor):
        noise = GradientNoise()
        for _ in range(12):
            squares = [(signal + variance / b) * by if b else 0.0 for b in shares]
            noise.observe(shares, squares, (signal + variance / sum(shares)) * by)
        scales.append(noise.scale)
    if None not in scales:
        assert scales[0] == pytest.approx(scales[1], rel=1e-3, abs=1e-3 * sum(shares))


@given(st.lists(st.tuples(st.floats(), st.floats(), st.floats()), max_size=40))
def test_no_input_breaks_the_estimate(steps: list[tuple[float, float, float]]) -> None:
    noise = GradientNoise()
    for first, second, total_sq in steps:
        noise.observe((3, 5), (first, second), total_sq)
        for value in (noise.variance, noise.signal, noise.scale, noise.floor):
            assert value is None or 0 <= value < float("inf")
