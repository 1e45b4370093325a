"""Goodput: the global batch with most progress per second, and the learning rate that goes with it.

The formulas are in the docstring of the folder. Only sums, products, quotients and square roots are used: they give
the same bits on every machine, so all members agree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from math import inf, isfinite, isqrt, sqrt
from typing import Literal

from shoal.core.nouns import counted
from shoal.errors import BadSize

LrScaling = Literal["adascale", "sqrt", "off"]
Bounds = tuple[int, int]
StepSeconds = Callable[[int], float]

# Each halving of the range between the bounds doubles the number of candidates, up to 65.
HALVINGS = 6
MIN_GAIN = 0.05
# A larger change would trust the cost models far from measured sizes.
MAX_FACTOR = 4.0


def lr_scaling_for(optimizer: str) -> LrScaling:
    """Return the scaling for an optimizer by the name of its class: plain gradients, adaptive ones, or neither."""
    name = optimizer.lower()
    if "lbfgs" in name:
        return "off"
    return "adascale" if "sgd" in name or "lars" in name else "sqrt"


def efficiency(size: int, base: int, scale: float) -> float:
    """Return the value of a sample in a batch of `size`, relative to one in a batch of `base`."""
    return (scale + base) / (scale + size)


def progress(scaling: LrScaling, size: int, base: int, scale: float) -> float:
    """Return how many steps with a batch of `base` one step with `size` stands for; schedules advance by it."""
    return 1.0 if scaling == "off" or size == base else size / base * efficiency(size, base, scale)


def lr_gain(scaling: LrScaling, size: int, base: int, scale: float) -> float:
    """Return the factor on the learning rate, chosen for a batch of `base`, for a batch of `size`."""
    if scaling == "off" or size == base:
        return 1.0
    # AdaScale's (S/base + |G|²) / (S/size + |G|²), divided by |G|².
    return sqrt(size / base) if scaling == "sqrt" else progress(scaling, size, base, scale)


@dataclass(frozen=True, slots=True)
class BatchChoice:
    """A batch size, its gain in goodput over the present one, and the reason."""

    size: int
    gain: float
    reason: str


def best(
    batch_now: int,
    base: int,
    noise_scale: float,
    step_seconds: StepSeconds,
    bounds: Bounds,
    *,
    multiple: int = 1,
    cost_s: float = 0.0,
    left_s: float = inf,
    min_gain: float = MIN_GAIN,
    max_factor: float = MAX_FACTOR,
) -> BatchChoice:
    """Return the batch within `bounds` with most progress per second; the present one unless a change pays.

    A change costs `cost_s` of the `left_s` seconds in which it could pay. The batch grows or shrinks by at most
    `max_factor`, towards the best of all.
    """

    def goodput(size: int) -> float:
        seconds = step_seconds(size)
        if not (isfinite(seconds) and seconds > 0):
            return 0.0
        return size / seconds * efficiency(size, base, noise_scale)

    goodputs = {size: goodput(size) for size in candidates(bounds, multiple)}
    ideal = max(goodputs, key=lambda size: (goodputs[size], -abs(size - batch_now)))
    if not bounds[0] <= batch_now <= bounds[1]:
        return BatchChoice(ideal, 0.0, f"a batch of {batch_now} is not within {bounds[0]}…{bounds[1]}")
    present = goodput(batch_now)
    paid_fraction = max(0.0, 1.0 - cost_s / left_s) if left_s > 0 else 0.0
    net_gain = goodputs[ideal] * paid_fraction / present - 1.0 if present else 0.0
    if net_gain <= min_gain:
        return BatchChoice(batch_now, 0.0, f"no batch gains more than {min_gain:.0%} of goodput: the best is {ideal}")
    low, high = sorted((ideal, batch_now))
    reachable = [size for size in goodputs if batch_now / max_factor <= size <= batch_now * max_factor]
    near = [size for size in reachable if low <= size <= high and size != batch_now]
    size = max(near, key=goodputs.__getitem__, default=batch_now)
    if goodputs.get(size, present) <= present:
        return BatchChoice(batch_now, 0.0, f"{ideal} would be better, but the sizes on the way there are worse")
    gain = goodputs[size] / present - 1.0
    return BatchChoice(size, gain, _reason(size, batch_now, gain, step_seconds, noise_scale))


def candidates(bounds: Bounds, multiple: int = 1) -> list[int]:
    """Return about sixty sizes from one bound to the other, each larger by nearly the same factor."""
    low, high = round_bounds(bounds, multiple)
    sizes = {low, high}
    for _ in range(HALVINGS):
        ordered = sorted(sizes)
        middles = (isqrt(a * b) for a, b in pairwise(ordered))
        sizes |= {max(low, middle // multiple * multiple) for middle in middles}
    return sorted(sizes)


def round_bounds(bounds: Bounds, multiple: int) -> Bounds:
    """Return the bounds narrowed to multiples; raise `BadSize` if none lies between them."""
    low, high = -(-bounds[0] // multiple) * multiple, bounds[1] // multiple * multiple
    if low < 1 or high < low:
        raise BadSize(
            f"no valid global batch between {bounds[0]} and {bounds[1]}",
            why=f"the lower bound must be at least 1, and a multiple of {multiple} must lie between them",
            do='for example batch = "auto:32:1024"',
        )
    return low, high


def _reason(size: int, now: int, gain: float, step_seconds: StepSeconds, scale: float) -> str:
    factor = step_seconds(size) / step_seconds(now)
    return (
        f"goodput +{gain:.0%}: a step with {size} instead of {counted(now, 'sample')} takes {factor:.2f} x as long, "
        f"and the noise scale is {scale:.0f}"
    )
