"""The seconds that a share of any size takes, as a rising curve with straight pieces."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CostCurve:
    """Seconds as a function of samples: straight between knots, rising, the first knot at 0 samples.

    Every micro-batch after the first costs `again_s` more.
    """

    at: tuple[float, ...]
    seconds_at: tuple[float, ...]
    slope: float
    micro: int | None = None
    again_s: float = 0.0

    def seconds(self, samples: int) -> float:
        """What a share of so many samples takes; nothing for none."""
        if samples <= 0:
            return 0.0
        again_s = self.again_s * ((samples - 1) // self.micro) if self.micro else 0.0
        at, seconds_at = self.at, self.seconds_at
        place = bisect_left(at, samples)
        if place == len(at):
            return seconds_at[-1] + (samples - at[-1]) * self.slope + again_s
        start, stop = at[place - 1], at[place]
        low, high = seconds_at[place - 1], seconds_at[place]
        return low + (high - low) * ((samples - start) / (stop - start)) + again_s

    def reach(self, seconds: float, most: int) -> int:
        """About as many samples as fit into so many seconds, `most` at most; one less or more is possible."""
        found = min(self._reach_once(seconds), most)
        if not self.micro or not self.again_s:
            return found
        low, high = 0, found
        while low < high:
            middle = (low + high + 1) // 2
            if self.seconds(middle) <= seconds:
                low = middle
            else:
                high = middle - 1
        return low

    def _reach_once(self, seconds: float) -> int:
        at, seconds_at = self.at, self.seconds_at
        if seconds < seconds_at[0]:
            return 0
        if seconds >= seconds_at[-1]:
            return int(min(at[-1] + (seconds - seconds_at[-1]) / self.slope, 1e15))
        place = bisect_right(seconds_at, seconds)
        start, stop = at[place - 1], at[place]
        low, high = seconds_at[place - 1], seconds_at[place]
        return int(start + (stop - start) * ((seconds - low) / (high - low)))


def line(fixed_s: float, slope: float, micro: int | None = None) -> CostCurve:
    """The cost a·ceil(b/m) + c·b."""
    return CostCurve((0.0,), (fixed_s,), slope, micro, fixed_s if micro else 0.0)


def through(at: list[float], seconds_at: list[float], slope: float, micro: int | None, again_s: float) -> CostCurve:
    """Add the knot at 0 and the slope after the last."""
    fixed_s = min(max(seconds_at[0] - slope * at[0], 0.0), seconds_at[0])
    return CostCurve((0.0, *at), (fixed_s, *seconds_at), slope, micro, again_s)


def rising(values: list[float], weights: Sequence[float]) -> list[float]:
    """The nearest values that never fall (pool adjacent violators)."""
    pools: list[tuple[float, float, int]] = []
    for value, weight in zip(values, weights, strict=True):
        mean, mass, size = value, float(weight), 1
        while pools and pools[-1][0] > mean:
            other, other_mass, other_size = pools.pop()
            mean = (other * other_mass + mean * mass) / (other_mass + mass)
            mass, size = mass + other_mass, size + other_size
        pools.append((mean, mass, size))
    return [mean for mean, _, size in pools for _ in range(size)]
