from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import inf, sqrt

import numpy as np
import pytest

from shoal.core.batch.auto_batch import AutoBatch, BatchChange
from shoal.core.batch.goodput import (
    LrScaling,
    best,
    candidates,
    efficiency,
    lr_gain,
    lr_scaling_for,
    progress,
)
from shoal.core.batch.gradient_noise import GradientNoise
from shoal.core.data.sample_order import SampleOrder
from shoal.errors import BadSize


def cost(fixed_s: float, sample_s: float) -> Callable[[int], float]:
    return lambda size: fixed_s + sample_s * size


def told(scale: float, times: int = 20) -> GradientNoise:
    """A noise that has seen clean gradients of this scale."""
    noise = GradientNoise()
    for _ in range(times):
        noise.observe((8, 24), (1 + scale / 8, 1 + scale / 24), 1 + scale / 32)
    return noise


def lived(auto: AutoBatch, noise: GradientNoise, seconds: Callable[[int], float], steps: range) -> list[BatchChange]:
    return [d for step in steps if (d := auto.on_commit(step, noise, seconds)) is not None]


# --- the best batch


def test_the_best_batch_is_the_root_of_fixed_cost_times_noise_over_cost_of_a_sample() -> None:
    ideal = sqrt(0.1 * 1000 / 0.001)  # where B / ((a + c·B)(B_noise + B)) is largest
    choice = best(64, 64, 1000.0, cost(0.1, 0.001), (16, 8192), leap=inf)
    assert choice.size == pytest.approx(ideal, rel=0.1)
    assert choice.gain > 0.5


def test_a_change_goes_at_most_a_factor_of_four_towards_the_best() -> None:
    assert 100 < best(32, 64, 1000.0, cost(0.1, 0.001), (16, 8192)).size <= 128
    assert 1024 <= best(4096, 64, 1000.0, cost(0.1, 0.001), (16, 8192)).size < 1200


def test_a_gain_of_less_than_five_percent_changes_nothing() -> None:
    near = best(250, 64, 1000.0, cost(0.1, 0.001), (16, 8192))
    assert (near.size, near.gain) == (250, 0.0)
    assert "5%" in near.reason


def test_a_gain_that_does_not_pay_for_the_change_in_the_time_left_changes_nothing() -> None:
    def choose(left_s: float) -> int:
        return best(128, 64, 1000.0, cost(0.1, 0.001), (16, 8192), cost_s=10.0, left_s=left_s).size

    assert choose(1000.0) > 128
    assert choose(50.0) == 128
    assert choose(0.0) == 128


def test_the_reason_tells_the_gain_and_what_it_rests_on() -> None:
    choice = best(64, 64, 1000.0, cost(0.1, 0.001), (64, 128))
    assert choice.reason == (
        "goodput +36%: 128 instead of 64 samples take 1.39 x as long a step, and the noise scale is 1000"
    )


def test_a_batch_outside_of_the_bounds_is_brought_back_at_once() -> None:
    choice = best(4096, 64, 1000.0, cost(0.1, 0.001), (16, 512))
    assert 200 < choice.size <= 512
    assert "not within 16…512" in choice.reason


@pytest.mark.parametrize("seconds", [lambda size: inf, lambda size: float("nan"), lambda size: 0.0])
def test_a_cost_that_is_unknown_changes_nothing(seconds: Callable[[int], float]) -> None:
    assert best(64, 64, 1000.0, seconds, (16, 512)).size == 64


def test_a_valley_between_here_and_the_best_is_not_entered() -> None:
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
    ("optimizer", "law"),
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
def test_the_law_follows_from_the_optimizer(optimizer: str, law: LrScaling) -> None:
    assert lr_scaling_for(optimizer) == law


def test_adascale_lies_between_one_and_linear_and_is_what_the_paper_says() -> None:
    variance, signal = 300.0, 2.0
    expected = (variance / 32 + signal) / (variance / 256 + signal)
    assert lr_gain("adascale", 256, 32, variance / signal) == pytest.approx(expected)
    assert 1 < expected < 256 / 32
    assert lr_gain("adascale", 256, 32, 0.0) == 1.0
    assert lr_gain("adascale", 256, 32, 1e12) == pytest.approx(8.0)


def test_the_square_root_law_and_none() -> None:
    assert lr_gain("sqrt", 128, 32, 50.0) == 2.0
    assert lr_gain("off", 128, 32, 50.0) == 1.0
    assert progress("off", 128, 32, 50.0) == 1.0


