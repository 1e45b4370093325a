"""What a run may hire while it has a budget, which machines it gives back as that gets low, and when it is over.

Two times decide. As long as what is left pays all machines for `HORIZON_S`, nothing happens. Then the dearest go, one
after the other, down to the least that the run can do with. What pays those for `RESERVE_S` is never spent on training:
it is for the last checkpoint and for giving the machines back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shoal.core.provisioning.costs import HOUR_S

HORIZON_S = 600.0
RESERVE_S = 60.0
CHECK_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class AffordableMachine:
    """A machine that a run would keep: its price, how many places it gives to the run, and whether it is there yet."""

    allocation: str
    price_per_h: float
    slots: int
    running: bool


def can_pay(left: float, price_per_h: float, seconds: float) -> bool:
    """Whether what is left pays for so long; what costs nothing can always be paid."""
    return price_per_h <= 0.0 or left * HOUR_S >= price_per_h * seconds


def lasts_s(left: float, price_per_h: float) -> float:
    """How long what is left pays a price."""
    return max(0.0, left) * HOUR_S / price_per_h if price_per_h > 0.0 else float("inf")


def unaffordable(kept: Sequence[AffordableMachine], left: float, beside_per_h: float, min_slots: int) -> list[str]:
    """What has to go, the dearest first, until the rest can be paid for the horizon; never what the least needs.

    `kept` is in the order of preference, `beside_per_h` what the run pays for its other roles.

    >>> unaffordable([Kept("a", 1.0, 1, True), Kept("b", 3.0, 1, True)], left=0.5, beside_per_h=0.0, min_slots=1)
    ['b']
    """
    staying = list(kept)
    for one in sorted(reversed(kept), key=lambda one: -one.price_per_h):
        if one.price_per_h <= 0.0 or can_pay(left, beside_per_h + rate(staying), HORIZON_S):
            break
        others = [other for other in staying if other is not one]
        enough = others if not one.running else [other for other in others if other.running]
        if sum(other.slots for other in enough) >= min_slots:
            staying = others
    return [one.allocation for one in kept if one not in staying]


def may_request(left: float, rate_per_h: float, price_per_h: float, *, least: bool) -> bool:
    """Whether a run that pays so much already may have one more machine; `least` says that it cannot do without."""
    return price_per_h <= 0.0 or can_pay(left, rate_per_h + price_per_h, RESERVE_S if least else HORIZON_S)


def rate(kept: Iterable[AffordableMachine]) -> float:
    return sum(one.price_per_h for one in kept)
