"""What shares mean: the seconds of a step, the time that is waited away, and why they changed, for people to read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.core.shares.cost_curve import CostCurve
from shoal.core.shares.member_speed import usual
from shoal.core.shares.split import Shares

NAMED, SOME = 8, 3


@dataclass(frozen=True, slots=True)
class ShareStats:
    """What a display shows: figures by member, and the part of its time that an average member waits."""

    sample_s: dict[str, float]
    step_s: float
    idle: float
    idle_if_equal: float


def slowest(costs: Sequence[CostCurve], shares: Sequence[int]) -> float:
    """The seconds of a step: those of the last to finish."""
    return max(cost.seconds(share) for cost, share in zip(costs, shares, strict=True))


def idle(costs: Sequence[CostCurve], shares: Sequence[int]) -> float:
    """The part of its time that an average member waits for the last."""
    step_s, busy = slowest(costs, shares), 0.0
    for cost, share in zip(costs, shares, strict=True):
        busy += cost.seconds(share) / len(costs)
    return 1 - busy / step_s if step_s > 0 else 0.0


def reason(members: Sequence[str], now: Shares, wanted: Shares, costs: Sequence[CostCurve], why: str = "") -> str:
    """A sentence such as "lab/1 takes 3.9 ms a sample, the others 1.0: 51, 13 instead of 32, 32; step 64 → 41 ms"."""
    if not why:
        each = [cost.seconds(max(share, 1)) / max(share, 1) for cost, share in zip(costs, now, strict=True)]
        odd = max(range(len(each)), key=lambda rank: (abs(each[rank] / usual(each) - 1), -rank))
        others = usual([one for rank, one in enumerate(each) if rank != odd] or each)
        why = f"{members[odd]} takes {_ms(each[odd])} a sample, the others {_ms(others)}"
    step = f"step {_ms(slowest(costs, now))} → {_ms(slowest(costs, wanted))}"
    return f"{why}: {_instead(members, now, wanted)}; {step}"


def _instead(members: Sequence[str], now: Shares, wanted: Shares) -> str:
    """New and old shares in the order of ranks; of many members, those that change the most."""
    if len(wanted) <= NAMED:
        return f"{', '.join(map(str, wanted))} instead of {', '.join(map(str, now))}"
    each = list(zip(members, wanted, now, strict=True))
    changed = sorted((one for one in each if one[1] != one[2]), key=lambda one: (-abs(one[1] - one[2]), one[0]))
    told = ", ".join(f"{name} {new} instead of {old}" for name, new, old in changed[:SOME])
    return told + (f" and {len(changed) - SOME} more changes" if len(changed) > SOME else "")


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 10 else f"{seconds:.3g} s"