@pytest.mark.parametrize("law", ["adascale", "sqrt"])
def test_schedules_advance_by_what_a_step_is_worth(law: LrScaling) -> None:
    assert progress(law, 128, 32, 50.0) == pytest.approx(4 * efficiency(128, 32, 50.0))


@pytest.mark.parametrize("law", ["adascale", "sqrt", "off"])
def test_the_base_batch_changes_no_bit_of_the_learning_rate(law: LrScaling) -> None:
    assert lr_gain(law, 33, 33, 1 / 3) == progress(law, 33, 33, 1 / 3) == 1.0


# --- decisions


def test_nothing_is_decided_before_the_noise_is_known() -> None:
    auto = AutoBatch(64, (16, 4096))
    assert lived(auto, told(1000.0, times=9), cost(0.1, 0.001), range(200)) == []
    assert auto.progress == 200


def test_decisions_climb_to_the_best_batch_and_stay_there() -> None:
    auto = AutoBatch(32, (16, 4096))
    made = lived(auto, told(1000.0), cost(0.1, 0.001), range(400))
    sizes = [32, *(decision.size for decision in made)]
    assert sizes == sorted(sizes)
    assert all(later <= 4 * size for size, later in pairwise(sizes))
    assert 200 < sizes[-1] < 500
    assert made[-1].step < 100


def test_a_decision_holds_only_after_what_has_been_read_ahead() -> None:
    auto = AutoBatch(32, (16, 4096), ahead=5)
    seen = ((step, auto.on_commit(step, told(1000.0), cost(0.1, 0.001))) for step in range(40))
    step, decision = next((step, decision) for step, decision in seen if decision is not None)
    assert decision.step == step + 6
    assert (auto.size_at(decision.step - 1), auto.size_at(decision.step)) == (32, decision.size)


def test_one_look_is_not_enough_and_the_next_comes_after_some_steps_with_the_new_batch() -> None:
    made = lived(AutoBatch(32, (16, 4096), every=10, ahead=5), told(1000.0), cost(0.1, 0.001), range(100))
    assert [decision.step for decision in made[:2]] == [25, 41]


def test_a_second_thought_is_weighed_as_long_as_the_first() -> None:
    auto = AutoBatch(32, (16, 4096), every=10, ahead=1)
    made = lived(auto, told(1000.0), cost(0.1, 0.001), range(20))
    assert len(made) == 1
    back = lived(auto, told(0.0), cost(0.0, 0.001), range(20, 80))
    assert back[0].step - made[0].step >= 20


def test_a_noise_that_is_measured_badly_does_not_make_the_batch_swing() -> None:
    chance = np.random.default_rng(3)
    auto = AutoBatch(320, (16, 4096), every=1)
    made = [
        auto.on_commit(step, told(1000.0 * float(chance.lognormal(0, 0.3)), times=12), cost(0.1, 0.001))
        for step in range(200)
    ]
    assert sum(decision is not None for decision in made) <= 2


def test_a_noise_of_which_only_the_floor_is_known_may_let_the_batch_grow_but_never_shrink() -> None:
    class Lost(GradientNoise):
        scale = None  # type: ignore[assignment]
        floor = 1000.0  # type: ignore[assignment]

    grown = lived(AutoBatch(32, (16, 4096)), Lost(), cost(0.1, 0.001), range(300))
    assert grown
    assert lived(AutoBatch(4096, (16, 4096)), Lost(), cost(0.1, 0.001), range(300)) == []


def test_costs_that_were_seen_at_one_size_only_are_learned_by_another() -> None:
    auto = AutoBatch(64, (16, 4096))
    probe = auto.on_commit(50, told(1000.0), cost(0.0, 0.001), costs_known=False)
    assert probe is not None
    assert (probe.size, probe.step) == (128, 53)
    made = [auto.on_commit(step, told(1000.0), cost(0.0, 0.001), costs_known=False) for step in range(51, 300)]
    assert sum(decision is not None for decision in made) == 1


@pytest.mark.parametrize(
    ("scale", "bounds", "size"), [(10.0, (16, 4096), 32), (10.0, (64, 96), 96), (99.0, (32, 64), 32)]
)
def test_a_probe_goes_where_it_is_likely_to_pay(scale: float, bounds: tuple[int, int], size: int) -> None:
    probe = AutoBatch(64, bounds).on_commit(50, told(scale), cost(0.0, 0.001), costs_known=False)
    assert probe is not None
    assert probe.size == size


