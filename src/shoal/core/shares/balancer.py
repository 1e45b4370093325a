"""Share balancer: which share of every global batch each member computes, and when that changes.

*The problem.* A step ends when the slowest member has finished its share. With equal shares, one member that is four
times slower makes every step four times longer. So member i gets a share b_i such that all finish at about the same
time. Speeds differ between machines, change when a neighbour appears, and are measured with noise.

*The cost model.* Member i takes t_i(b) = a_i·ceil(b/m_i) + c_i·b seconds for b samples, m_i at a time (what fits into
memory). `member_speed` fits a_i, c_i ≥ 0 by least squares of the relative error over the last 8 distinct sizes,
discounted by age. With one size measured, the ratio a/c of the other members is assumed, or a = 0.

*The split.* `split.by_cost` finds by bisection the time T with Σ clip((T - a_i)/c_i, low_i, high_i) = B, rounds down,
and hands out the rest one by one to the member that would finish it first. So Σ b_i = B exactly, and no upper bound
is exceeded. When the upper bounds of the members that are left sum to less than B, `share_policy.share_bounds` raises
them in proportion, because the batch must be computed all the same; a share above its bound is computed in
micro-batches within it. `newly_overruled_bounds` says so.

*Agreement.* No shares are ever sent. Every member of a world holds a balancer and feeds it the same measurements,
which travel with the step reports, at the same commits; equal inputs give equal bits, hence equal shares. A change
decided at the commit of step k holds from step k + 1 + `ahead`, because the data of the steps before has been read
ahead. When the members change, new shares are computed at once from what is known. The state is in every snapshot, so
a joiner continues like the others.

*When a change pays.* Measurements are collected in windows (`measurement_window`). At the end of one, new shares are
adopted if the predicted gain exceeds max(`threshold`, what noise explains), raised after recent changes so that shares
do not oscillate, and if it repays the cost of a change in the remaining steps (`share_policy.pays_back`). After the
first windows a share at most doubles or halves, because curves are reliable only near measured sizes. If a change turns
out to make steps more than 3 % slower than the best shares so far, those come back, and the threshold doubles.

*Jumps.* A CUSUM test on every member's step times notices within about three steps that its speed changed. The window
then closes at once, that member's curve is rescaled, and its share may change by any factor.

*Parking.* A member whose fixed cost alone makes steps slower gets a share of 0; `parking` probes it now and then.

*The ratio law.* With policy `ratio`, shares follow b' = b·mean(t)/t with a dead band, as earlier systems did; it is
kept for comparison. `equal` and `fixed` do not adapt.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from shoal.core.shares import parking, share_policy, split
from shoal.core.shares.cost_curve import CostCurve
from shoal.core.shares.measurement_window import FIRST_WINDOWS, SETTLED, MeasurementWindow
from shoal.core.shares.settings import ShareSettings, parse
from shoal.core.shares.share_policy import SharePlan
from shoal.core.shares.speed_table import MemberProfile, SpeedTable, StepMeasurement
from shoal.core.shares.split import Shares
from shoal.core.shares.stats import ShareStats, describe_change, idle_fraction, slowest_s

__all__ = ["FIRST_WINDOWS", "ShareBalancer", "ShareChange", "ShareSettings", "ShareStats", "StepMeasurement", "parse"]

# Windows after which a share may no longer change by any factor.
UNBOUNDED_WINDOWS = 3
# New shares whose measured step is slower than the best by this factor are reverted.
REVERT_IF_SLOWER = 1.03
# Changes within so many steps raise the gain that the next one needs.
RECENT_CHANGE_STEPS = 200
MAX_RECENT_CHANGES = 4


@dataclass(frozen=True, slots=True)
class ShareChange:
    """New shares by member, the step from which they hold, and the reason."""

    step: int
    shares: dict[str, int]
    reason: str


class ShareBalancer:
    """The shares in force, the next ones, and the speeds of the members.

    `ahead` is how many steps of data are read ahead. `allow_single_sample` may be cleared for models that cannot train
    on one sample, such as those with batch normalisation. `min_members` is the fewest that the run may have.
    """

    def __init__(
        self, settings: ShareSettings | None = None, ahead: int = 0, first_windows: tuple[int, ...] = FIRST_WINDOWS
    ) -> None:
        self.settings = settings or ShareSettings()
        self.ahead = ahead
        self.allow_single_sample = True
        self.min_members = 1
        self.reason = ""
        self._first_windows = first_windows
        self._speeds = SpeedTable()
        self._window = MeasurementWindow()
        self._plan: SharePlan | None = None
        self._next: SharePlan | None = None
        self._best: Shares | None = None
        # The step of the next probe and the parked member that it measures.
        self._probe: tuple[int, str] | None = None
        self._overruled = ""
        self._smaller_batches = 0
        self._epoch = 0
        self._epoch_started = False
        self._threshold_factor = 1.0
        self._recent_changes: list[int] = []
        self._cache: dict[tuple[int, tuple[str, ...], tuple[int, ...]], Shares] = {}

    # --- facts about members

    def set_speed_estimate(self, member: str, speed: float) -> None:
        """Set the relative speed that an agent's benchmark found; it counts until the member has been measured."""
        if 0 < speed < inf and self._speeds.profile(member).speed.estimate != speed:
            self._speeds.profile(member).set_estimate(float(speed))
            self._cache.clear()

    def set_micro_batch(self, member: str, samples: int | None) -> None:
        """Set how many samples a member computes at a time; None if it computes its share at once."""
        if self._speeds.profile(member).speed.micro != samples:
            self._speeds.set_micro_batch(member, samples)
            self._cache.clear()

    def micro_batch_of(self, member: str) -> int | None:
        """Return how many samples a member computes at a time, as last reported; None if at once."""
        profile = self._speeds.get(member)
        return profile.speed.micro if profile is not None else None

    # --- shares

    def shares(self, step: int, size: int, members: Sequence[str], catching_up: Collection[int] = ()) -> Shares:
        """Return the share of every rank in a step, summing to `size`; ranks that are catching up have none."""
        shares = self._shares(step, size, members, catching_up)
        if self.allow_single_sample or 1 not in shares:
            return shares
        _, highs = share_policy.share_bounds(self.settings, size, members, catching_up)
        return split.without_singles(shares, highs)

    def _shares(self, step: int, size: int, members: Sequence[str], catching_up: Collection[int]) -> Shares:
        plan = self._plan
        if self._next is not None and step >= self._next.step:
            plan = self._next
        if not catching_up and plan is not None and plan.size == size and plan.members == tuple(members):
            if self._probe is not None and self._probe[0] == step:
                return parking.with_probe(plan, self._probe[1], 1 if self.allow_single_sample else 2)
            return plan.shares
        key = (size, tuple(members), tuple(sorted(catching_up)))
        if plan is not None and plan.members == key[1] and size < plan.size and not catching_up:
            return split.split(size, plan.shares)
        shares = self._cache.get(key)
        if shares is None:
            shares = self._cache[key] = share_policy.initial_shares(self.settings, self._speeds, *key)
        return shares

    def newly_overruled_bounds(self, size: int, members: Sequence[str]) -> str:
        """Return which bounds of shares cannot be kept, once for every such sentence; else empty."""
        plan = self._plan
        if not size or (plan is not None and size < plan.size):
            return ""  # the short last batch of an epoch says nothing about the bounds
        before, self._overruled = (
            self._overruled,
            share_policy.overruled_bounds(self.settings, size, members, self.min_members),
        )
        return self._overruled if self._overruled != before else ""

    # --- measurements

    def observe(
        self,
        step: int,
        members: Sequence[str],
        measurements: Sequence[StepMeasurement],
        *,
        epoch: int = 0,
        steps_left: int | None = None,
    ) -> ShareChange | None:
        """Add the measurements of a committed step; return the change of shares that they lead to, if any."""
        if epoch != self._epoch:
            self._epoch, self._epoch_started = epoch, True
        samples = tuple(measurement.samples for measurement in measurements)
        plan = self._adopt_plan(step, tuple(members), sum(samples))
        if plan is None:
            return None
        jumps = self._speeds.observe(members, measurements)
        if self._next is not None:
            return None
        self._window.count(matched=plan.shares == samples)
        change = None
        if jumps or self._window.is_full(self.settings, self._first_windows, epoch_started=self._epoch_started):
            self._close_window(jumps)
            change = self._decide(step, plan, steps_left) if self.settings.adapts else None
        if 0 in plan.shares:
            self._schedule_probe(step, plan)
        return change

    def _adopt_plan(self, step: int, members: tuple[str, ...], size: int) -> SharePlan | None:
        """Put the plan in force that a committed step was computed with, and return it."""
        if self._next is not None and step >= self._next.step:
            self._plan, self._next = self._next, None
            self._window.restart()
        plan = self._plan
        self._smaller_batches = self._smaller_batches + 1 if plan is not None and 0 < size < plan.size else 0
        lasting = self._smaller_batches > self.settings.window
        if size > 0 and (plan is None or plan.members != members or size > plan.size or lasting):
            shares = self.shares(step, size, members)
            newcomers = plan is None or not set(members) <= set(plan.members)
            self._plan, self._next, self._best, self._probe = SharePlan(step, size, members, shares), None, None, None
            self._window.restart()
            same_members = plan is None or plan.members == members
            self._window.number = 0 if newcomers or same_members else min(self._window.number, 1)
            self._cache.clear()
            self._speeds.track(members)
        return self._plan

    def _close_window(self, jumps: Sequence[tuple[MemberProfile, int]]) -> None:
        """Turn the measurements of the window into curves; after a jump, begin with short windows again."""
        if any(steps for _, steps in jumps):
            self._best, self._threshold_factor, self._recent_changes = None, 1.0, []
            self._window.number = 0 if self.settings.mode == "continuous" else self._window.number
        self._speeds.close_window(jumps)
        self._window.close()
        self._cache.clear()

    # --- the decision

    def _decide(self, step: int, plan: SharePlan, steps_left: int | None) -> ShareChange | None:
        epoch_started, self._epoch_started = self._epoch_started, False
        self._recent_changes = [then for then in self._recent_changes if step - then < RECENT_CHANGE_STEPS]
        self._threshold_factor = self._threshold_factor if self._recent_changes else 1.0
        mode = self.settings.mode
        if self._window.number > SETTLED and (mode == "once" or (mode == "epoch" and not epoch_started)):
            return None
        costs = self._speeds.costs(plan.members)
        if self.settings.policy == "ratio":
            shares = share_policy.ratio_shares(self.settings, self._speeds, plan)
            return None if shares is None or shares == plan.shares else self._change(step, plan, shares, costs, "")
        return self._decide_by_model(step, plan, costs, steps_left)

    def _decide_by_model(
        self, step: int, plan: SharePlan, costs: Sequence[CostCurve], steps_left: int | None
    ) -> ShareChange | None:
        times = [cost.seconds(share) for cost, share in zip(costs, plan.shares, strict=True)]
        step_s = max(times)
        min_gain = self._min_gain(plan, times.index(step_s))
        # Some member's share will not shrink, so no step can become shorter than the shortest time.
        if step_s <= 0 or 1 - min(times) / step_s < min_gain:
            self._best = plan.shares if self._best is None else self._best
            self._speeds.end_freshness(plan.members)
            return None
        unbounded = self._window.number <= UNBOUNDED_WINDOWS
        shares = share_policy.faster_shares(self.settings, self._speeds, plan, costs, min_gain, unbounded=unbounded)
        new_s = slowest_s(costs, shares)
        best_s = self._best_if_faster(plan)
        if best_s is not None and new_s > best_s / REVERT_IF_SLOWER:
            assert self._best is not None
            self._threshold_factor *= 2
            return self._change(step, plan, self._best, costs, "the last change made steps slower")
        gain = 1 - new_s / step_s
        min_gain += share_policy.extrapolation_doubt(self._speeds, plan, shares)
        if shares == plan.shares or gain < min_gain or not share_policy.pays_back(gain, steps_left):
            self._speeds.end_freshness(plan.members)
            return None
        return self._change(step, plan, shares, costs, "")

    def _best_if_faster(self, plan: SharePlan) -> float | None:
        """Remember the best shares so far; return their seconds if those in force are measured to be slower."""
        step_s = self._speeds.measured_s(plan.members, plan.shares)
        best_s = self._speeds.measured_s(plan.members, self._best) if self._best is not None else None
        if step_s is None:
            return None
        if best_s is None or step_s <= best_s:
            self._best = plan.shares
            return None
        slower = max(REVERT_IF_SLOWER, 1 + self._speeds.uncertainty(plan.members, plan.shares))
        return best_s if step_s > slower * best_s else None

    def _min_gain(self, plan: SharePlan, slowest: int) -> float:
        """Return the fraction of a step that a change must save, given the slowest rank and the recent changes."""
        member = slice(slowest, slowest + 1)
        uncertainty = self._speeds.uncertainty(plan.members[member], plan.shares[member])
        return max(self.settings.threshold, uncertainty) * (self._threshold_factor + len(self._recent_changes) / 2)

    def _change(self, step: int, plan: SharePlan, shares: Shares, costs: Sequence[CostCurve], why: str) -> ShareChange:
        self._next = SharePlan(step + 1 + self.ahead, plan.size, plan.members, shares)
        self._probe = None
        if self._window.number > SETTLED:
            self._recent_changes = [*self._recent_changes[1 - MAX_RECENT_CHANGES :], step]
        self._speeds.end_freshness(plan.members)
        parking.record_parked(self._speeds, self._next)
        self.reason = describe_change(plan.members, plan.shares, shares, costs, why)
        return ShareChange(self._next.step, dict(zip(plan.members, shares, strict=True)), self.reason)

    def _schedule_probe(self, step: int, plan: SharePlan) -> None:
        """Let a parked member compute a little of one step if that is due and cheap."""
        if self._next is not None or self.settings.policy != "model" or (self._probe and step <= self._probe[0]):
            return
        member = parking.due_probe(self._speeds, plan, step)
        if member is not None:
            self._probe = (step + 1 + self.ahead, member)

    # --- other global batch sizes

    def step_seconds(self, size: int, members: Sequence[str]) -> float:
        """Return the predicted seconds of a step with another global batch size, optimally shared."""
        costs = self._speeds.costs(members)
        lows, highs = share_policy.share_bounds(self.settings, size, members)
        return slowest_s(costs, split.by_cost(size, costs, lows, highs))

    def knows_fixed_costs(self, members: Sequence[str]) -> bool:
        """Return whether every member was measured at two sizes, so that fixed and per-sample costs are separable."""
        profiles = [self._speeds.get(name) for name in members]
        return all(profile is not None and len(profile.speed.points) > 1 for profile in profiles)

    def reset_shares(self) -> None:
        """Drop all plans because the global batch size changes; what is known of the members stays."""
        self._plan = self._next = self._best = self._probe = None
        self._cache.clear()

    # --- statistics and state

    def stats(self) -> ShareStats:
        """Return the statistics of the shares in force; empty before any measurement."""
        plan = self._plan
        if plan is None or not any(self._speeds.profile(name).speed.measured for name in plan.members):
            return ShareStats({}, 0.0, 0.0, 0.0)
        costs = self._speeds.costs(plan.members)
        sample_s = {
            name: cost.seconds(share) / share if share else cost.seconds(1)
            for name, share, cost in zip(plan.members, plan.shares, costs, strict=True)
        }
        equal = split.EqualShares().shares(plan.size, len(plan.members))
        idle = idle_fraction(costs, plan.shares), idle_fraction(costs, equal)
        return ShareStats(sample_s, slowest_s(costs, plan.shares), *idle)

    def state_dict(self) -> dict[str, Any]:
        """Return plain values for a snapshot, small enough for every one."""
        window = self._window
        return {
            "plan": _as_list(self._plan),
            "next": _as_list(self._next),
            "best": list(self._best) if self._best else None,
            "window": [window.number, window.matched, window.waited],
            "smaller_batches": self._smaller_batches,
            "epoch": [self._epoch, int(self._epoch_started)],
            "threshold_factor": self._threshold_factor,
            "recent_changes": self._recent_changes,
            "probe": list(self._probe) if self._probe else None,
            "reason": self.reason,
            "speeds": self._speeds.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._plan, self._next = _from_list(state["plan"]), _from_list(state["next"])
        best, probe = state["best"], state["probe"]
        self._best = tuple(best) if best else None
        self._window = MeasurementWindow(*state["window"])
        self._smaller_batches = state["smaller_batches"]
        self._epoch, self._epoch_started = state["epoch"][0], bool(state["epoch"][1])
        self._threshold_factor, self.reason = state["threshold_factor"], state["reason"]
        self._probe = (probe[0], probe[1]) if probe else None
        self._recent_changes = list(state["recent_changes"])
        self._speeds.load_state_dict(state["speeds"])
        self._cache.clear()


def _as_list(plan: SharePlan | None) -> list[Any] | None:
    return None if plan is None else [plan.step, plan.size, list(plan.members), list(plan.shares)]


def _from_list(values: list[Any] | None) -> SharePlan | None:
    return None if values is None else SharePlan(values[0], values[1], tuple(values[2]), tuple(values[3]))
