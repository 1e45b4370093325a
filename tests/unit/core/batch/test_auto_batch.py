from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import inf

import numpy as np
import pytest

from shoal.core.batch.auto_batch import AutoBatch, BatchChange
from shoal.core.batch.goodput import lr_gain, progress
from shoal.core.batch.gradient_noise import GradientNoise
from shoal.core.data.sample_order import SampleOrder
from shoal.errors import BadSize


def cost(fixed_s: float, sample_s: float) -> Callable[[int], float]:
    return lambda size: fixed_s + sample_s * size


def noise_of(scale: float, times: int = 20) -> GradientNoise:
    """Return a gradient noise that observed clean gradients of this scale."""
    noise = GradientNoise()
    for _ in range(times):
        noise.observe((8, 24), (1 + scale / 8, 1 + scale / 24), 1 + scale / 32)
    return noise


def run_steps(
    auto: AutoBatch, noise: GradientNoise, seconds: Callable[[int], float], steps: range
) -> list[BatchChange]:
    return [d for step in steps if (d := auto.on_commit(step, auto.size_at(step), noise, seconds)) is not None]


# --- the best batch


def test_nothing_changes_before_the_noise_is_known() -> None:
    auto = AutoBatch(64, (16, 4096))
    assert run_steps(auto, noise_of(1000.0, times=9), cost(0.1, 0.001), range(200)) == []
    assert auto.progress == 200


def test_batch_climbs_to_the_best_size_and_stays() -> None:
    auto = AutoBatch(32, (16, 4096))
    changes = run_steps(auto, noise_of(1000.0), cost(0.1, 0.001), range(400))
    sizes = [32, *(decision.size for decision in changes)]
    assert sizes == sorted(sizes)
    assert all(later <= 4 * size for size, later in pairwise(sizes))
    assert 200 < sizes[-1] < 500
    assert changes[-1].step < 100


def test_change_holds_after_the_steps_read_ahead() -> None:
    auto = AutoBatch(32, (16, 4096), ahead=5)
    seen = ((step, auto.on_commit(step, auto.size_at(step), noise_of(1000.0), cost(0.1, 0.001))) for step in range(40))
    step, decision = next((step, decision) for step, decision in seen if decision is not None)
    assert decision.step == step + 6
    assert (auto.size_at(decision.step - 1), auto.size_at(decision.step)) == (32, decision.size)


def test_two_looks_are_needed_and_counted_from_the_last_change() -> None:
    changes = run_steps(AutoBatch(32, (16, 4096), every=10, ahead=5), noise_of(1000.0), cost(0.1, 0.001), range(100))
    assert [decision.step for decision in changes[:2]] == [25, 41]


def test_reversal_needs_as_many_looks() -> None:
    auto = AutoBatch(32, (16, 4096), every=10, ahead=1)
    changes = run_steps(auto, noise_of(1000.0), cost(0.1, 0.001), range(20))
    assert len(changes) == 1
    back = run_steps(auto, noise_of(0.0), cost(0.0, 0.001), range(20, 80))
    assert back[0].step - changes[0].step >= 20


def test_noisy_scale_does_not_make_the_batch_oscillate() -> None:
    chance = np.random.default_rng(3)
    auto = AutoBatch(320, (16, 4096), every=1)
    changes = [
        auto.on_commit(
            step, auto.size_at(step), noise_of(1000.0 * float(chance.lognormal(0, 0.3)), times=12), cost(0.1, 0.001)
        )
        for step in range(200)
    ]
    assert sum(decision is not None for decision in changes) <= 2


def test_floor_of_the_scale_lets_the_batch_grow_but_not_shrink() -> None:
    class Lost(GradientNoise):
        scale = None  # type: ignore[assignment]
        floor = 1000.0  # type: ignore[assignment]

    grown = run_steps(AutoBatch(32, (16, 4096)), Lost(), cost(0.1, 0.001), range(300))
    assert grown
    assert run_steps(AutoBatch(4096, (16, 4096)), Lost(), cost(0.1, 0.001), range(300)) == []


def test_unknown_costs_are_probed_with_another_size() -> None:
    auto = AutoBatch(64, (16, 4096))
    probe = auto.on_commit(50, auto.size_at(50), noise_of(1000.0), cost(0.0, 0.001), costs_known=False)
    assert probe is not None
    assert (probe.size, probe.step) == (128, 53)
    changes = [
        auto.on_commit(step, auto.size_at(step), noise_of(1000.0), cost(0.0, 0.001), costs_known=False)
        for step in range(51, 300)
    ]
    assert sum(decision is not None for decision in changes) == 1


