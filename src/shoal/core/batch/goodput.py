"""The global batch that trains fastest: throughput times statistical efficiency, and what follows for learning rates.

Only sums, products, quotients and square roots are used: they are the same on every machine, so all members agree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from math import inf, isfinite, isqrt, sqrt
from typing import Literal

from shoal.errors import BadSize

LrScaling = Literal["adascale", "sqrt", "off"]
Bounds = tuple[int, int]
StepSeconds = Callable[[int], float]

HALVINGS = 6
LEAST_GAIN = 0.05
# A larger leap would trust the cost models far from where they were measured.
LEAP = 4.0


def lr_scaling_for(optimizer: str) -> LrScaling:
    """The law that suits an optimizer, by the name of its class: plain gradients, adaptive ones, or neither."""
    name = optimizer.lower()
    if "lbfgs" in name:
        return "off"
    return "adascale" if "sgd" in name or "lars" in name else "sqrt"


def efficiency(size: int, base: int, scale: float) -> float:
    """What a sample is worth in a batch of `size`, where one in a batch of `base` is worth 1."""
    return (scale + base) / (scale + size)


def progress(law: LrScaling, size: int, base: int, scale: float) -> float:
    """How many steps with a batch of `base` one step with `size` stands for; schedules advance by it."""
    return 1.0 if law == "off" or size == base else size / base * efficiency(size, base, scale)


def lr_gain(law: LrScaling, size: int, base: int, scale: float) -> float:
    """What the learning rate that was chosen for a batch of `base` is multiplied by for a batch of `size`."""
    if law == "off" or size == base:
        return 1.0
    # AdaScale's (S/base + |G|²) / (S/size + |G|²), divided by |G|².
    return sqrt(size / base) if law == "sqrt" else progress(law, size, base, scale)


@dataclass(frozen=True, slots=True)
class BatchChoice:
    """The best batch, how much goodput it gains over the present one, and why it was chosen."""

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
    least_gain: float = LEAST_GAIN,
    leap: float = LEAP,
) -> BatchChoice:
    """The batch within `bounds` that makes most progress per second; the present one unless that pays.

    A change costs `cost_s` seconds out of the `left_s` in which it could pay. The batch grows or shrinks by a factor of
    `leap` at most, towards the best of all.
    """

    def goodput(size: int) -> float:
        seconds = step_seconds(size)
        if not (isfinite(seconds) and seconds > 0):
            return 0.0
        return size / seconds * efficiency(size, base, noise_scale)

    found = {size: goodput(size) for size in candidates(bounds, multiple)}
    ideal = max(found, key=lambda size: (found[size], -abs(size - batch_now)))
    if not bounds[0] <= batch_now <= bounds[1]:
        return BatchChoice(ideal, 0.0, f"a batch of {batch_now} is not within {bounds[0]}…{bounds[1]}")
    now = goodput(batch_now)
    paid = max(0.0, 1.0 - cost_s / left_s) if left_s > 0 else 0.0
    pays = found[ideal] * paid / now - 1.0 if now else 0.0
    if pays <= least_gain:
        return BatchChoice(batch_now, 0.0, f"no batch gains more than {least_gain:.0%} of goodput: the best is {ideal}")
    low, high = sorted((ideal, batch_now))
    near = [s for s in found if low <= s <= high and s != batch_now and batch_now / leap <= s <= batch_now * leap]
    size = max(near, key=found.__getitem__, default=batch_now)
    if found.get(size, now) <= now:
        return BatchChoice(batch_now, 0.0, f"{ideal} would be better, but what lies between would be worse")
    gained = found[size] / now - 1.0
    return BatchChoice(size, gained, _reason(size, batch_now, gained, step_seconds, noise_scale))


def candidates(bounds: Bounds, multiple: int = 1) -> list[int]:
    """About sixty batches from one bound to the other, each nearly the same factor above the one before."""
    low, high = round_bounds(bounds, multiple)
    sizes = {low, high}
    for _ in range(HALVINGS):
        ordered = sorted(sizes)
        middles = (isqrt(a * b) for a, b in pairwise(ordered))
        sizes |= {max(low, middle // multiple * multiple) for middle in middles}
    return sorted(sizes)


def round_bounds(bounds: Bounds, multiple: int) -> Bounds:
    low, high = -(-bounds[0] // multiple) * multiple, bounds[1] // multiple * multiple
    if low < 1 or high < low:
        raise BadSize(
            f"no global batch between {bounds[0]} and {bounds[1]} can be chosen",
            why=f"the lower bound must be at least 1, and a multiple of {multiple} must lie between them",
            do='for example batch = "auto:32:1024"',
        )
    return low, high


def _reason(size: int, now: int, gained: float, step_seconds: StepSeconds, scale: float) -> str:
    longer = step_seconds(size) / step_seconds(now)
    return (
        f"goodput +{gained:.0%}: {size} instead of {now} samples take {longer:.2f} x as long a step, "
        f"and the noise scale is {scale:.0f}"
    )
