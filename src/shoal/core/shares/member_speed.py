"""Speed of one member: measured points, and the cost curve that is fitted to them.

A member takes t(b) = a·ceil(b/m) + c·b seconds for b samples, m at a time. The last 8 distinct sizes b that it was
measured with are kept as points: a robust mean of the seconds, the number of steps, and the window in which they were
last seen. `fit` finds a and c ≥ 0 by least squares of the relative error; recent points, points with many steps, and
points near the latest size count more. With one size measured, a and c cannot be told apart: then the ratio a/c of the
other members is assumed, since all run the same program, or a = 0 if none is known. `curve` bends the line through
points that lie farther off than noise explains.

All members compute with the same figures and must get the same bits. So only operations that IEEE 754 defines exactly
are used (no logarithms), and no `sum` of floats, whose rounding differs between versions of Python.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import sqrt
from typing import Any, Self

from shoal.core.shares.cost_curve import CostCurve, isotonic, piecewise

MAX_POINTS = 8
MAX_COUNT = 100
# Relative noise that is assumed until it has been measured, and the least that is believed.
INITIAL_NOISE = 0.1
MIN_NOISE = 0.01
# How fast the weight of a point falls with its age in windows, and with its distance from the latest size.
AGEING = 0.2
DISTANCE_PENALTY = 1.0
# Least cost of a sample, as a fraction of the average cost per sample: it keeps the curve invertible.
MIN_SLOPE = 1e-3
# Standard error of the assumed fixed fraction, and its value when no member is known.
FIXED_FRACTION_ERROR = 0.3
DEFAULT_FIXED_FRACTION = 0.0
# Information (inverse variance) about the fixed fraction from which a member's ratio a/c may stand for the others.
MIN_RATIO_INFORMATION = 44.0
# A point moved if its new seconds differ by more than this many standard errors.
SHIFT_ERRORS = 4.0
MIN_SECONDS = 1e-9
MAX_SECONDS = 1e7


@dataclass(frozen=True, slots=True)
class SpeedPoint:
    """Typical seconds for this many samples, from `count` steps, last seen in window number `window`."""

    samples: int
    seconds: float
    count: int
    window: int

    def scaled(self, factor: float) -> SpeedPoint:
        """Return the point after the member's speed changed; it then weighs as much as one step."""
        return SpeedPoint(self.samples, self.seconds * factor, 1, self.window)


