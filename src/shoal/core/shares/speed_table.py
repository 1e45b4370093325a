"""Speed table: what the balancer knows of every member, including a few that left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import sqrt
from typing import Any, NamedTuple

from shoal.core.shares.cost_curve import CostCurve, linear
from shoal.core.shares.member_speed import DriftDetector, MemberSpeed, is_plausible, robust_mean, weighted_median
from shoal.core.shares.split import Shares

# Relative change of speed that counts as a jump: at a measured size, and where the curve is only extrapolated.
JUMP = 0.15
EXTRAPOLATED_JUMP = 0.5
# A parked member that is this much faster than expected has become faster: nothing makes a step fast by chance.
FASTER = 0.8
UNCERTAINTY_ERRORS = 3.5
MAX_FORMER_MEMBERS = 16
MAX_RECENT_STEPS = 64


class StepMeasurement(NamedTuple):
    """Work of one member in one step: its own seconds for data and compute, and the samples."""

    samples: int
    seconds: float


@dataclass(slots=True)
class MemberProfile:
    """Speed and recent steps of one member.

    `fresh` means that its present speed is hardly known, so its share may change by any factor. `parked_at` is the
    step since which it has no share. `curve`, `expected` (samples, seconds) and `slack` are caches between windows.
    """

    speed: MemberSpeed = field(default_factory=MemberSpeed)
    drift: DriftDetector = field(default_factory=DriftDetector)
    recent: list[tuple[int, float]] = field(default_factory=list)
    fresh: bool = True
    parked_at: int | None = None
    curve: CostCurve | None = None
    expected: tuple[int, float] = (0, 0.0)
    slack: float = 0.0

    def set_estimate(self, speed: float) -> None:
        """Set the relative speed that the agent's benchmark found."""
        self.speed = replace(self.speed, estimate=speed)

    def refit(self, common_ratio: float | None) -> None:
        """Fit the cost curve again."""
        self.curve, self.expected = self.speed.curve(common_ratio), (0, 0.0)

    def observe(self, samples: int, seconds: float) -> int | None:
        """Add one step; return for how many steps the speed has differed, None if it has not.

        0 means that the curve was wrong at a size that had not been measured, not that the speed changed.
        """
        self.recent.append((samples, seconds))
        if len(self.recent) > MAX_RECENT_STEPS:
            del self.recent[: MAX_RECENT_STEPS // 2]
        if self.curve is None:
            return None
        if self.expected[0] != samples:
            self._expect(samples, self.curve)
        # A parked member is measured once in a long while: do not wait for a second measurement.
        if self.parked_at is not None and seconds < FASTER * self.expected[1]:
            return 1
        steps = self.drift.update(seconds, self.expected[1], self.slack)
        if not steps:
            return None
        return min(steps, len(self.recent)) if self.speed.point(samples) is not None else 0

    def _expect(self, samples: int, curve: CostCurve) -> None:
        point = self.speed.point(samples)
        if point is not None:
            self.expected = (samples, point.seconds)
            self.slack = max(self.speed.noise, JUMP) * (1 + 2 / sqrt(point.count))
        else:
            # Nothing was measured at this size: the curve may be wrong although the speed is the same.
            self.expected, self.slack = (samples, curve.seconds(samples)), EXTRAPOLATED_JUMP

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for a snapshot."""
        return {
            "speed": self.speed.as_dict(),
            "drift": [self.drift.up, self.drift.down, self.drift.steps],
            "recent": [list(pair) for pair in self.recent],
            "fresh": self.fresh,
            "parked_at": self.parked_at,
        }


class SpeedTable:
    """Profiles of members by name; `common_ratio` is the a/c that they have in common, None if unknown."""

    def __init__(self) -> None:
        self.common_ratio: float | None = None
        self._profiles: dict[str, MemberProfile] = {}

    def profile(self, name: str) -> MemberProfile:
        """Return the profile of a member; create it if there is none."""
        return self._profiles.setdefault(name, MemberProfile())

    def get(self, name: str) -> MemberProfile | None:
        """Return the profile of a member, if there is one."""
        return self._profiles.get(name)

    def track(self, members: Sequence[str]) -> None:
        """Track these members; keep the profiles of the last few that left, in case they rejoin."""
        for name in members:
            self.profile(name)
        former = [name for name in self._profiles if name not in members]
        for name in former[: max(0, len(former) - MAX_FORMER_MEMBERS)]:
            del self._profiles[name]

    def set_micro_batch(self, name: str, samples: int | None) -> None:
        """Set the micro-batch size of a member; None if it computes its share at once."""
        profile = self.profile(name)
        profile.speed = replace(profile.speed, micro=samples)
        profile.refit(self.common_ratio)

    def end_freshness(self, members: Sequence[str]) -> None:
        """Mark that a decision used what is known of these members: those measured are no longer fresh."""
        for name in members:
            profile = self._profiles[name]
            profile.fresh = profile.fresh and not profile.speed.measured

    def observe(
        self, members: Sequence[str], measurements: Sequence[StepMeasurement]
    ) -> list[tuple[MemberProfile, int]]:
        """Add one step; return the members whose speed changed, and for how long (see `MemberProfile.observe`)."""
        jumps = []
        for name, (samples, seconds) in zip(members, measurements, strict=True):
            if is_plausible(samples, seconds):
                profile = self._profiles[name]
                steps = profile.observe(samples, seconds)
                if steps is not None:
                    jumps.append((profile, steps))
        return jumps

    def close_window(self, jumps: Sequence[tuple[MemberProfile, int]]) -> None:
        """Turn all recent measurements into points, and fit every curve again."""
        for profile, steps in jumps:
            profile.fresh = True
            profile.drift.reset()
            if steps:
                profile.speed = profile.speed.rescaled(profile.recent[-steps:], self.common_ratio)
                profile.recent.clear()
        for profile in self._profiles.values():
            if profile.recent:
                profile.speed = profile.speed.add_window(profile.recent)
                profile.recent.clear()
                profile.drift.reset()
        ratios = [ratio for profile in self._profiles.values() if (ratio := profile.speed.cost_ratio()) is not None]
        self.common_ratio = weighted_median(ratios)
        for profile in self._profiles.values():
            profile.refit(self.common_ratio)

    def costs(self, members: Sequence[str]) -> list[CostCurve]:
        """Return a curve for each member: measured, or inferred from those that are."""
        profiles = [self._profiles.get(name) for name in members]
        curves = [profile.curve if profile is not None else None for profile in profiles]
        if None in curves:
            curves = [curve or self._inferred(profiles, rank) for rank, curve in enumerate(curves)]
        return [curve for curve in curves if curve is not None]

    def _inferred(self, profiles: Sequence[MemberProfile | None], rank: int) -> CostCurve:
        """Return the curve of a member without measurements: by the estimates, or like the typical member."""
        present = [profile for profile in profiles if profile is not None]
        measured = [profile for profile in present if profile.curve is not None]
        profile = profiles[rank]
        estimate = profile.speed.estimate if profile is not None else None
        if not measured:
            estimates = [other.speed.estimate for other in present if other.speed.estimate is not None]
            return linear(0.0, 1.0 / (estimate or (robust_mean(estimates) if estimates else 1.0)))
        compared = []
        for other in measured:
            if estimate is not None and other.speed.estimate is not None:
                latest = other.speed.latest()
                compared.append(latest.seconds / latest.samples * other.speed.estimate / estimate)
        if compared:
            return linear(0.0, robust_mean(compared))
        fits = [other.speed.fit(self.common_ratio) for other in measured]
        return linear(robust_mean([fixed_s for fixed_s, _ in fits]), robust_mean([slope for _, slope in fits]))

    def measured_s(self, members: Sequence[str], shares: Shares) -> float | None:
        """Return the seconds of a step with these shares, if every one of them has been measured."""
        slowest = 0.0
        for name, share in zip(members, shares, strict=True):
            point = self._profiles[name].speed.point(share) if share else None
            if share and point is None:
                return None
            slowest = max(slowest, point.seconds if point else 0.0)
        return slowest

    def noise(self, members: Sequence[str]) -> float:
        """Return the relative noise of the noisiest of these members."""
        return max((profile.speed.noise for name in members if (profile := self.get(name)) is not None), default=0.0)

    def uncertainty(self, members: Sequence[str], shares: Sequence[int]) -> float:
        """Return the relative difference that noise explains, by the least certain of these measurements."""
        uncertainty = 0.0
        for name, share in zip(members, shares, strict=True):
            speed = self._profiles[name].speed
            point = speed.point(share)
            if point is not None:
                uncertainty = max(uncertainty, UNCERTAINTY_ERRORS * speed.noise / sqrt(point.count))
        return uncertainty

    def state_dict(self) -> dict[str, Any]:
        """Return plain values for a snapshot."""
        members = {name: profile.as_dict() for name, profile in self._profiles.items()}
        return {"common_ratio": self.common_ratio, "members": members}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.common_ratio = state["common_ratio"]
        self._profiles = {name: _restored(values, self.common_ratio) for name, values in state["members"].items()}


def _restored(values: dict[str, Any], common_ratio: float | None) -> MemberProfile:
    up, down, steps = values["drift"]
    recent = [(int(samples), float(seconds)) for samples, seconds in values["recent"]]
    profile = MemberProfile(MemberSpeed.from_dict(values["speed"]), DriftDetector(up, down, steps), recent)
    profile.fresh, profile.parked_at = values["fresh"], values["parked_at"]
    profile.refit(common_ratio)
    return profile
