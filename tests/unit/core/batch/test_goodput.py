from __future__ import annotations

from collections.abc import Callable
from math import inf, sqrt

import pytest

from shoal.core.batch.auto_batch import AutoBatch
from shoal.core.batch.goodput import (
    LrScaling,
    best,
    candidates,
    efficiency,
    lr_gain,
    lr_scaling_for,
    progress,
)
from shoal.errors import BadSize


def cost(fixed_s: float, sample_s: float) -> Callable[[int], float]:
    return lambda size: fixed_s + sample_s * size


def test_best_batch_is_the_root_of_fixed_cost_times_noise_over_sample_cost() -> None:
    ideal = sqrt(0.1 * 1000 / 0.001)  # where B / ((a + c·B)(B_noise + B)) is largest
    choice = best(64, 64, 1000.0, cost(0.1, 0.001), (16, 8192), max_factor=inf)
    assert choice.size == pytest.approx(ideal, rel=0.1)
    assert choice.gain > 0.5


def test_one_change_is_at_most_a_factor_of_four() -> None:
    assert 100 < best(32, 64, 1000.0, cost(0.1, 0.001), (16, 8192)).size <= 128
    assert 1024 <= best(4096, 64, 1000.0, cost(0.1, 0.001), (16, 8192)).size < 1200


def test_gain_below_five_percent_changes_nothing() -> None:
    near = best(250, 64, 1000.0, cost(0.1, 0.001), (16, 8192))
    assert (near.size, near.gain) == (250, 0.0)
    assert "5%" in near.reason


def test_gain_that_does_not_repay_its_cost_changes_nothing() -> None:
    def choose(left_s: float) -> int:
        return best(128, 64, 1000.0, cost(0.1, 0.001), (16, 8192), cost_s=10.0, left_s=left_s).size

    assert choose(1000.0) > 128
    assert choose(50.0) == 128
    assert choose(0.0) == 128


def test_reason_names_the_gain_and_its_causes() -> None:
    choice = best(64, 64, 1000.0, cost(0.1, 0.001), (64, 128))
    assert choice.reason == (
        "goodput +36%: a step with 128 instead of 64 samples takes 1.39 x as long, and the noise scale is 1000"
    )


def test_batch_outside_the_bounds_is_corrected_at_once() -> None:
    choice = best(4096, 64, 1000.0, cost(0.1, 0.001), (16, 512))
    assert 200 < choice.size <= 512
    assert "not within 16…512" in choice.reason


@pytest.mark.parametrize("seconds", [lambda size: inf, lambda size: float("nan"), lambda size: 0.0])
def test_unknown_cost_changes_nothing(seconds: Callable[[int], float]) -> None:
    assert best(64, 64, 1000.0, seconds, (16, 512)).size == 64


def test_worse_sizes_on_the_way_are_not_entered() -> None:
    def seconds(size: int) -> float:
        return 10.0 if 64 < size <= 256 else 0.1

    assert best(64, 64, 1e6, seconds, (64, 4096)).size == 64


def test_candidates_are_multiples_within_the_bounds() -> None:
    sizes = candidates((10, 1000), 8)
    assert (sizes[0], sizes[-1]) == (16, 1000)
    assert all(size % 8 == 0 for size in sizes)
    assert 30 < len(sizes) <= 65
    assert candidates((5, 5)) == [5]


@pytest.mark.parametrize(("bounds", "multiple"), [((0, 5), 1), ((9, 8), 1), ((9, 15), 8)])
def test_impossible_bounds_are_refused_with_a_remedy(bounds: tuple[int, int], multiple: int) -> None:
    with pytest.raises(BadSize) as caught:
        AutoBatch(9, bounds, multiple=multiple)
    assert caught.value.do


# --- learning rates


@pytest.mark.parametrize(
    ("optimizer", "scaling"),
    [
        ("SGD", "adascale"),
        ("ASGD", "adascale"),
        ("Adam", "sqrt"),
        ("AdamW8bit", "sqrt"),
        ("RMSprop", "sqrt"),
        ("Adagrad", "sqrt"),
        ("LBFGS", "off"),
        ("MyOwn", "sqrt"),
    ],
)
def test_lr_scaling_follows_from_the_optimizer(optimizer: str, scaling: LrScaling) -> None:
    assert lr_scaling_for(optimizer) == scaling


def test_adascale_gain_matches_the_paper() -> None:
    variance, signal = 300.0, 2.0
    expected = (variance / 32 + signal) / (variance / 256 + signal)
    assert lr_gain("adascale", 256, 32, variance / signal) == pytest.approx(expected)
    assert 1 < expected < 256 / 32
    assert lr_gain("adascale", 256, 32, 0.0) == 1.0
    assert lr_gain("adascale", 256, 32, 1e12) == pytest.approx(8.0)


def test_sqrt_scaling_and_no_scaling() -> None:
    assert lr_gain("sqrt", 128, 32, 50.0) == 2.0
    assert lr_gain("off", 128, 32, 50.0) == 1.0
    assert progress("off", 128, 32, 50.0) == 1.0


@pytest.mark.parametrize("scaling", ["adascale", "sqrt"])
def test_progress_is_size_times_efficiency(scaling: LrScaling) -> None:
    assert progress(scaling, 128, 32, 50.0) == pytest.approx(4 * efficiency(128, 32, 50.0))


@pytest.mark.parametrize("scaling", ["adascale", "sqrt", "off"])
def test_base_batch_leaves_the_learning_rate_unchanged(scaling: LrScaling) -> None:
    assert lr_gain(scaling, 33, 33, 1 / 3) == progress(scaling, 33, 33, 1 / 3) == 1.0


# --- decisions