@dataclass(frozen=True, slots=True)
class MemberSpeed:
    """Measured speed of one member.

    `estimate` is the relative speed that its agent measured with a short benchmark; it counts until steps have been
    measured. `micro` is its micro-batch size, None if it computes its share at once.
    """

    points: tuple[SpeedPoint, ...] = ()
    windows: int = 0
    steps: int = 0
    noise: float = INITIAL_NOISE
    estimate: float | None = None
    micro: int | None = None

    @property
    def measured(self) -> bool:
        """Whether any step has been measured."""
        return bool(self.points)

    def point(self, samples: int) -> SpeedPoint | None:
        """Return the point measured with exactly this share, if any."""
        return next((point for point in self.points if point.samples == samples), None)

    def add_window(self, measurements: Iterable[tuple[int, float]]) -> MemberSpeed:
        """Return the speed with one more window of (samples, seconds); impossible values are ignored."""
        by_size: dict[int, list[float]] = {}
        for samples, seconds in measurements:
            if is_plausible(samples, seconds):
                by_size.setdefault(samples, []).append(seconds)
        if not by_size:
            return self
        windows, noise, steps = self.windows + 1, self.noise, self.steps
        points = {point.samples: point for point in self.points}
        for samples, times in sorted(by_size.items(), key=lambda size: (-len(size[1]), size[0])):
            typical_s = robust_mean(times)
            noise = _updated_noise(noise, steps, times, typical_s)
            steps += len(times)
            new, old = SpeedPoint(samples, typical_s, len(times), windows), points.get(samples)
            if old is not None and _differ(old, new, noise):
                # The same share takes another time now, so all other shares do too.
                points = {size: point.scaled(new.seconds / old.seconds) for size, point in points.items()}
                old = points[samples]
            points[samples] = _merged(old, new)
        kept = sorted(points.values(), key=lambda point: (-point.window, -point.count, point.samples))[:MAX_POINTS]
        kept.sort(key=lambda point: point.samples)
        return replace(self, points=tuple(kept), windows=windows, steps=steps, noise=noise)

    def rescaled(self, recent: Sequence[tuple[int, float]], common_ratio: float | None = None) -> MemberSpeed:
        """Return the speed after a jump: the shape of the curve stays, scaled to the steps since the jump."""
        curve = self.curve(common_ratio)
        plausible = [(samples, seconds) for samples, seconds in recent if is_plausible(samples, seconds)]
        if curve is None or not plausible:
            return self
        factor = robust_mean([seconds / curve.seconds(samples) for samples, seconds in plausible])
        points = tuple(point.scaled(factor) for point in self.points)
        return replace(self, points=points).add_window(plausible)

    def fit(self, common_ratio: float | None = None) -> tuple[float, float]:
        """Return (a, c), the fixed seconds and the seconds per sample around the latest size; both are ≥ 0.

        Least squares of the relative error, plus one equation for the assumed fixed fraction, which decides alone if
        only one size was measured. `common_ratio` is a/c of the other members.
        """
        if not self.points:
            return 0.0, 1.0
        latest = self.latest()
        uu, uv, vv, u1, v1 = self._normal_equations(latest)
        # The assumption as one more equation: a / t = fraction ± FIXED_FRACTION_ERROR.
        u, weight = self._passes(latest.samples) / latest.seconds, 1 / (FIXED_FRACTION_ERROR * FIXED_FRACTION_ERROR)
        uu, u1 = uu + weight * u * u, u1 + weight * u * self._assumed_fixed_fraction(latest, common_ratio)
        determinant = uu * vv - uv * uv
        fixed_s, slope = (u1 * vv - v1 * uv) / determinant, (v1 * uu - u1 * uv) / determinant
        min_slope = MIN_SLOPE * latest.seconds / latest.samples
        if fixed_s < 0:
            return 0.0, v1 / vv
        if slope < min_slope:
            return max(0.0, (u1 - min_slope * uv) / uu), min_slope
        return fixed_s, slope

    def cost_ratio(self) -> tuple[float, float] | None:
        """Return the ratio a/c from measurements alone, with its information; None if the sizes do not tell."""
        if len(self.points) < 2:
            return None
        latest = self.latest()
        uu, uv, vv, u1, v1 = self._normal_equations(latest)
        information = (uu - uv * uv / vv) * latest.seconds * latest.seconds
        if information < MIN_RATIO_INFORMATION:
            return None
        fixed_s = max(0.0, (u1 * vv - v1 * uv) / (uu * vv - uv * uv))
        slope = max((v1 - fixed_s * uv) / vv, MIN_SLOPE * latest.seconds / latest.samples)
        return fixed_s / slope, information

    def _normal_equations(self, latest: SpeedPoint) -> tuple[float, float, float, float, float]:
        """Return the sums of 1 = a·(passes/t) + c·(samples/t), weighted."""
        uu = uv = vv = u1 = v1 = 0.0
        noise, jaggedness = max(self.noise, MIN_NOISE), self._jaggedness()
        information = 1 / (noise * noise + jaggedness * jaggedness)
        for point in self.points:
            weight = self._weight(point, latest) * information
            u, v = self._passes(point.samples) / point.seconds, point.samples / point.seconds
            uu, uv, vv = uu + weight * u * u, uv + weight * u * v, vv + weight * v * v
            u1, v1 = u1 + weight * u, v1 + weight * v
        return uu, uv, vv, u1, v1

    def latest(self) -> SpeedPoint:
        """Return the point measured last; among those, the one with the most steps."""
        return max(self.points, key=lambda point: (point.window, point.count, -point.samples))

    def _weight(self, point: SpeedPoint, latest: SpeedPoint) -> float:
        big, small = max(point.samples, latest.samples), min(point.samples, latest.samples)
        distance, age = big / small - 1, self.windows - point.window
        return point.count / ((1 + distance * distance * DISTANCE_PENALTY) * (1 + AGEING * age))

    def _jaggedness(self) -> float:
        """Return by how much, relatively, the seconds fall anywhere although the size grows; then trust no slope."""
        worst = 0.0
        for before, after in pairwise(self.points):
            worst = max(worst, before.seconds / after.seconds - 1)
        return worst

    def _assumed_fixed_fraction(self, latest: SpeedPoint, common_ratio: float | None) -> float:
        if common_ratio is not None:
            fixed = common_ratio * self._passes(latest.samples)
            return fixed / (fixed + latest.samples)
        return DEFAULT_FIXED_FRACTION

    def curve(self, common_ratio: float | None = None) -> CostCurve | None:
        """Return the fitted line, bent through points that noise does not explain; None before any measurement."""
        if not self.points:
            return None
        fixed_s, slope = self.fit(common_ratio)
        further_s = fixed_s if self.micro else 0.0
        knots, knot_seconds, counts = [], [], []
        for point in self.points:
            first_s = point.seconds - further_s * (self._passes(point.samples) - 1)
            expected_s = fixed_s + slope * point.samples
            off = first_s / expected_s - 1
            # A single step, or a point scaled after a jump, is no reason to bend the line.
            tolerance = 3 * self.noise / sqrt(point.count) if point.count > 1 else FIXED_FRACTION_ERROR
            if abs(off) > tolerance:
                knots.append(float(point.samples))
                knot_seconds.append(expected_s * (1 + off * (1 - tolerance * tolerance / (off * off))))
                counts.append(point.count)
        if not knots:
            return CostCurve((0.0,), (fixed_s,), slope, self.micro, further_s)
        return piecewise(knots, isotonic(knot_seconds, counts), slope, self.micro, further_s)

    def _passes(self, samples: int) -> int:
        """Return the number of micro-batches that a share is computed in."""
        return (samples - 1) // self.micro + 1 if self.micro else 1

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for a snapshot."""
        return {
            "points": [[p.samples, p.seconds, p.count, p.window] for p in self.points],
            "windows": self.windows,
            "steps": self.steps,
            "noise": self.noise,
            "estimate": self.estimate,
            "micro": self.micro,
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Return the speed that `as_dict` described."""
        points = tuple(SpeedPoint(int(b), float(t), int(n), int(w)) for b, t, n, w in values["points"])
        windows, steps, noise = int(values["windows"]), int(values["steps"]), float(values["noise"])
        return cls(points, windows, steps, noise, values["estimate"], values["micro"])


