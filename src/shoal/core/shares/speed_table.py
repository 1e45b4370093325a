"""What a balance knows of all members: their speeds, what came in since the last window, and their limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import sqrt
from typing import Any, NamedTuple

from shoal.core.shares.cost_curve import CostCurve, line
from shoal.core.shares.member_speed import DriftDetector, MemberSpeed, common, usable, usual
from shoal.core.shares.split import Shares

JUMP = 0.15
JUMP_ELSEWHERE = 0.5
FASTER = 0.8
DOUBTS = 3.5
STRANGERS = 16
UNREAD = 64


class StepMeasurement(NamedTuple):
    """What one member did in one step: its own data and compute seconds for so many samples."""

    samples: int
    seconds: float


@dataclass(slots=True)
class MemberProfile:
    """What is known of one member.

    `fresh` is one of whose present speed little is known; `parked_at` is the step since which it has no share.
    `curve`, `expected` (seconds for so many samples) and `slack` are kept between windows to save time.
    """

    speed: MemberSpeed = field(default_factory=MemberSpeed)
    drift: DriftDetector = field(default_factory=DriftDetector)
    recent: list[tuple[int, float]] = field(default_factory=list)
    limit: int | None = None
    fresh: bool = True
    parked_at: int | None = None
    curve: CostCurve | None = None
    expected: tuple[int, float] = (0, 0.0)
    slack: float = 0.0

    def hint(self, speed: float) -> None:
        self.speed = replace(self.speed, hint=speed)

    def draw(self, alike: float | None) -> None:
        self.curve, self.expected = self.speed.curve(alike), (0, 0.0)

    def note(self, samples: int, seconds: float) -> int | None:
        """Take in one step; for how many steps the speed has been another, None if it has not.

        With 0 it is not the speed: the curve is wrong where nothing had been measured.
        """
        self.recent.append((samples, seconds))
        if len(self.recent) > UNREAD:
            del self.recent[: UNREAD // 2]
        if self.curve is None:
            return None
        if self.expected[0] != samples:
            self._expect(samples, self.curve)
        # A parked member is measured once in a long while, and nothing makes a step faster by chance.
        if self.parked_at is not None and seconds < FASTER * self.expected[1]:
            return 1
        steps = self.drift.see(seconds, self.expected[1], self.slack)
        if not steps:
            return None
        return min(steps, len(self.recent)) if self.speed.point(samples) is not None else 0

    def _expect(self, samples: int, curve: CostCurve) -> None:
        point = self.speed.point(samples)
        if point is not None:
            self.expected = (samples, point.seconds)
            self.slack = max(self.speed.noise, JUMP) * (1 + 2 / sqrt(point.count))
        else:
            # Nothing was measured here yet: the curve may be wrong and the speed the same.
            self.expected, self.slack = (samples, curve.seconds(samples)), JUMP_ELSEWHERE

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for a snapshot."""
        return {
            "speed": self.speed.as_dict(),
            "drift": [self.drift.up, self.drift.down, self.drift.steps],
            "recent": [list(pair) for pair in self.recent],
            "limit": self.limit,
            "fresh": self.fresh,
            "parked_at": self.parked_at,
        }


