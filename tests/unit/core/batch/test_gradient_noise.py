from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from shoal.core.batch.gradient_noise import GradientNoise, estimate

VARIANCE, SIGNAL, WIDTH = 200.0, 1.0, 200
Step = tuple[list[float], float]


def steps(shares: Sequence[float], count: int, seed: int = 0, signal: float = SIGNAL) -> Iterator[Step]:
    """Yield squared norms of synthetic gradients: a true gradient plus noise of variance 200 per sample."""
    chance = np.random.default_rng(seed)
    truth = chance.normal(size=WIDTH)
    truth *= np.sqrt(signal / (truth @ truth))
    spread = chance.uniform(0.2, 1.0, size=WIDTH)
    spread *= np.sqrt(VARIANCE / (spread @ spread))
    weights = np.array([share / sum(shares) for share in shares])
    sigma = np.array([share**-0.5 if share else 0.0 for share in shares])[:, None]
    for _ in range(count):
        gradients = truth + chance.normal(size=(len(shares), WIDTH)) * spread * sigma
        whole = weights @ gradients
        yield (gradients**2).sum(axis=1).tolist(), float(whole @ whole)


def observed_noise(
    shares: Sequence[float], count: int, noise: GradientNoise | None = None, **options: float
) -> GradientNoise:
    noise = noise or GradientNoise(memory=1 - 1e-9)
    for squares, total_sq in steps(shares, count, **options):  # type: ignore[arg-type]
        noise.observe(shares, squares, total_sq)
    return noise


@pytest.mark.parametrize(
    "shares", [(4, 8, 16, 32, 68), (4, 68), (2, 2, 34), (17, 17, 17, 1), (64, 64), (3, 0, 51, 0, 20)]
)
def test_noise_scale_is_within_two_percent_for_very_unequal_shares(shares: tuple[int, ...]) -> None:
    noise = observed_noise(shares, 12_000)
    assert noise.variance == pytest.approx(VARIANCE, rel=0.02)
    assert noise.signal == pytest.approx(SIGNAL, rel=0.02)
    assert noise.scale == pytest.approx(VARIANCE / SIGNAL, rel=0.02)


def test_formula_for_equal_shares_is_far_off() -> None:
    """Check that the test above could fail: AdaptDL's estimate on the same gradients is wrong."""
    shares = (4, 8, 16, 32, 68)
    size, count = sum(shares), len(shares)
    small = size / count
    guesses = [(np.mean(squares) - total_sq) / (1 / small - 1 / size) for squares, total_sq in steps(shares, 2000)]
    assert np.mean(guesses) > 2 * VARIANCE


def test_different_splits_give_the_same_scale() -> None:
    noise = GradientNoise(memory=1 - 1e-9)
    for shares in ((100, 6), (5, 60, 41), (30,) * 4):
        observed_noise(shares, 4000, noise)
    assert noise.scale == pytest.approx(VARIANCE / SIGNAL, rel=0.03)


def test_single_share_is_ignored() -> None:
    noise = GradientNoise()
    for _ in range(50):
        noise.observe([32], [2.0], 2.0)
        noise.observe([32, 0], [2.0, 7.0], 2.0)
    assert (noise.observations, noise.scale, noise.floor) == (0, None, None)


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), 1e300])
def test_overflowed_step_is_ignored(broken: float) -> None:
    noise = observed_noise((8, 24), 50)
    before = noise.state_dict()
    noise.observe((8, 24), [broken, 1.0], 1.0)
    noise.observe((8, 24), [1.0, 1.0], broken)
    assert noise.state_dict() == before


def test_scale_is_unknown_before_enough_steps() -> None:
    noise = GradientNoise()
    for number, (squares, total_sq) in enumerate(steps((64, 64), 60)):
        if number < 10:
            assert noise.scale is None
        noise.observe((64, 64), squares, total_sq)
    assert noise.scale == pytest.approx(200, rel=0.3)


