"""Parking: members without a share, and the probe steps that find out whether they became faster.

A member whose fixed cost alone makes every step slower gets a share of 0. Its speed may change, so now and then it
computes a sample or two of one step. A probe makes that step slower, so it is scheduled only when its cost, spread over
the steps since the last one, stays below `PROBE_COST`.
"""

from __future__ import annotations

from shoal.core.shares.share_policy import SharePlan
from shoal.core.shares.speed_table import SpeedTable
from shoal.core.shares.split import Shares
from shoal.core.shares.stats import slowest_s

MIN_STEPS_BETWEEN_PROBES = 200
PROBE_COST = 0.01


def record_parked(speeds: SpeedTable, plan: SharePlan) -> None:
    """Record from which step on each member has no share."""
    for name, share in zip(plan.members, plan.shares, strict=True):
        profile = speeds.profile(name)
        profile.parked_at = (profile.parked_at if profile.parked_at is not None else plan.step) if share == 0 else None


def due_probe(speeds: SpeedTable, plan: SharePlan, step: int) -> str | None:
    """Return a parked member that is due for a probe, and count its wait from `step` again; None if none is due."""
    for rank, (name, share) in enumerate(zip(plan.members, plan.shares, strict=True)):
        profile = speeds.profile(name)
        if share:
            continue
        if profile.parked_at is None:
            profile.parked_at = step
        if step - profile.parked_at < MIN_STEPS_BETWEEN_PROBES:
            continue
        costs = speeds.costs(plan.members)
        relative_cost = min(costs[rank].seconds(1) / slowest_s(costs, plan.shares), 1e9)
        if step - profile.parked_at >= relative_cost / PROBE_COST:
            profile.parked_at = step
            return name
    return None


def with_probe(plan: SharePlan, member: str, samples: int) -> Shares:
    """Return the shares of a probe step: `samples` of the largest share go to the parked member."""
    shares = list(plan.shares)
    if member in plan.members and max(shares) > samples:
        shares[shares.index(max(shares))] -= samples
        shares[plan.members.index(member)] += samples
    return tuple(shares)
