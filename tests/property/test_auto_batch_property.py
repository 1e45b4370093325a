from __future__ import annotations

import json
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from shoal.core.batch.auto_batch import AutoBatch, BatchChange
from shoal.core.batch.goodput import candidates, lr_gain, progress
from shoal.core.batch.gradient_noise import GradientNoise
from shoal.core.data.sample_order import SampleOrder

SQUARES = st.floats(0, 1e6) | st.sampled_from([float("nan"), float("inf")])
STEPS = st.lists(
    st.tuples(SQUARES, SQUARES, SQUARES, st.booleans(), st.none() | st.integers(1, 2000)), min_size=1, max_size=80
)


@st.composite
def settings(draw: st.DrawFn) -> tuple[int, tuple[int, int], int]:
    multiple = draw(st.sampled_from([1, 1, 8]))
    low = multiple * draw(st.integers(1, 20))
    return draw(st.integers(1, 500)), (low, low + draw(st.integers(0, 1000))), multiple


@given(settings(), STEPS, st.floats(0, 1), st.floats(1e-6, 1))
def test_equal_figures_give_equal_decisions_within_the_bounds(
    given_settings: tuple[int, tuple[int, int], int],
    steps: list[tuple[float, float, float, bool, int | None]],
    fixed_s: float,
    sample_s: float,
) -> None:
    base, bounds, multiple = given_settings
    autos = [AutoBatch(base, bounds, multiple=multiple, every=2, ahead=1) for _ in range(2)]
    noises = [GradientNoise(), GradientNoise()]
    order = SampleOrder(100_000, autos[0].size_at(0))
    made: list[BatchChange] = []
    for step, (first, second, total_sq, sure, cap) in enumerate(steps):
        decisions = []
        for auto, noise in zip(autos, noises, strict=True):
            noise.observe((3, 5), (first, second), total_sq)
            decisions.append(
                auto.on_commit(
                    step, auto.size_at(step), noise, lambda size: fixed_s + sample_s * size, costs_known=sure, cap=cap
                )
            )
        assert decisions[0] == decisions[1]
        if decisions[0] is not None:
            made.append(decisions[0])
            order = order.change_size(decisions[0].step, decisions[0].size)
        # The second member is lost and comes back with the state of the first.
        autos[1] = AutoBatch(base, bounds, multiple=multiple, every=2, ahead=1)
        autos[1].load_state_dict(json.loads(json.dumps(autos[0].state_dict())))
        assert order.size_of(step + 1) == autos[0].size_at(step + 1)
        assert bounds[0] <= autos[0].size_at(step + 1) <= bounds[1]
    assert all(later.step > earlier.step + 2 for earlier, later in pairwise(made))
    assert all(decision.size % multiple == 0 and decision.reason for decision in made)


@given(st.integers(1, 10**6), st.integers(0, 10**6), st.integers(1, 64))
def test_candidates_lie_within_the_bounds_without_wide_gaps(low: int, more: int, multiple: int) -> None:
    low, high = low * multiple, (low + more) * multiple
    sizes = candidates((low, high), multiple)
    assert (sizes[0], sizes[-1]) == (low, high)
    assert sizes == sorted(set(sizes))
    assert all(size % multiple == 0 for size in sizes)
    assert len(sizes) <= 65
    assert all(later <= 1.35 * size + 2 * multiple for size, later in pairwise(sizes))


@given(st.integers(1, 10**5), st.integers(1, 10**5), st.floats(0, 1e9))
def test_gain_of_a_larger_batch_is_between_one_and_its_factor(base: int, more: int, scale: float) -> None:
    size = base + more
    for scaling in ("adascale", "sqrt", "off"):
        for value in (lr_gain(scaling, size, base, scale), progress(scaling, size, base, scale)):
            assert value * (1 + 1e-9) >= 1
            assert value <= size / base * (1 + 1e-9)
