"""Share policies: which shares to use, given what is known of the members' speeds.

Pure functions of the settings, the speed table and the plan in force; `balancer` decides when to call them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from shoal.core.nouns import counted
from shoal.core.shares import split
from shoal.core.shares.cost_curve import CostCurve
from shoal.core.shares.machines import facts_of
from shoal.core.shares.settings import ShareSettings
from shoal.core.shares.speed_table import SpeedTable
from shoal.core.shares.split import Shares
from shoal.core.shares.stats import slowest_s

# Largest factor by which one change grows or shrinks a share once the first windows are over.
MAX_FACTOR = 2
# Most of the predicted gain that is doubted because a share grows beyond any measured size.
MAX_EXTRAPOLATION_DOUBT = 0.1
# A member is parked only for a larger gain: without a share it is hardly measured, so an error would last.
MIN_PARKING_GAIN = 0.1
# A change costs about one step of data that was read ahead in vain, and must gain this many times as much in the steps
# that follow; if their number is unknown, it must pay within the horizon.
CHANGE_COST_STEPS = 1.0
MIN_PAYBACK = 1.5
DEFAULT_HORIZON_STEPS = 100


class SharePlan(NamedTuple):
    """Shares of members in rank order, for one global batch size, valid from `step` on."""

    step: int
    size: int
    members: tuple[str, ...]
    shares: Shares


def share_bounds(
    settings: ShareSettings, size: int, members: Sequence[str], catching_up: Collection[int] = ()
) -> tuple[list[int], list[int]]:
    """Return the least and the largest share of every member; those that are catching up get none.

    If all maxima together are less than the batch, they grow in proportion: the batch must be computed all the same,
    and a share above its maximum is computed in micro-batches.
    """
    lowest, highest = settings.bounds(size, len(members) - len(catching_up))
    lows, highs = [], []
    for rank, name in enumerate(members):
        declared = facts_of(name, settings.machines).max
        high = 0 if rank in catching_up else highest if declared is None else min(highest, declared)
        # A member's memory limit takes precedence over shares.min.
        lows.append(min(lowest, high))
        highs.append(high)
    total = sum(highs)
    return lows, highs if total >= size or not total else [-(-high * size // total) for high in highs]


def overruled_bounds(settings: ShareSettings, size: int, members: Sequence[str], min_members: int) -> str:
    """Return which bounds cannot be kept with these members, or with the fewest that the run may have; else empty."""
    lowest, highest = settings.bounds(size, len(members))
    maxima = [min(highest, settings.most_at_once(name) or highest) for name in members]
    notes = []
    them = counted(len(members), "member")
    if sum(maxima) < size:
        notes.append(
            f"the largest shares of {them} sum to {sum(maxima)} of {size} samples: shares exceed them, "
            "in micro-batches that do not"
        )
    elif settings.max > 1 and min_members * highest < size:
        notes.append(
            f"with fewer than {counted(-(-size // highest), 'member')} (MIN is {min_members}) shares will exceed "
            f"shares.max={highest}, in micro-batches that do not"
        )
    if lowest * len(members) > size:
        notes.append(f"shares.min={settings.min:g} of {them} exceeds the batch of {size}: shares are smaller")
    return "; ".join(notes)


def initial_shares(
    settings: ShareSettings, speeds: SpeedTable, size: int, members: Sequence[str], catching_up: Collection[int] = ()
) -> Shares:
    """Return the best shares for a new set of members or another batch size."""
    lows, highs = share_bounds(settings, size, members, catching_up)
    if not settings.adapts:
        weights = [0 if rank in catching_up else w for rank, w in enumerate(settings.weights_of(members))]
        return split.by_weight(size, weights, lows, highs)
    costs, noise = speeds.costs(members), speeds.noise(members)
    tolerance = max(settings.threshold, noise)
    shares = split.prefer_even(size, costs, lows, highs, tolerance)
    # Measurements of another world are too weak a reason to park a member for a small gain.
    unparked_lows = _at_least_one(lows, highs)
    if all(share >= low for share, low in zip(shares, unparked_lows, strict=True)) or sum(unparked_lows) >= size:
        return shares
    without_parking = split.prefer_even(size, costs, unparked_lows, highs, tolerance)
    return _cheaper_by(max(MIN_PARKING_GAIN, 2 * noise), costs, shares, without_parking)


def faster_shares(
    settings: ShareSettings,
    speeds: SpeedTable,
    plan: SharePlan,
    costs: Sequence[CostCurve],
    min_gain: float,
    *,
    unbounded: bool,
) -> Shares:
    """Return the fastest shares within one change; a member is parked only for a clear gain over a single sample."""
    lows, highs = _bounds_of_one_change(settings, speeds, plan, unbounded=unbounded)
    shares = split.by_cost(plan.size, costs, lows, highs)
    lows = [max(low, min(1, share, high)) for low, share, high in zip(lows, plan.shares, highs, strict=True)]
    if sum(lows) >= plan.size or all(share >= low for share, low in zip(shares, lows, strict=True)):
        return shares
    without_parking = split.by_cost(plan.size, costs, lows, highs)
    gain = max(min_gain, MIN_PARKING_GAIN, 2 * speeds.noise(plan.members))
    return _cheaper_by(gain, costs, shares, without_parking)


def ratio_shares(settings: ShareSettings, speeds: SpeedTable, plan: SharePlan) -> Shares | None:
    """Return shares by the ratio law b' = b·mean(t)/t; None within the dead band, or if nothing was measured."""
    seconds = []
    for name, share in zip(plan.members, plan.shares, strict=True):
        point = speeds.profile(name).speed.point(share)
        seconds.append(point.seconds if point is not None else 0.0)
    measured = [member_s for member_s in seconds if member_s > 0]
    if not measured:
        return None
    mean_s = 0.0
    for member_s in measured:
        mean_s += member_s / len(measured)
    if all(abs(member_s - mean_s) <= settings.threshold * mean_s for member_s in measured):
        return None
    weights = [
        int(share * (mean_s / member_s if member_s else 1.0) * 2**20)
        for share, member_s in zip(plan.shares, seconds, strict=True)
    ]
    lows, highs = share_bounds(settings, plan.size, plan.members)
    return split.by_weight(plan.size, weights, _at_least_one(lows, highs), highs)


