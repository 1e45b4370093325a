"""Statistics of shares for users: seconds per step, idle time, and the reason for a change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.core.nouns import plural
from shoal.core.shares.cost_curve import CostCurve
from shoal.core.shares.member_speed import robust_mean
from shoal.core.shares.split import Shares

# Up to this many members, a reason lists all shares; beyond, only the largest changes.
MAX_LISTED, LARGEST_LISTED = 8, 3
# Members whose seconds per sample differ by less are described by one figure.
SIMILAR = 1.1


@dataclass(frozen=True, slots=True)
class ShareStats:
    """Figures to display: seconds per sample by member, seconds per step, and idle fractions.

    `idle` is the fraction of a step that an average member waits for the slowest; `idle_if_equal` is the same with
    equal shares.
    """

    sample_s: dict[str, float]
    step_s: float
    idle: float
    idle_if_equal: float


def slowest_s(costs: Sequence[CostCurve], shares: Sequence[int]) -> float:
    """Return the seconds of a step: those of the slowest member."""
    return max(cost.seconds(share) for cost, share in zip(costs, shares, strict=True))


def idle_fraction(costs: Sequence[CostCurve], shares: Sequence[int]) -> float:
    """Return the fraction of a step that an average member waits for the slowest."""
    step_s, busy_s = slowest_s(costs, shares), 0.0
    for cost, share in zip(costs, shares, strict=True):
        busy_s += cost.seconds(share) / len(costs)
    return 1 - busy_s / step_s if step_s > 0 else 0.0


def describe_change(members: Sequence[str], old: Shares, new: Shares, costs: Sequence[CostCurve], why: str = "") -> str:
    """Return a sentence such as "lab/1 takes 3.9 ms a sample, the others 1.0 ms: 51, 13 instead of 32, 32; step …".

    Without a reason `why`, it names the member whose speed differs most from the typical one.
    """
    if not why:
        sample_s = [cost.seconds(max(share, 1)) / max(share, 1) for cost, share in zip(costs, old, strict=True)]
        typical_s = robust_mean(sample_s)
        odd = max(range(len(sample_s)), key=lambda rank: (abs(sample_s[rank] / typical_s - 1), -rank))
        others = _range([seconds for rank, seconds in enumerate(sample_s) if rank != odd] or sample_s)
        why = f"{members[odd]} takes {_ms(sample_s[odd])} a sample, the others {others}"
    step = f"step {_ms(slowest_s(costs, old))} → {_ms(slowest_s(costs, new))}"
    return f"{why}: {_describe_shares(members, old, new)}; {step}"


def _range(seconds: Sequence[float]) -> str:
    low, high = min(seconds), max(seconds)
    return _ms(robust_mean(seconds)) if high <= SIMILAR * low else f"{_ms(low)} to {_ms(high)}"


def _describe_shares(members: Sequence[str], old: Shares, new: Shares) -> str:
    """Return new and old shares in rank order; of many members, those that change most."""
    if len(new) <= MAX_LISTED:
        return f"{', '.join(map(str, new))} instead of {', '.join(map(str, old))}"
    changes = [(-abs(b - a), name, b, a) for name, b, a in zip(members, new, old, strict=True) if a != b]
    largest = ", ".join(f"{name} {b} instead of {a}" for _, name, b, a in sorted(changes)[:LARGEST_LISTED])
    rest = len(changes) - LARGEST_LISTED
    return largest + (f" and {rest} more {plural(rest, 'change')}" if rest > 0 else "")


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 10 else f"{seconds:.3g} s"
