from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from shoal.core.batch.gradient_noise import GradientNoise, estimate

VARIANCE, SIGNAL, WIDTH = 200.0, 1.0, 200
Step = tuple[list[float], float]


def steps(shares: Sequence[float], count: int, seed: int = 0, signal: float = SIGNAL) -> Iterator[Step]:
    """Squared norms of synthetic gradients: a true gradient, and noise of total variance 200 for a single sample."""
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


def watched(shares: Sequence[float], count: int, noise: GradientNoise | None = None, **options: float) -> GradientNoise:
    noise = noise or GradientNoise(memory=1 - 1e-9)
    for squares, total_sq in steps(shares, count, **options):  # type: ignore[arg-type]
        noise.observe(shares, squares, total_sq)
    return noise


@pytest.mark.parametrize(
    "shares", [(4, 8, 16, 32, 68), (4, 68), (2, 2, 34), (17, 17, 17, 1), (64, 64), (3, 0, 51, 0, 20)]
)
def test_the_noise_scale_is_within_two_percent_at_a_spread_of_17_to_1(shares: tuple[int, ...]) -> None:
    noise = watched(shares, 12_000)
    assert noise.variance == pytest.approx(VARIANCE, rel=0.02)
    assert noise.signal == pytest.approx(SIGNAL, rel=0.02)
    assert noise.scale == pytest.approx(VARIANCE / SIGNAL, rel=0.02)


def test_the_formula_for_equal_shares_would_be_far_off_here() -> None:
    """What the test above must be able to catch: AdaptDL's estimate, on the same gradients."""
    shares = (4, 8, 16, 32, 68)
    size, count = sum(shares), len(shares)
    small = size / count
    guesses = [(np.mean(squares) - total_sq) / (1 / small - 1 / size) for squares, total_sq in steps(shares, 2000)]
    assert np.mean(guesses) > 2 * VARIANCE


def test_what_is_learned_from_different_splits_agrees() -> None:
    noise = GradientNoise(memory=1 - 1e-9)
    for shares in ((100, 6), (5, 60, 41), (30,) * 4):
        watched(shares, 4000, noise)
    assert noise.scale == pytest.approx(VARIANCE / SIGNAL, rel=0.03)


def test_one_share_says_nothing() -> None:
    noise = GradientNoise()
    for _ in range(50):
        noise.observe([32], [2.0], 2.0)
        noise.observe([32, 0], [2.0, 7.0], 2.0)
    assert (noise.observations, noise.scale, noise.floor) == (0, None, None)


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), 1e300])
def test_a_step_that_overflowed_is_ignored(broken: float) -> None:
    noise = watched((8, 24), 50)
    before = noise.state_dict()
    noise.observe((8, 24), [broken, 1.0], 1.0)
    noise.observe((8, 24), [1.0, 1.0], broken)
    assert noise.state_dict() == before


def test_the_scale_is_unknown_until_enough_steps_were_seen() -> None:
    noise = GradientNoise()
    for number, (squares, total_sq) in enumerate(steps((64, 64), 60)):
        if number < 10:
            assert noise.scale is None
        noise.observe((64, 64), squares, total_sq)
    assert noise.scale == pytest.approx(200, rel=0.3)


def test_a_signal_lost_in_the_noise_gives_a_floor_and_no_scale() -> None:
    noise = GradientNoise()
    watched((2, 6), 300, noise, signal=1e-4)
    assert noise.scale is None
    assert noise.floor is not None
    assert 8 < noise.floor < VARIANCE / 1e-4


def test_a_scale_of_which_the_error_is_large_is_not_told() -> None:
    noise = GradientNoise()
    for signal in (4.0, -3.9) * 20:
        noise.observe((8, 24), (signal + 9000 / 8, signal + 9000 / 24), signal + 9000 / 32)
    assert noise.signal > 0
    assert noise.scale is None


def test_a_gradient_without_noise_has_a_scale_of_zero() -> None:
    noise = GradientNoise()
    for _ in range(20):
        noise.observe((8, 24), (4.0, 4.0), 4.0)
    assert noise.scale == noise.floor == 0.0


def test_the_scale_follows_a_signal_that_fades() -> None:
    noise = GradientNoise()
    watched((64, 192), 200, noise)
    watched((64, 192), 400, noise, signal=0.1)
    assert noise.scale == pytest.approx(2000, rel=0.4)


def test_an_accident_is_not_taken_for_a_gradient() -> None:
    noise = watched((64, 192), 60, GradientNoise())
    before = noise.scale
    noise.observe((64, 192), (1e9, 1e12), 1e11)
    assert noise.scale == before


def test_gradients_that_have_grown_for_good_are_followed() -> None:
    noise = watched((64, 192), 60, GradientNoise())
    for squares, total_sq in steps((64, 192), 300, signal=0.1):
        noise.observe((64, 192), [1e6 * square for square in squares], 1e6 * total_sq)
    assert noise.scale == pytest.approx(10 * VARIANCE / SIGNAL, rel=0.4)


def test_the_huge_gradients_of_the_first_steps_are_forgotten_within_a_hundred() -> None:
    noise = GradientNoise()
    for _ in range(3):
        noise.observe((64, 192), (1e12, 3e12), 1e12)
    watched((64, 192), 100, noise)
    assert noise.scale == pytest.approx(VARIANCE / SIGNAL, rel=0.4)


def test_many_shares_say_more_about_the_variance_than_two() -> None:
    noise = GradientNoise(memory=1 - 1e-12)
    noise.observe([1] * 11, [10.0] + [1.0] * 10, 1.0)
    noise.observe([1] * 2, [1.0, 1.0], 1.0)
    assert noise.variance == pytest.approx((10 * 0.9 + 1 * 0.0) / 11)


def test_weights_of_tokens_give_the_scale_in_samples_all_the_same() -> None:
    counted, weighed = GradientNoise(), GradientNoise()
    for squares, total_sq in steps((64, 192), 50):
        counted.observe((64, 192), squares, total_sq)
        weighed.observe((6400.0, 19200.0), squares, total_sq, samples=256)
    assert weighed.scale == pytest.approx(counted.scale)


def test_a_joiner_that_is_given_the_state_goes_on_bit_for_bit() -> None:
    veteran, joiner = watched((5, 11), 40), GradientNoise(memory=1 - 1e-9)
    joiner.load_state_dict(json.loads(json.dumps(veteran.state_dict())))
    watched((5, 11), 20, veteran, seed=9)
    watched((5, 11), 20, joiner, seed=9)
    assert joiner.state_dict() == veteran.state_dict()
    assert joiner.scale == veteran.scale


def test_an_estimate_by_hand() -> None:
    seen = estimate([1, 3], [5.0, 2.0], 2.0)
    assert seen is not None
    assert (seen.variance, seen.signal) == (3.0, 1.25)


def test_squares_that_do_not_fit_the_shares_are_refused() -> None:
    with pytest.raises(ValueError, match="2 shares, 1 squared norms"):
        estimate([1, 2], [1.0], 1.0)


@pytest.mark.parametrize("memory", [0.0, 1.0, -1.0])
def test_a_memory_outside_of_zero_to_one_is_refused(memory: float) -> None:
    with pytest.raises(ValueError, match="memory"):
        GradientNoise(memory)