def extrapolation_doubt(speeds: SpeedTable, plan: SharePlan, shares: Shares) -> float:
    """Return how much of a gain to doubt because shares grow beyond the sizes that were measured."""
    doubt = 0.0
    for name, old, new in zip(plan.members, plan.shares, shares, strict=True):
        points = speeds.profile(name).speed.points
        if old and points and new > points[-1].samples:
            doubt = max(doubt, MAX_EXTRAPOLATION_DOUBT * (new / points[-1].samples - 1))
    return min(doubt, MAX_EXTRAPOLATION_DOUBT)


def pays_back(gain: float, steps_left: int | None) -> bool:
    """Return whether a gain per step outweighs the cost of a change in the steps that are left."""
    steps = DEFAULT_HORIZON_STEPS if steps_left is None else steps_left
    return gain * steps >= MIN_PAYBACK * CHANGE_COST_STEPS


def _bounds_of_one_change(
    settings: ShareSettings, speeds: SpeedTable, plan: SharePlan, *, unbounded: bool
) -> tuple[list[int], list[int]]:
    """Return bounds within `MAX_FACTOR` of each share, unless `unbounded` or little is known of the member."""
    lows, highs = share_bounds(settings, plan.size, plan.members)
    first_share = max(1, plan.size // (4 * len(plan.members)))
    near_lows, near_highs = [], []
    for name, share, low, high in zip(plan.members, plan.shares, lows, highs, strict=True):
        high = max(low, min(high, first_share)) if share == 0 else high
        free = unbounded or speeds.profile(name).fresh or share == 0
        near_lows.append(low if free else max(low, min(share // MAX_FACTOR, high)))
        near_highs.append(high if free else max(low, min(share * MAX_FACTOR, high)))
    return (near_lows, near_highs) if sum(near_highs) >= plan.size >= sum(near_lows) else (lows, highs)


def _at_least_one(lows: Sequence[int], highs: Sequence[int]) -> list[int]:
    return [max(low, min(1, high)) for low, high in zip(lows, highs, strict=True)]


def _cheaper_by(gain: float, costs: Sequence[CostCurve], shares: Shares, fallback: Shares) -> Shares:
    """Return `shares` if a step with them is faster by at least `gain` than with `fallback`, else `fallback`."""
    return fallback if slowest_s(costs, shares) > slowest_s(costs, fallback) * (1 - gain) else shares
