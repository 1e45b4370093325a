"""How fast one member is: what was measured of it, and the seconds that a share of any size would take it.

All members compute with the same figures and must come to the same bits. So there are only the operations that IEEE 754
defines exactly (no logarithms), and no `sum` of floats, whose rounding differs between versions of Python.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import sqrt
from typing import Any, Self

from shoal.core.shares.cost_curve import CostCurve, rising, through

KEPT = 8
FULL = 100
USUAL_NOISE = 0.1
AGEING = 0.2
LEAST_SLOPE = 1e-3
LEAST_NOISE = 0.01
FAR = 1.0
GUESS = 0.3
FIXED_PART = 0.0
CERTAIN = 44.0
SHIFT = 4.0
SHORTEST_S = 1e-9
LONGEST_S = 1e7


@dataclass(frozen=True, slots=True)
class SpeedPoint:
    """The usual seconds for this many samples, out of how many steps, and in which fold they were last seen."""

    samples: int
    seconds: float
    count: int
    fold: int

    def scaled(self, factor: float) -> SpeedPoint:
        """The same after the member's speed changed: known from one step, as it were."""
        return SpeedPoint(self.samples, self.seconds * factor, 1, self.fold)


@dataclass(frozen=True, slots=True)
class MemberSpeed:
    """What is known of one member's speed. `fold` adds what a window of steps showed.

    `hint` is the relative speed that its agent found with a probe, for as long as nothing is measured.
    """

    points: tuple[SpeedPoint, ...] = ()
    folds: int = 0
    steps: int = 0
    noise: float = USUAL_NOISE
    hint: float | None = None
    micro: int | None = None

    @property
    def measured(self) -> bool:
        return bool(self.points)

    def point(self, samples: int) -> SpeedPoint | None:
        """What was measured with exactly this share."""
        return next((point for point in self.points if point.samples == samples), None)

    def fold(self, recent: Iterable[tuple[int, float]]) -> MemberSpeed:
        """Take in the (samples, seconds) of some steps; what cannot be a measurement is left out."""
        by_size: dict[int, list[float]] = {}
        for samples, seconds in recent:
            if usable(samples, seconds):
                by_size.setdefault(samples, []).append(seconds)
        if not by_size:
            return self
        folds, noise, steps = self.folds + 1, self.noise, self.steps
        points = {point.samples: point for point in self.points}
        for samples, some in sorted(by_size.items(), key=lambda size: (-len(size[1]), size[0])):
            usual_s = usual(some)
            noise = _noisier(noise, steps, some, usual_s)
            steps += len(some)
            new, old = SpeedPoint(samples, usual_s, len(some), folds), points.get(samples)
            if old is not None and _differ(old, new, noise):
                # The same share takes another time: so would all the others.
                points = {size: point.scaled(new.seconds / old.seconds) for size, point in points.items()}
                old = points[samples]
            points[samples] = _merged(old, new)
        kept = sorted(points.values(), key=lambda point: (-point.fold, -point.count, point.samples))[:KEPT]
        kept.sort(key=lambda point: point.samples)
        return replace(self, points=tuple(kept), folds=folds, steps=steps, noise=noise)

    def jumped(self, recent: Sequence[tuple[int, float]], alike: float | None = None) -> MemberSpeed:
        """The member is of another speed since the steps of `recent`: keep the shape, and let the new times count."""
        curve = self.curve(alike)
        good = [(samples, seconds) for samples, seconds in recent if usable(samples, seconds)]
        if curve is None or not good:
            return self
        factor = usual([seconds / curve.seconds(samples) for samples, seconds in good])
        points = tuple(point.scaled(factor) for point in self.points)
        return replace(self, points=points).fold(good)

    def fitted(self, alike: float | None = None) -> tuple[float, float]:
        """The line (a, c) around the latest size, a and c not negative.

        Least squares of the relative error, in which older and farther points count less, and a guess of the fixed part
        as much as noise leaves room for: with one size seen it is all there is. `alike` is a/c of the other members.
        """
        if not self.points:
            return 0.0, 1.0
        latest = self.latest()
        uu, uv, vv, u1, v1 = self._sums(latest)
        # The guess as one more equation: a / t = part, give or take GUESS.
        u, trust = self._times(latest.samples) / latest.seconds, 1 / (GUESS * GUESS)
        uu, u1 = uu + trust * u * u, u1 + trust * u * self._guess(latest, alike)
        determinant = uu * vv - uv * uv
        fixed_s, slope = (u1 * vv - v1 * uv) / determinant, (v1 * uu - u1 * uv) / determinant
        least = LEAST_SLOPE * latest.seconds / latest.samples
        if fixed_s < 0:
            return 0.0, v1 / vv
        if slope < least:
            return max(0.0, (u1 - least * uv) / uu), least
        return fixed_s, slope

    def shape(self) -> tuple[float, float] | None:
        """a/c by what was measured alone, and how certain it is; None if the sizes seen do not tell."""
        if len(self.points) < 2:
            return None
        latest = self.latest()
        uu, uv, vv, u1, v1 = self._sums(latest)
        certain = (uu - uv * uv / vv) * latest.seconds * latest.seconds
        if certain < CERTAIN:
            return None
        fixed_s = max(0.0, (u1 * vv - v1 * uv) / (uu * vv - uv * uv))
        slope = max((v1 - fixed_s * uv) / vv, LEAST_SLOPE * latest.seconds / latest.samples)
        return fixed_s / slope, certain

    def _sums(self, latest: SpeedPoint) -> tuple[float, float, float, float, float]:
        """The normal equations of 1 = a·(times/t) + c·(samples/t)."""
        uu = uv = vv = u1 = v1 = 0.0
        noise, jagged = max(self.noise, LEAST_NOISE), self._jagged()
        certain = 1 / (noise * noise + jagged * jagged)
        for point in self.points:
            weight = self._weight(point, latest) * certain
            u, v = self._times(point.samples) / point.seconds, point.samples / point.seconds
            uu, uv, vv = uu + weight * u * u, uv + weight * u * v, vv + weight * v * v
            u1, v1 = u1 + weight * u, v1 + weight * v
        return uu, uv, vv, u1, v1

    def latest(self) -> SpeedPoint:
        """The point that was measured last, and of those the most often."""
        return max(self.points, key=lambda point: (point.fold, point.count, -point.samples))

    def _weight(self, point: SpeedPoint, latest: SpeedPoint) -> float:
        big, small = max(point.samples, latest.samples), min(point.samples, latest.samples)
        far, old = big / small - 1, self.folds - point.fold
        return point.count / ((1 + far * far * FAR) * (1 + AGEING * old))

    def _jagged(self) -> float:
        """By how much the seconds fall somewhere although the size grows: then no secant can be trusted."""
        worst = 0.0
        for before, after in pairwise(self.points):
            worst = max(worst, before.seconds / after.seconds - 1)
        return worst

    def _guess(self, latest: SpeedPoint, alike: float | None) -> float:
        """The part of the latest seconds that is guessed to be fixed, before sizes are compared."""
        if alike is not None:
            fixed = alike * self._times(latest.samples)
            return fixed / (fixed + latest.samples)
        return FIXED_PART

    def curve(self, alike: float | None = None) -> CostCurve | None:
        """The fitted line, bent to pass through points that lie farther off than noise explains; None before any."""
        if not self.points:
            return None
        fixed_s, slope = self.fitted(alike)
        again_s = fixed_s if self.micro else 0.0
        at, seconds_at, counts = [], [], []
        for point in self.points:
            first_s = point.seconds - again_s * (self._times(point.samples) - 1)
            expected_s = fixed_s + slope * point.samples
            off = first_s / expected_s - 1
            # A single step, or a guess from before a jump, is no measurement to bend the line for.
            doubt = 3 * self.noise / sqrt(point.count) if point.count > 1 else GUESS
            if abs(off) > doubt:
                at.append(float(point.samples))
                seconds_at.append(expected_s * (1 + off * (1 - doubt * doubt / (off * off))))
                counts.append(point.count)
        if not at:
            return CostCurve((0.0,), (fixed_s,), slope, self.micro, again_s)
        seconds_at = rising(seconds_at, counts)
        return through(at, seconds_at, slope, self.micro, again_s)

    def _times(self, samples: int) -> int:
        return (samples - 1) // self.micro + 1 if self.micro else 1

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for a snapshot."""
        return {
            "points": [[p.samples, p.seconds, p.count, p.fold] for p in self.points],
            "folds": self.folds,
            "steps": self.steps,
            "noise": self.noise,
            "hint": self.hint,
            "micro": self.micro,
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        points = tuple(SpeedPoint(int(b), float(t), int(n), int(f)) for b, t, n, f in values["points"])
        folds, steps, noise = int(values["folds"]), int(values["steps"]), float(values["noise"])
        return cls(points, folds, steps, noise, values["hint"], values["micro"])


@dataclass(slots=True)
class DriftDetector:
    """Notices, step by step, that a member's speed is no longer what it was (CUSUM).

    2(t - p)/(t + p) stands for log(t/p): the same near 1, and clipped, so that a single spike, however high, is not
    enough.
    """

    up: float = 0.0
    down: float = 0.0
    steps: int = field(default=0)

    def see(self, seconds: float, expected_s: float, slack: float) -> int:
        """For how many steps the speed has been another by more than `slack`, once that is certain; 0 before."""
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

    def forget(self) -> None:
        self.up = self.down = 0.0
        self.steps = 0


def usable(samples: int, seconds: float) -> bool:
    """Whether this is a measurement at all."""
    return samples > 0 and SHORTEST_S <= seconds <= LONGEST_S


def usual(some: Sequence[float]) -> float:
    """The mean of the middle half, which spikes do not reach; of two or three the lower, as first steps are slow."""
    ordered, cut = sorted(some), (len(some) + 1) // 4
    if len(some) < 4:
        return ordered[(len(some) - 1) // 2]
    total = 0.0
    for one in ordered[cut : len(some) - cut]:
        total += one
    return total / (len(some) - 2 * cut)


def _noisier(noise: float, steps: int, some: Sequence[float], usual_s: float) -> float:
    """Relative noise by the median distance from the median, averaged over the steps so far."""
    if len(some) < 2:
        return noise
    if len(some) < 4:
        seen = (max(some) - usual_s) / usual_s
    else:
        seen = 1.4826 * usual([abs(one - usual_s) for one in some]) / usual_s
    return noise + (min(seen, 1.0) - noise) * len(some) / (len(some) + 2.0 + min(steps, 40))


def _differ(old: SpeedPoint, new: SpeedPoint, noise: float) -> bool:
    off = 2 * (new.seconds - old.seconds) / (new.seconds + old.seconds)
    return abs(off) > SHIFT * max(noise, LEAST_NOISE) * sqrt(1 / new.count + 1 / old.count)


def _merged(old: SpeedPoint | None, new: SpeedPoint) -> SpeedPoint:
    if old is None:
        return replace(new, count=min(new.count, FULL))
    before = min(old.count, max(FULL - new.count, new.count))
    seconds = (old.seconds * before + new.seconds * new.count) / (before + new.count)
    return SpeedPoint(new.samples, seconds, min(before + new.count, FULL), new.fold)


def common(shapes: Sequence[tuple[float, float]]) -> float | None:
    """The a/c of members that run the same program: the median of theirs, by how certain each is."""
    if not shapes:
        return None
    half, so_far = 0.0, 0.0
    for _, certain in shapes:
        half += certain / 2
    for shape, certain in sorted(shapes):
        so_far += certain
        if so_far >= half:
            return shape
    return None