class SpeedTable:
    """What is known of everybody, by name. `alike` is the a/c that members have in common."""

    def __init__(self) -> None:
        self.alike: float | None = None
        self._known: dict[str, MemberProfile] = {}

    def of(self, name: str) -> MemberProfile:
        """What is known of a member, from now on if there was nothing before."""
        return self._known.setdefault(name, MemberProfile())

    def get(self, name: str) -> MemberProfile | None:
        return self._known.get(name)

    def expect(self, members: Sequence[str]) -> None:
        """These are the members now; a few of those who left are remembered, in case they come back."""
        for name in members:
            self.of(name)
        strangers = [name for name in self._known if name not in members]
        for name in strangers[: max(0, len(strangers) - STRANGERS)]:
            del self._known[name]

    def micro(self, name: str, samples: int | None) -> None:
        """The member computes in pieces of so many samples."""
        one = self.of(name)
        one.speed = replace(one.speed, micro=samples)
        one.draw(self.alike)

    def familiar(self, members: Sequence[str]) -> None:
        """A decision was made with what is known of these members: who was measured is no longer fresh."""
        for name in members:
            one = self._known[name]
            one.fresh = one.fresh and not one.speed.measured

    def note(self, members: Sequence[str], seen: Sequence[StepMeasurement]) -> list[tuple[MemberProfile, int]]:
        """Take in a step; returns who is of another speed than before and for how long (see `Known.note`)."""
        surprising = []
        for name, (samples, seconds) in zip(members, seen, strict=True):
            if usable(samples, seconds):
                one = self._known[name]
                steps = one.note(samples, seconds)
                if steps is not None:
                    surprising.append((one, steps))
        return surprising

    def fold(self, surprising: Sequence[tuple[MemberProfile, int]]) -> None:
        """Close the window: everybody's measurements become points of their curves."""
        for one, steps in surprising:
            one.fresh = True
            one.drift.forget()
            if steps:
                one.speed = one.speed.jumped(one.recent[-steps:], self.alike)
                one.recent.clear()
        for one in self._known.values():
            if one.recent:
                one.speed = one.speed.fold(one.recent)
                one.recent.clear()
                one.drift.forget()
        shapes = [shape for one in self._known.values() if (shape := one.speed.shape()) is not None]
        self.alike = common(shapes)
        for one in self._known.values():
            one.draw(self.alike)

    def costs(self, members: Sequence[str]) -> list[CostCurve]:
        """A curve for everybody: measured, or by comparison with those who are."""
        held = [self._known.get(name) for name in members]
        costs = [one.curve if one is not None else None for one in held]
        if None in costs:
            known = [one for one in held if one is not None and one.curve is not None]
            costs = [cost or self._by_comparison(one, known, held) for one, cost in zip(held, costs, strict=True)]
        return [cost for cost in costs if cost is not None]

    def _by_comparison(
        self, one: MemberProfile | None, known: Sequence[MemberProfile], everybody: Sequence[MemberProfile | None]
    ) -> CostCurve:
        """The curve of a member that was not measured yet: by the probes, or like the usual member."""
        hint = one.speed.hint if one is not None else None
        if not known:
            hints = [other.speed.hint for other in everybody if other is not None and other.speed.hint is not None]
            return line(0.0, 1.0 / (hint or (usual(hints) if hints else 1.0)))
        compared = []
        for other in known:
            if hint is not None and other.speed.hint is not None:
                latest = other.speed.latest()
                compared.append(latest.seconds / latest.samples * other.speed.hint / hint)
        if compared:
            return line(0.0, usual(compared))
        fitted = [other.speed.fitted(self.alike) for other in known]
        return line(usual([fixed_s for fixed_s, _ in fitted]), usual([slope for _, slope in fitted]))

    def measured_s(self, members: Sequence[str], shares: Shares) -> float | None:
        """The step with these shares, if all of them have been measured."""
        slowest = 0.0
        for name, share in zip(members, shares, strict=True):
            point = self._known[name].speed.point(share) if share else None
            if share and point is None:
                return None
            slowest = max(slowest, point.seconds if point else 0.0)
        return slowest

    def noise(self, members: Sequence[str]) -> float:
        """The part by which equal steps of the noisiest of these members differ."""
        return max((one.speed.noise for name in members if (one := self.get(name)) is not None), default=0.0)

    def doubt(self, members: Sequence[str], shares: Sequence[int]) -> float:
        """How much of a difference noise explains, by the least certain of these measurements."""
        doubt = 0.0
        for name, share in zip(members, shares, strict=True):
            speed = self._known[name].speed
            point = speed.point(share)
            if point is not None:
                doubt = max(doubt, DOUBTS * speed.noise / sqrt(point.count))
        return doubt

    def state_dict(self) -> dict[str, Any]:
        return {"alike": self.alike, "members": {name: one.as_dict() for name, one in self._known.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.alike = state["alike"]
        self._known = {name: _restored(values, self.alike) for name, values in state["members"].items()}


def _restored(values: dict[str, Any], alike: float | None) -> MemberProfile:
    up, down, steps = values["drift"]
    recent = [(int(samples), float(seconds)) for samples, seconds in values["recent"]]
    one = MemberProfile(MemberSpeed.from_dict(values["speed"]), DriftDetector(up, down, steps), recent)
    one.limit, one.fresh, one.parked_at = values["limit"], values["fresh"], values["parked_at"]
    one.draw(alike)
    return one
