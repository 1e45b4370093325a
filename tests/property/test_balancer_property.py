from __future__ import annotations

import json
import math
from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.shares import machines
from shoal.core.shares.balancer import ShareBalancer, ShareSettings, StepMeasurement
from shoal.core.shares.cost_curve import CostCurve, linear
from shoal.core.shares.split import by_cost, by_weight, without_singles

COSTS = st.builds(linear, st.floats(0, 10), st.floats(1e-6, 10), st.none() | st.integers(1, 50))
BENT = st.builds(
    lambda first, steps, slope: CostCurve(
        tuple(float(10 * k) for k in range(len(steps) + 1)),
        tuple(first + math.fsum(steps[:k]) for k in range(len(steps) + 1)),
        slope,
    ),
    st.floats(0, 1),
    st.lists(st.floats(0, 3), min_size=1, max_size=5),
    st.floats(1e-4, 1),
)


@given(st.lists(COSTS | BENT, min_size=1, max_size=8), st.integers(0, 3000), st.data())
def test_sum_is_exact_and_bounds_hold(costs: list[CostCurve], size: int, data: st.DataObject) -> None:
    highs = data.draw(st.lists(st.integers(0, 2000), min_size=len(costs), max_size=len(costs)))
    lows = [data.draw(st.integers(0, high)) for high in highs]
    highs[0] += max(0, size - sum(highs))
    for shares in (by_cost(size, costs, lows, highs), by_weight(size, [3] * len(costs), lows, highs)):
        assert sum(shares) == size
        assert all(share <= high for share, high in zip(shares, highs, strict=True))
        if sum(lows) <= size:
            assert all(share >= low for share, low in zip(shares, lows, strict=True))


@given(st.lists(COSTS | BENT, min_size=2, max_size=3), st.integers(1, 12))
def test_no_other_split_is_faster(costs: list[CostCurve], size: int) -> None:
    shares = by_cost(size, costs, [0] * len(costs), [size] * len(costs))

    def seconds(shares: tuple[int, ...]) -> float:
        return max(cost.seconds(share) for cost, share in zip(costs, shares, strict=True))

    best = min(seconds(split) for split in product(range(size + 1), repeat=len(costs)) if sum(split) == size)
    assert seconds(shares) <= best * (1 + 1e-6) + 1e-12


ODD = st.sampled_from([0.0, -1.0, math.inf, math.nan, 1e-300, 1e300, 1e6])
SETTINGS = st.builds(
    ShareSettings,
    policy=st.sampled_from(["model", "ratio", "equal"]),
    window=st.integers(1, 12),
    threshold=st.floats(0, 0.5),
    min=st.sampled_from([0.0, 1.0, 0.01, 3.0]),
    max=st.sampled_from([1.0, 0.9, 20.0]),
    machines=st.sampled_from([(), machines.parse("m1 max=3, m2 max=40 speed=0.5")]),
    mode=st.sampled_from(["continuous", "once", "epoch"]),
)


@settings(max_examples=60)
@given(SETTINGS, st.integers(0, 3), st.data())
def test_equal_measurements_give_equal_shares_that_sum_to_the_batch(
    share_settings: ShareSettings, ahead: int, data: st.DataObject
) -> None:
    balancer, twin = ShareBalancer(share_settings, ahead), ShareBalancer(share_settings, ahead)
    names = [f"m{rank}" for rank in range(data.draw(st.integers(2, 5)))]
    for step in range(data.draw(st.integers(1, 60))):
        if data.draw(st.integers(0, 9)) == 0:
            names = data.draw(st.permutations([f"m{rank}" for rank in range(7)]))[: data.draw(st.integers(2, 6))]
        size = data.draw(st.sampled_from([64, 64, 64, 17, 1]))
        catching_up = data.draw(st.sets(st.integers(1, len(names) - 1), max_size=len(names) - 2))
        shares = balancer.shares(step, size, names, catching_up)
        assert shares == twin.shares(step, size, names, catching_up)
        assert sum(shares) == size
        assert all(shares[rank] == 0 for rank in catching_up)
        measurements = [
            StepMeasurement(
                share, data.draw(st.floats(0.5, 2)) * share * (rank + 1) if data.draw(st.booleans()) else data.draw(ODD)
            )
            for rank, share in enumerate(shares)
        ]
        assert balancer.observe(step, names, measurements, epoch=step // 10) == twin.observe(
            step, names, measurements, epoch=step // 10
        )
        if data.draw(st.integers(0, 4)) == 0:
            twin = ShareBalancer(share_settings, ahead)
            twin.load_state_dict(json.loads(json.dumps(balancer.state_dict())))
        assert balancer.state_dict() == twin.state_dict()


@settings(max_examples=40)
@given(st.lists(st.integers(15, 64), min_size=3, max_size=5), st.lists(st.floats(0.1, 10), min_size=5, max_size=5))
def test_declared_maximum_is_never_exceeded_if_the_batch_fits(limits: list[int], speeds: list[float]) -> None:
    size = min(64, sum(limits))
    names = [f"m{rank}" for rank in range(len(limits))]
    declared = ", ".join(f"{name} max={limit}" for name, limit in zip(names, limits, strict=True))
    balancer = ShareBalancer(ShareSettings(machines=machines.parse(declared)))
    for step in range(40):
        shares = balancer.shares(step, size, names)
        assert sum(shares) == size
        assert all(share <= limit for share, limit in zip(shares, limits, strict=True))
        balancer.observe(step, names, [StepMeasurement(b, b / speed) for b, speed in zip(shares, speeds, strict=False)])


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=8))
def test_removing_single_samples_keeps_the_sum_and_the_bounds(shares_with_room: list[tuple[int, int]]) -> None:
    shares, highs = [share for share, _ in shares_with_room], [share + room for share, room in shares_with_room]
    result = without_singles(shares, highs)
    assert sum(result) == sum(shares)
    assert all(share <= high for share, high in zip(result, highs, strict=True))
    if 1 in result:
        # Only if the bounds leave no choice: no other share can take one more sample.
        lone = result.index(1)
        others = [(s, h) for rank, (s, h) in enumerate(zip(result, highs, strict=True)) if s and rank != lone]
        assert not any(s < h for s, h in others)