@pytest.mark.parametrize(
    ("scale", "bounds", "size"), [(10.0, (16, 4096), 32), (10.0, (64, 96), 96), (99.0, (32, 64), 32)]
)
def test_probe_prefers_the_direction_of_the_noise_scale(scale: float, bounds: tuple[int, int], size: int) -> None:
    probe = AutoBatch(64, bounds).on_commit(50, 64, noise_of(scale), cost(0.0, 0.001), costs_known=False)
    assert probe is not None
    assert probe.size == size


def test_equal_bounds_allow_no_probe() -> None:
    assert AutoBatch(64, (64, 64)).on_commit(50, 64, noise_of(9.0), cost(0.0, 0.001), costs_known=False) is None


def test_cap_below_the_batch_shrinks_it_at_once_down_to_the_bound() -> None:
    auto = AutoBatch(512, (64, 4096))
    decision = auto.on_commit(50, auto.size_at(50), noise_of(1e5), cost(0.1, 0.0), cap=256)
    assert decision is not None
    assert decision.size == 256
    low = AutoBatch(512, (64, 4096)).on_commit(50, 512, noise_of(1e5), cost(0.1, 0.0), cap=1)
    assert low is not None
    assert low.size == 64


def test_base_outside_the_bounds_starts_at_the_nearest() -> None:
    assert AutoBatch(8, (16, 64)).size_at(0) == 16
    assert AutoBatch(100, (16, 64)).size_at(0) == 64


@pytest.mark.parametrize("name", ["base", "every", "ahead", "confirmations"])
def test_counts_that_are_not_positive_are_refused(name: str) -> None:
    with pytest.raises(BadSize):
        AutoBatch(**({"base": 8, "bounds": (1, 64)} | {name: 0}))  # type: ignore[arg-type]


def test_joiner_with_the_state_decides_alike() -> None:
    for parting in range(0, 60, 7):
        veteran, noise = AutoBatch(32, (16, 4096)), noise_of(1000.0)
        run_steps(veteran, noise, cost(0.1, 0.001), range(parting))
        joiner = AutoBatch(32, (16, 4096))
        joiner.load_state_dict(json.loads(json.dumps(veteran.state_dict())))
        rest = range(parting, 200)
        assert run_steps(joiner, noise, cost(0.1, 0.001), rest) == run_steps(veteran, noise, cost(0.1, 0.001), rest)
        assert joiner.state_dict() == veteran.state_dict()


# --- a whole training


@dataclass(frozen=True)
class Bowl:
    """Quadratic loss trained by SGD on noisy gradients, by members of speeds 8:4:2:1, in virtual time."""

    fixed_s: float
    sample_s: float
    variance: float
    rate: float
    width: int = 64
    base: int = 32
    fall: float = 0.05

    def train(self, size: int | None, seed: int = 0) -> float:
        """Return the seconds until the loss is a twentieth, with a fixed batch, or an automatic one for None."""
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
            place = place - self.rate * auto.lr_gain_at(step, auto.size_at(step)) * whole
            taken_s += self.seconds(order.size_of(step))
            noise.observe(shares.tolist(), (gradients**2).sum(axis=1).tolist(), float(whole @ whole))
            decision = auto.on_commit(step, auto.size_at(step), noise, self.seconds)
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
def test_auto_batch_is_within_ten_percent_of_the_best_fixed_batch(bowl: Bowl) -> None:
    assert bowl.train(None) <= 1.10 * min(bowl.sweep())


def test_short_last_batch_has_the_gain_and_the_progress_of_its_own_size() -> None:
    auto = AutoBatch(32, (32, 256))
    auto.load_state_dict(auto.state_dict() | {"size": 256, "scale": 100.0})
    assert auto.lr_gain_at(0, 256) == lr_gain("adascale", 256, 32, 100.0) > 2
    assert auto.lr_gain_at(0, 55) == lr_gain("adascale", 55, 32, 100.0)
    assert auto.lr_gain_at(0, 1) < 0.1
    auto.on_commit(0, 55, noise_of(100.0), cost(0.1, 0.001))
    assert auto.progress == progress("adascale", 55, 32, 100.0)


def test_short_last_batch_of_the_script_s_own_size_is_a_step_as_without_auto() -> None:
    auto = AutoBatch(32, (32, 256))
    assert auto.lr_gain_at(0, 5) == 1.0
    auto.on_commit(0, 5, noise_of(100.0), cost(0.1, 0.001))
    assert auto.progress == 1.0
