"""The balance of a run: which share every member has, and when that changes.

Every member of a world holds one and advances it with the same measurements at the same commits, so that all find the
same shares without asking anyone. Shares that change at the commit of step k hold from step k + 1 + `ahead` on, because
up to there the data has been read ahead; when the members change, they are found anew at once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

from shoal.core.shares import split as shares_split
from shoal.core.shares.cost_curve import CostCurve
from shoal.core.shares.settings import ShareSettings, parse
from shoal.core.shares.speed_table import MemberProfile, SpeedTable, StepMeasurement
from shoal.core.shares.split import Shares
from shoal.core.shares.stats import ShareStats, idle, reason, slowest

__all__ = ["ShareBalancer", "ShareChange", "ShareSettings", "ShareStats", "StepMeasurement", "parse"]

# Steps of the first windows: early corrections gain the most, later ones need certainty.
FIRST_WINDOWS = (2, 4, 8)
SETTLED = len(FIRST_WINDOWS)
# After the first windows a share at most doubles or halves in one change, because curves are sure near what was seen.
FREE = 3
AT_MOST = 2
LEAP = 0.1
# Shares that turn out this much slower are taken back.
SLOWER = 1.03
# Nobody is left out for less: whoever has no share is hardly measured, and stays out for long if that was an error.
PARKING = 0.1
TRIAL_STEPS = 200
TRIAL_COST = 0.01
# A change costs about a step of data read in vain, and must gain more than that in the steps that it can count on.
COST_STEPS = 1.0
WORTH = 1.5
HORIZON_STEPS = 100
QUIET_STEPS = 200


@dataclass(frozen=True, slots=True)
class ShareChange:
    """New shares, from which step on, and why in one sentence."""

    step: int
    shares: dict[str, int]
    reason: str


class _SharePlan(NamedTuple):
    """Shares of one global batch size for members in rank order, and the step from which they hold."""

    step: int
    size: int
    members: tuple[str, ...]
    shares: Shares


class ShareBalancer:
    """The shares in force, the next ones, and all that is known of the members' speeds.

    `alone` says whether a share may be a single sample.
    """

    def __init__(
        self, settings: ShareSettings | None = None, ahead: int = 0, first_windows: tuple[int, ...] = FIRST_WINDOWS
    ) -> None:
        self.settings = settings or ShareSettings()
        self.ahead = ahead
        self.allow_single_sample = True
        self._first_windows = first_windows
        self.reason = ""
        self._speeds = SpeedTable()
        self._plan: _SharePlan | None = None
        self._next: _SharePlan | None = None
        self._best: Shares | None = None
        self._window = 0
        self._matched = 0
        self._waited = 0
        self._smaller = 0
        self._backoff = 1.0
        self._epoch = 0
        self._due = False
        self._trial: tuple[int, str] | None = None
        self._recently: list[int] = []
        self._found: dict[tuple[int, tuple[str, ...], tuple[int, ...]], Shares] = {}

    # --- what members tell about themselves

    def set_speed_estimate(self, member: str, speed: float) -> None:
        """The relative speed of a member by its agent's probe; used until it has been measured."""
        if 0 < speed < inf and self._speeds.of(member).speed.hint != speed:
            self._speeds.of(member).hint(float(speed))
            self._found.clear()

    def set_limit(self, member: str, samples: int | None) -> None:
        """No share of this member may be above this from now on; None for no limit."""
        self._speeds.of(member).limit = samples
        self._best = None
        self._found.clear()
        self._plan, self._next = self._within_limits(self._plan), self._within_limits(self._next)

    def set_micro_batch(self, member: str, samples: int | None) -> None:
        """The member computes its share in pieces of so many samples."""
        if self._speeds.of(member).speed.micro != samples:
            self._speeds.micro(member, samples)
            self._found.clear()

    def micro_batch_of(self, member: str) -> int | None:
        """The pieces that a member was last known to compute."""
        known = self._speeds.get(member)
        return known.speed.micro if known is not None else None

    # --- shares

    def shares(self, step: int, size: int, members: Sequence[str], ghosts: Collection[int] = ()) -> Shares:
        """The share of every rank in this step, summing to `size`; ghosts have none."""
        found = self._shares(step, size, members, ghosts)
        if self.allow_single_sample or 1 not in found:
            return found
        return shares_split.without_singles(found, self._bounds(size, members, ghosts)[1])

    def _shares(self, step: int, size: int, members: Sequence[str], ghosts: Collection[int]) -> Shares:
        now = self._plan
        if self._next is not None and step >= self._next.step:
            now = self._next
        if not ghosts and now is not None and now.size == size and now.members == tuple(members):
            if self._trial is not None and self._trial[0] == step:
                return self._with_trial(now)
            return now.shares
        key = (size, tuple(members), tuple(sorted(ghosts)))
        if now is not None and now.members == key[1] and size < now.size and not ghosts:
            return _shrunk(size, now.shares)
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = self._solve(*key)
        return found

    def _within_limits(self, now: _SharePlan | None) -> _SharePlan | None:
        if now is None:
            return None
        limits = [one.limit if (one := self._speeds.get(name)) else None for name in now.members]
        if all(limit is None or share <= limit for share, limit in zip(now.shares, limits, strict=True)):
            return now
        return now._replace(shares=self._solve(now.size, now.members))

    def _solve(self, size: int, members: tuple[str, ...], ghosts: tuple[int, ...] = ()) -> Shares:
        """The best shares for these members by what is known now."""
        lows, highs = self._bounds(size, members, ghosts)
        if not self.settings.adapts:
            weights = [0 if rank in ghosts else w for rank, w in enumerate(self.settings.declared(len(members)))]
            return shares_split.by_weight(size, weights, lows, highs)
        costs = self._speeds.costs(members)
        noise = self._speeds.noise(members)
        even = max(self.settings.threshold, noise)
        found = shares_split.prefer_even(size, costs, lows, highs, even)
        # What was measured in another world tells too little to leave anybody out for a small gain.
        ones = [max(low, min(1, high)) for low, high in zip(lows, highs, strict=True)]
        if found == tuple(max(share, one) for share, one in zip(found, ones, strict=True)) or sum(ones) >= size:
            return found
        kept = shares_split.prefer_even(size, costs, ones, highs, even)
        return kept if slowest(costs, found) > slowest(costs, kept) * (1 - max(PARKING, 2 * noise)) else found

    def _bounds(self, size: int, members: Sequence[str], ghosts: Collection[int] = ()) -> tuple[list[int], list[int]]:
        lowest, highest = self.settings.bounds(size, len(members) - len(ghosts))
        lows, highs = [], []
        for rank, name in enumerate(members):
            one = self._speeds.get(name)
            limit = one.limit if one is not None else None
            high = 0 if rank in ghosts else highest if limit is None else min(highest, limit)
            # What a member can hold goes before what the settings want of it.
            lows.append(min(lowest, high))
            highs.append(high)
        return lows, highs

    def _with_trial(self, now: _SharePlan) -> Shares:
        """A sample or two of the largest share go to the member that is tried again."""
        assert self._trial is not None
        shares, few = list(now.shares), 1 if self.allow_single_sample else 2
        if self._trial[1] in now.members and max(shares) > few:
            shares[shares.index(max(shares))] -= few
            shares[now.members.index(self._trial[1])] += few
        return tuple(shares)

    # --- what is measured

    def observe(
        self,
        step: int,
        members: Sequence[str],
        seen: Sequence[StepMeasurement],
        *,
        epoch: int = 0,
        left: int | None = None,
        speeds: Mapping[str, float] | None = None,
    ) -> ShareChange | None:
        """Take in a committed step; `left` is how many follow. Returns the change of shares that it led to."""
        for name, speed in (speeds or {}).items():
            self.set_speed_estimate(name, speed)
        if epoch != self._epoch:
            self._epoch, self._due = epoch, True
        if not self._settle(step, tuple(members), sum(one.samples for one in seen)):
            return None
        jumped = self._speeds.note(members, seen)
        if self._next is not None:
            return None
        assert self._plan is not None
        self._matched += self._plan.shares == tuple(one.samples for one in seen)
        self._waited += 1
        change = None
        if jumped or self._is_time():
            self._fold(jumped)
            change = self._decide(step, left) if self.settings.adapts else None
        if 0 in self._plan.shares:
            self._try_parked(step, self._plan)
        return change

    def _settle(self, step: int, members: tuple[str, ...], size: int) -> bool:
        """Put the plan in force that this step was done with; whether there is any."""
        if self._next is not None and step >= self._next.step:
            self._plan, self._next = self._next, None
            self._matched = self._waited = 0
        now = self._plan
        self._smaller = self._smaller + 1 if now is not None and 0 < size < now.size else 0
        lasting = self._smaller > self.settings.window
        if size > 0 and (now is None or now.members != members or size > now.size or lasting):
            shares = self.shares(step, size, members)
            newcomers = now is None or not set(members) <= set(now.members)
            self._plan, self._next, self._best, self._trial = _SharePlan(step, size, members, shares), None, None, None
            self._matched = self._waited = 0
            self._window = 0 if newcomers or now is None or now.members == members else min(self._window, 1)
            self._found.clear()
            self._speeds.expect(members)
        return self._plan is not None

    def _is_time(self) -> bool:
        if self.settings.mode == "epoch" and self._window >= SETTLED:
            return self._due
        steps = self._first_windows[self._window] if self._window < SETTLED else self.settings.window
        return self._matched >= steps or self._waited >= 4 * steps

    def _fold(self, jumped: Sequence[tuple[MemberProfile, int]]) -> None:
        """Close the window: what was measured in it is taken in."""
        if any(steps for _, steps in jumped):
            self._best, self._backoff, self._recently = None, 1.0, []
            self._window = 0 if self.settings.mode == "continuous" else self._window
        self._speeds.fold(jumped)
        self._matched = self._waited = 0
        self._window += 1
        self._found.clear()

    # --- the decision

    def _decide(self, step: int, left: int | None) -> ShareChange | None:
        now, due, self._due = self._plan, self._due, False
        self._recently = [then for then in self._recently if step - then < QUIET_STEPS]
        self._backoff = self._backoff if self._recently else 1.0
        assert now is not None
        if self._window > SETTLED and (self.settings.mode == "once" or (self.settings.mode == "epoch" and not due)):
            return None
        if self.settings.policy == "ratio":
            return self._decide_by_ratio(step, now)
        costs = self._speeds.costs(now.members)
        times = [cost.seconds(share) for cost, share in zip(costs, now.shares, strict=True)]
        now_s = max(times)
        least_gain = self._least_gain(now, times.index(now_s))
        # Somebody's share will not shrink, so the step cannot become shorter than the shortest time.
        if now_s <= 0 or 1 - min(times) / now_s < least_gain:
            self._best = now.shares if self._best is None else self._best
            self._speeds.familiar(now.members)
            return None
        wanted = self._wanted(now, costs, least_gain)
        then_s = slowest(costs, wanted)
        back = self._slower_than_best(now)
        if back is not None and then_s > back / SLOWER:
            assert self._best is not None
            self._backoff *= 2
            return self._change(step, now, self._best, costs, "the last change made steps slower")
        gain = 1 - then_s / now_s
        steps_left = HORIZON_STEPS if left is None else left
        least_gain += self._leap(now, wanted)
        if wanted == now.shares or gain < least_gain or gain * steps_left < WORTH * COST_STEPS:
            self._speeds.familiar(now.members)
            return None
        return self._change(step, now, wanted, costs, "")

    def _wanted(self, now: _SharePlan, costs: Sequence[CostCurve], least_gain: float) -> Shares:
        """The best shares within one change; a member is parked only if that is plainly better than a single sample."""
        lows, highs = self._near(now)
        wanted = shares_split.by_cost(now.size, costs, lows, highs)
        lows = [max(low, min(1, had, high)) for low, had, high in zip(lows, now.shares, highs, strict=True)]
        if sum(lows) >= now.size or all(share >= low for share, low in zip(wanted, lows, strict=True)):
            return wanted
        kept = shares_split.by_cost(now.size, costs, lows, highs)
        gain = max(least_gain, PARKING, 2 * self._speeds.noise(now.members))
        return kept if slowest(costs, wanted) > slowest(costs, kept) * (1 - gain) else wanted

    def _leap(self, now: _SharePlan, wanted: Shares) -> float:
        """How much of the gain to doubt because shares grow beyond what was measured."""
        leap = 0.0
        for name, had, share in zip(now.members, now.shares, wanted, strict=True):
            points = self._speeds.of(name).speed.points
            if had and points and share > points[-1].samples:
                leap = max(leap, LEAP * (share / points[-1].samples - 1))
        return min(leap, LEAP)

    def _decide_by_ratio(self, step: int, now: _SharePlan) -> ShareChange | None:
        """The ancestors' law: b' = b·mean(t)/t."""
        seconds = []
        for name, share in zip(now.members, now.shares, strict=True):
            point = self._speeds.of(name).speed.point(share)
            seconds.append(point.seconds if point is not None else 0.0)
        told = [one for one in seconds if one > 0]
        if not told:
            return None
        mean_s = 0.0
        for one in told:
            mean_s += one / len(told)
        if all(abs(one - mean_s) <= self.settings.threshold * mean_s for one in told):
            return None
        weights = [
            int(share * (mean_s / one if one else 1.0) * 2**20) for share, one in zip(now.shares, seconds, strict=True)
        ]
        lows, highs = self._bounds(now.size, now.members)
        lows = [max(low, min(1, high)) for low, high in zip(lows, highs, strict=True)]
        wanted = shares_split.by_weight(now.size, weights, lows, highs)
        return None if wanted == now.shares else self._change(step, now, wanted, self._speeds.costs(now.members), "")

    def _near(self, now: _SharePlan) -> tuple[list[int], list[int]]:
        """The bounds of one change: nobody's share more than doubles or halves, unless little is known of it."""
        lows, highs = self._bounds(now.size, now.members)
        little = max(1, now.size // (4 * len(now.members)))
        near_lows, near_highs = [], []
        for name, share, low, high in zip(now.members, now.shares, lows, highs, strict=True):
            high = max(low, min(high, little)) if share == 0 else high
            free = self._window <= FREE or self._speeds.of(name).fresh or share == 0
            near_lows.append(low if free else max(low, min(share // AT_MOST, high)))
            near_highs.append(high if free else max(low, min(share * AT_MOST, high)))
        return (near_lows, near_highs) if sum(near_highs) >= now.size >= sum(near_lows) else (lows, highs)

    def _slower_than_best(self, now: _SharePlan) -> float | None:
        """Remember the best shares so far; returns their seconds if those in force are measured to be slower."""
        now_s = self._speeds.measured_s(now.members, now.shares)
        best_s = self._speeds.measured_s(now.members, self._best) if self._best is not None else None
        if now_s is None:
            return None
        if best_s is None or now_s <= best_s:
            self._best = now.shares
            return None
        slower = max(SLOWER, 1 + self._speeds.doubt(now.members, now.shares))
        return best_s if now_s > slower * best_s else None

    def _least_gain(self, now: _SharePlan, rank: int) -> float:
        doubt = self._speeds.doubt(now.members[rank : rank + 1], now.shares[rank : rank + 1])
        return max(self.settings.threshold, doubt) * (self._backoff + len(self._recently) / 2)

    def _change(self, step: int, now: _SharePlan, wanted: Shares, costs: Sequence[CostCurve], why: str) -> ShareChange:
        then = step + 1 + self.ahead
        self._next = _SharePlan(then, now.size, now.members, wanted)
        self._trial = None
        if self._window > SETTLED:
            self._recently = [*self._recently[-3:], step]
        self._speeds.familiar(now.members)
        for name, share in zip(now.members, wanted, strict=True):
            one = self._speeds.of(name)
            one.parked_at = (one.parked_at if one.parked_at is not None else then) if share == 0 else None
        self.reason = reason(now.members, now.shares, wanted, costs, why)
        return ShareChange(then, dict(zip(now.members, wanted, strict=True)), self.reason)

    def _try_parked(self, step: int, now: _SharePlan) -> None:
        """Now and then a parked member computes a little of one step, as rarely as that is cheap."""
        if self._next is not None or self.settings.policy != "model" or (self._trial and step <= self._trial[0]):
            return
        for rank, (name, share) in enumerate(zip(now.members, now.shares, strict=True)):
            one = self._speeds.of(name)
            if share or one.limit == 0:
                continue
            if one.parked_at is None:
                one.parked_at = step
            if step - one.parked_at < TRIAL_STEPS:
                continue
            costs = self._speeds.costs(now.members)
            times = min(costs[rank].seconds(1) / slowest(costs, now.shares), 1e9)
            if step - one.parked_at >= times / TRIAL_COST:
                one.parked_at = step
                self._trial = (step + 1 + self.ahead, name)
                return

    # --- other global batches

    def step_seconds(self, size: int, members: Sequence[str]) -> float:
        """What the slowest of these members would take for a global batch of another size, well shared out."""
        costs = self._speeds.costs(members)
        return slowest(costs, shares_split.by_cost(size, costs, *self._bounds(size, members)))

    def knows_fixed_costs(self, members: Sequence[str]) -> bool:
        """Whether everybody's fixed cost can be told from the cost of a sample: two sizes of each were measured."""
        held = [self._speeds.get(name) for name in members]
        return all(one is not None and len(one.speed.points) > 1 for one in held)

    def reset_shares(self) -> None:
        """The global batch has another size from now on: what is known of the members stays, their shares do not."""
        self._plan = self._next = self._best = self._trial = None
        self._found.clear()

    # --- what is shown

    def stats(self) -> ShareStats:
        """The figures of the shares in force, by what is known now."""
        now = self._plan
        if now is None:
            return ShareStats({}, 0.0, 0.0, 0.0)
        costs = self._speeds.costs(now.members)
        known = any(self._speeds.of(name).speed.measured for name in now.members)
        per_sample = {
            name: cost.seconds(share) / share if share else cost.seconds(1)
            for name, share, cost in zip(now.members, now.shares, costs, strict=True)
        }
        equal = shares_split.EqualShares().shares(now.size, len(now.members))
        if not known:
            return ShareStats({}, 0.0, 0.0, 0.0)
        return ShareStats(per_sample, slowest(costs, now.shares), idle(costs, now.shares), idle(costs, equal))

    # --- state

    def state_dict(self) -> dict[str, Any]:
        """All of it in plain values, small enough for every snapshot."""
        return {
            "plan": _listed(self._plan),
            "next": _listed(self._next),
            "best": list(self._best) if self._best else None,
            "counts": [self._window, self._matched, self._waited, self._smaller, self._epoch, int(self._due)],
            "backoff": self._backoff,
            "recently": self._recently,
            "trial": list(self._trial) if self._trial else None,
            "reason": self.reason,
            "speeds": self._speeds.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._plan, self._next = _unlisted(state["plan"]), _unlisted(state["next"])
        best, trial = state["best"], state["trial"]
        self._best = tuple(best) if best else None
        self._window, self._matched, self._waited, self._smaller, self._epoch, due = state["counts"]
        self._due = bool(due)
        self._backoff, self.reason = state["backoff"], state["reason"]
        self._trial = (trial[0], trial[1]) if trial else None
        self._recently = list(state["recently"])
        self._speeds.load_state_dict(state["speeds"])
        self._found.clear()


def _listed(one: _SharePlan | None) -> list[Any] | None:
    return None if one is None else [one.step, one.size, list(one.members), list(one.shares)]


def _unlisted(values: list[Any] | None) -> _SharePlan | None:
    return None if values is None else _SharePlan(values[0], values[1], tuple(values[2]), tuple(values[3]))


def _shrunk(size: int, shares: Shares) -> Shares:
    return shares_split.split(size, shares)