@dataclass(slots=True)
class DriftDetector:
    """CUSUM test that a member's speed is no longer what it was.

    The statistic is 2(t - p)/(t + p) instead of log(t/p): equal near 1, exact in IEEE 754, and clipped, so that a
    single spike, however high, does not trigger.
    """

    up: float = 0.0
    down: float = 0.0
    steps: int = 0

    def update(self, seconds: float, expected_s: float, slack: float) -> int:
        """Add one step; return for how many steps the speed has differed by more than `slack`, 0 until certain."""
        clip = 3.0 * slack
        off = 2.0 * (seconds - expected_s) / (seconds + expected_s)
        off = clip if off > clip else -clip if off < -clip else off
        up, down = self.up + off - slack, self.down - off - slack
        self.up = up = up if up > 0.0 else 0.0
        self.down = down = down if down > 0.0 else 0.0
        if up == 0.0 and down == 0.0:
            self.steps = 0
            return 0
        self.steps += 1
        # Two and a half clipped steps: three in a row tell a jump from a spike.
        return self.steps if up > 5.0 * slack or down > 5.0 * slack else 0

    def reset(self) -> None:
        """Forget all steps."""
        self.up = self.down = 0.0
        self.steps = 0


def is_plausible(samples: int, seconds: float) -> bool:
    """Return whether this can be a measurement."""
    return samples > 0 and MIN_SECONDS <= seconds <= MAX_SECONDS


def robust_mean(values: Sequence[float]) -> float:
    """Return the mean of the middle half, which spikes do not affect.

    Of two or three values it is the lower median, because first steps are slow.
    """
    ordered, cut = sorted(values), (len(values) + 1) // 4
    if len(values) < 4:
        return ordered[(len(values) - 1) // 2]
    total = 0.0
    for value in ordered[cut : len(values) - cut]:
        total += value
    return total / (len(values) - 2 * cut)


def _updated_noise(noise: float, steps: int, times: Sequence[float], typical_s: float) -> float:
    """Return the relative noise by the median absolute deviation, averaged over the steps so far."""
    if len(times) < 2:
        return noise
    if len(times) < 4:
        spread = (max(times) - typical_s) / typical_s
    else:
        spread = 1.4826 * robust_mean([abs(seconds - typical_s) for seconds in times]) / typical_s
    return noise + (min(spread, 1.0) - noise) * len(times) / (len(times) + 2.0 + min(steps, 40))


def _differ(old: SpeedPoint, new: SpeedPoint, noise: float) -> bool:
    off = 2 * (new.seconds - old.seconds) / (new.seconds + old.seconds)
    return abs(off) > SHIFT_ERRORS * max(noise, MIN_NOISE) * sqrt(1 / new.count + 1 / old.count)


def _merged(old: SpeedPoint | None, new: SpeedPoint) -> SpeedPoint:
    if old is None:
        return replace(new, count=min(new.count, MAX_COUNT))
    old_count = min(old.count, max(MAX_COUNT - new.count, new.count))
    seconds = (old.seconds * old_count + new.seconds * new.count) / (old_count + new.count)
    return SpeedPoint(new.samples, seconds, min(old_count + new.count, MAX_COUNT), new.window)


def weighted_median(values: Sequence[tuple[float, float]]) -> float | None:
    """Return the median of (value, weight) pairs; None if there are none."""
    if not values:
        return None
    half, so_far = 0.0, 0.0
    for _, weight in values:
        half += weight / 2
    for value, weight in sorted(values):
        so_far += weight
        if so_far >= half:
            return value
    return None