def test_lost_signal_gives_a_floor_and_no_scale() -> None:
    noise = GradientNoise()
    observed_noise((2, 6), 300, noise, signal=1e-4)
    assert noise.scale is None
    assert noise.floor is not None
    assert 8 < noise.floor < VARIANCE / 1e-4


def test_uncertain_scale_is_not_reported() -> None:
    noise = GradientNoise()
    for signal in (4.0, -3.9) * 20:
        noise.observe((8, 24), (signal + 9000 / 8, signal + 9000 / 24), signal + 9000 / 32)
    assert noise.signal > 0
    assert noise.scale is None


def test_gradient_without_noise_has_scale_zero() -> None:
    noise = GradientNoise()
    for _ in range(20):
        noise.observe((8, 24), (4.0, 4.0), 4.0)
    assert noise.scale == noise.floor == 0.0


def test_scale_follows_a_fading_signal() -> None:
    noise = GradientNoise()
    observed_noise((64, 192), 200, noise)
    observed_noise((64, 192), 400, noise, signal=0.1)
    assert noise.scale == pytest.approx(2000, rel=0.4)


def test_outlier_is_ignored() -> None:
    noise = observed_noise((64, 192), 60, GradientNoise())
    before = noise.scale
    noise.observe((64, 192), (1e9, 1e12), 1e11)
    assert noise.scale == before


def test_lasting_growth_of_gradients_is_followed() -> None:
    noise = observed_noise((64, 192), 60, GradientNoise())
    for squares, total_sq in steps((64, 192), 300, signal=0.1):
        noise.observe((64, 192), [1e6 * square for square in squares], 1e6 * total_sq)
    assert noise.scale == pytest.approx(10 * VARIANCE / SIGNAL, rel=0.4)


def test_huge_first_gradients_are_forgotten_within_a_hundred_steps() -> None:
    noise = GradientNoise()
    for _ in range(3):
        noise.observe((64, 192), (1e12, 3e12), 1e12)
    observed_noise((64, 192), 100, noise)
    assert noise.scale == pytest.approx(VARIANCE / SIGNAL, rel=0.4)


def test_many_shares_estimate_the_variance_better_than_two() -> None:
    noise = GradientNoise(memory=1 - 1e-12)
    noise.observe([1] * 11, [10.0] + [1.0] * 10, 1.0)
    noise.observe([1] * 2, [1.0, 1.0], 1.0)
    assert noise.variance == pytest.approx((10 * 0.9 + 1 * 0.0) / 11)


def test_token_weights_give_the_scale_in_samples() -> None:
    counted, weighed = GradientNoise(), GradientNoise()
    for squares, total_sq in steps((64, 192), 50):
        counted.observe((64, 192), squares, total_sq)
        weighed.observe((6400.0, 19200.0), squares, total_sq, samples=256)
    assert weighed.scale == pytest.approx(counted.scale)


def test_joiner_with_the_state_continues_bit_for_bit() -> None:
    veteran, joiner = observed_noise((5, 11), 40), GradientNoise(memory=1 - 1e-9)
    joiner.load_state_dict(json.loads(json.dumps(veteran.state_dict())))
    observed_noise((5, 11), 20, veteran, seed=9)
    observed_noise((5, 11), 20, joiner, seed=9)
    assert joiner.state_dict() == veteran.state_dict()
    assert joiner.scale == veteran.scale


def test_estimate_matches_a_calculation_by_hand() -> None:
    sample = estimate([1, 3], [5.0, 2.0], 2.0)
    assert sample is not None
    assert (sample.variance, sample.signal) == (3.0, 1.25)


def test_squares_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match="2 shares, 1 squared norms"):
        estimate([1, 2], [1.0], 1.0)


@pytest.mark.parametrize("memory", [0.0, 1.0, -1.0])
def test_memory_outside_zero_to_one_is_refused(memory: float) -> None:
    with pytest.raises(ValueError, match="memory"):
        GradientNoise(memory)