def test_without_room_there_is_no_probe() -> None:
    assert AutoBatch(64, (64, 64)).on_commit(50, told(9.0), cost(0.0, 0.001), costs_known=False) is None


def test_a_cap_that_falls_below_the_batch_shrinks_it_at_once_but_not_below_the_bound() -> None:
    auto = AutoBatch(512, (64, 4096))
    decision = auto.on_commit(50, told(1e5), cost(0.1, 0.0), cap=256)
    assert decision is not None
    assert decision.size == 256
    low = AutoBatch(512, (64, 4096)).on_commit(50, told(1e5), cost(0.1, 0.0), cap=1)
    assert low is not None
    assert low.size == 64


def test_a_base_outside_of_the_bounds_starts_at_the_nearest() -> None:
    assert AutoBatch(8, (16, 64)).size_at(0) == 16
    assert AutoBatch(100, (16, 64)).size_at(0) == 64


@pytest.mark.parametrize("name", ["base", "every", "ahead", "patience"])
def test_counts_that_are_not_positive_are_refused(name: str) -> None:
    with pytest.raises(BadSize):
        AutoBatch(**({"base": 8, "bounds": (1, 64)} | {name: 0}))  # type: ignore[arg-type]


def test_a_joiner_with_the_state_makes_the_same_decisions() -> None:
    for parting in range(0, 60, 7):
        veteran, noise = AutoBatch(32, (16, 4096)), told(1000.0)
        lived(veteran, noise, cost(0.1, 0.001), range(parting))
        joiner = AutoBatch(32, (16, 4096))
        joiner.load_state_dict(json.loads(json.dumps(veteran.state_dict())))
        rest = range(parting, 200)
        assert lived(joiner, noise, cost(0.1, 0.001), rest) == lived(veteran, noise, cost(0.1, 0.001), rest)
        assert joiner.state_dict() == veteran.state_dict()


# --- a whole training


@dataclass(frozen=True)
class Bowl:
    """A quadratic loss that is trained by SGD on noisy gradients, on members of speeds 8:4:2:1, in virtual time."""

    fixed_s: float
    sample_s: float
    variance: float
    rate: float
    width: int = 64
    base: int = 32
    fall: float = 0.05

    def train(self, size: int | None, seed: int = 0) -> float:
        """Seconds until the loss has fallen to a twentieth, with a fixed batch, or with the best for None."""
        chance = np.random.default_rng(seed)
        curvature, place = np.geomspace(0.05, 1.0, self.width), np.ones(self.width)
        bounds = (8, 4096) if size is None else (size, size)
        auto, noise, order = (
            AutoBatch(self.base, bounds),
            GradientNoise(),
            SampleOrder(10**9, bounds[0] if size else self.base),
        )
        start, taken_s = (curvature * place**2).sum(), 0.0
        for step in range(20_000):
            shares = np.array([8, 4, 2, 1]) * order.size_of(step) / 15
            sigma = np.sqrt(self.variance / self.width / shares)[:, None]
            gradients = curvature * place + sigma * chance.normal(size=(4, self.width))
            whole = shares @ gradients / shares.sum()
            place = place - self.rate * auto.lr_gain_at(step) * whole
            taken_s += self.seconds(order.size_of(step))
            noise.observe(shares.tolist(), (gradients**2).sum(axis=1).tolist(), float(whole @ whole))
            decision = auto.on_commit(step, noise, self.seconds)
            if decision is not None:
                order = order.change_size(decision.step, decision.size)
            if (curvature * place**2).sum() < self.fall * start:
                return taken_s
        return inf

    def seconds(self, size: int) -> float:
        return self.fixed_s + self.sample_s * size

    def sweep(self) -> Iterator[float]:
        return (self.train(size) for size in (8, 16, 32, 64, 128, 256, 512, 1024))


@pytest.mark.parametrize(
    "bowl",
    [
        Bowl(fixed_s=0.05, sample_s=0.0005, variance=400.0, rate=0.02),
        Bowl(fixed_s=0.05, sample_s=0.0005, variance=4000.0, rate=0.005),
        Bowl(fixed_s=0.005, sample_s=0.001, variance=400.0, rate=0.02),
        Bowl(fixed_s=0.2, sample_s=0.0002, variance=100.0, rate=0.02),
    ],
)
def test_auto_reaches_the_target_within_a_tenth_of_the_best_fixed_batch(bowl: Bowl) -> None:
    assert bowl.train(None) <= 1.10 * min(bowl.sweep())
