"""Budget rules: what a run may request, which machines it gives up as money runs low, and when it must stop.

Two periods decide. While the remaining budget pays for all machines for `HORIZON_S`, nothing happens. After that the
most expensive machines are released one after the other, down to the minimum that the run needs. The last `RESERVE_S`
of that minimum is never spent on training: it pays for the final checkpoint and for releasing the machines.
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
    """A machine that a run would keep: its price, the slots that the run uses, and whether its agent is connected."""

    allocation: str
    price_per_h: float
    slots: int
    running: bool


def can_pay(remaining: float, price_per_h: float, seconds: float) -> bool:
    """Return whether the remaining budget pays a price for so long; a price of 0 can always be paid."""
    return price_per_h <= 0.0 or remaining * HOUR_S >= price_per_h * seconds


def lasts_s(remaining: float, price_per_h: float) -> float:
    """Return for how many seconds the remaining budget pays a price."""
    return max(0.0, remaining) * HOUR_S / price_per_h if price_per_h > 0.0 else float("inf")


def unaffordable(
    machines: Sequence[AffordableMachine], remaining: float, other_roles_per_h: float, min_slots: int
) -> list[str]:
    """Return the machines to give up, most expensive first, until the rest can be paid for the horizon.

    The running machines always keep `min_slots` slots. `machines` is in order of preference; `other_roles_per_h` is
    what the run pays for its other roles.

    >>> machines = [AffordableMachine("a", 1.0, 1, True), AffordableMachine("b", 3.0, 1, True)]
    >>> unaffordable(machines, remaining=0.5, other_roles_per_h=0.0, min_slots=1)
    ['b']
    """
    kept = list(machines)
    for machine in sorted(reversed(machines), key=lambda machine: -machine.price_per_h):
        if machine.price_per_h <= 0.0 or can_pay(remaining, other_roles_per_h + _rate(kept), HORIZON_S):
            break
        others = [other for other in kept if other is not machine]
        enough = others if not machine.running else [other for other in others if other.running]
        if sum(other.slots for other in enough) >= min_slots:
            kept = others
    return [machine.allocation for machine in machines if machine not in kept]


def may_request(remaining: float, rate_per_h: float, price_per_h: float, *, essential: bool) -> bool:
    """Return whether a run that already pays `rate_per_h` may request one more machine.

    `essential` means that the run cannot continue without it: then the reserve is enough.
    """
    return price_per_h <= 0.0 or can_pay(remaining, rate_per_h + price_per_h, RESERVE_S if essential else HORIZON_S)


def _rate(machines: Iterable[AffordableMachine]) -> float:
    return sum(machine.price_per_h for machine in machines)
