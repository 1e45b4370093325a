"""Cost curves: the seconds that a share of any size takes, as an increasing piecewise linear function."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CostCurve:
    """Seconds as a function of samples: linear between knots, with `slope` after the last; the first knot is at 0.

    Every micro-batch after the first costs `further_s` more.
    """

    knots: tuple[float, ...]
    knot_seconds: tuple[float, ...]
    slope: float
    micro: int | None = None
    further_s: float = 0.0

    def seconds(self, samples: int) -> float:
        """Return the seconds that a share of so many samples takes; 0 for none."""
        if samples <= 0:
            return 0.0
        further_s = self.further_s * ((samples - 1) // self.micro) if self.micro else 0.0
        knots, knot_seconds = self.knots, self.knot_seconds
        right = bisect_left(knots, samples)
        if right == len(knots):
            return knot_seconds[-1] + (samples - knots[-1]) * self.slope + further_s
        start, stop = knots[right - 1], knots[right]
        low, high = knot_seconds[right - 1], knot_seconds[right]
        return low + (high - low) * ((samples - start) / (stop - start)) + further_s

    def samples_within(self, seconds: float, most: int) -> int:
        """Return about how many samples fit into so many seconds, at most `most`; it may be off by one."""
        samples = min(self._samples_in_one_pass(seconds), most)
        if not self.micro or not self.further_s:
            return samples
        low, high = 0, samples
        while low < high:
            middle = (low + high + 1) // 2
            if self.seconds(middle) <= seconds:
                low = middle
            else:
                high = middle - 1
        return low

    def _samples_in_one_pass(self, seconds: float) -> int:
        """Return the inverse of the curve without the cost of further micro-batches."""
        knots, knot_seconds = self.knots, self.knot_seconds
        if seconds < knot_seconds[0]:
            return 0
        if seconds >= knot_seconds[-1]:
            return int(min(knots[-1] + (seconds - knot_seconds[-1]) / self.slope, 1e15))
        right = bisect_right(knot_seconds, seconds)
        start, stop = knots[right - 1], knots[right]
        low, high = knot_seconds[right - 1], knot_seconds[right]
        return int(start + (stop - start) * ((seconds - low) / (high - low)))


def linear(fixed_s: float, slope: float, micro: int | None = None) -> CostCurve:
    """Return the cost a·ceil(b/m) + c·b."""
    return CostCurve((0.0,), (fixed_s,), slope, micro, fixed_s if micro else 0.0)


def piecewise(
    knots: list[float], knot_seconds: list[float], slope: float, micro: int | None, further_s: float
) -> CostCurve:
    """Return the curve through these knots and one at 0 samples, with `slope` after the last."""
    fixed_s = min(max(knot_seconds[0] - slope * knots[0], 0.0), knot_seconds[0])
    return CostCurve((0.0, *knots), (fixed_s, *knot_seconds), slope, micro, further_s)


def isotonic(values: list[float], weights: Sequence[float]) -> list[float]:
    """Return the nearest values that never decrease (pool adjacent violators)."""
    pools: list[tuple[float, float, int]] = []
    for value, weight in zip(values, weights, strict=True):
        mean, mass, size = value, float(weight), 1
        while pools and pools[-1][0] > mean:
            other, other_mass, other_size = pools.pop()
            mean = (other * other_mass + mean * mass) / (other_mass + mass)
            mass, size = mass + other_mass, size + other_size
        pools.append((mean, mass, size))
    return [mean for mean, _, size in pools for _ in range(size)]
