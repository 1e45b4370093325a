"""What machines have cost, and what they would have cost elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class Bill:
    """So many seconds of one machine of a pool. `instead_per_h` is the price of what it stands in for, 0 if unknown."""

    pool: str
    price_per_h: float
    instead_per_h: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Cost:
    """Machine seconds, money spent on them, and money not spent because they were cheaper than others."""

    machine_s: float = 0.0
    spent: float = 0.0
    saved: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.machine_s + other.machine_s, self.spent + other.spent, self.saved + other.saved)


@dataclass(frozen=True, slots=True)
class Account:
    """The costs of each run by pool, and under "" of what no run needed at the time."""

    runs: Mapping[str, Mapping[str, Cost]] = field(default_factory=dict)

    def of_run(self, run: str) -> Cost:
        return sum(self.runs.get(run, {}).values(), Cost())

    def of_pool(self, pool: str) -> Cost:
        return sum((pools.get(pool, Cost()) for pools in self.runs.values()), Cost())

    @property
    def total(self) -> Cost:
        return sum((self.of_run(run) for run in self.runs), Cost())


def charge(account: Account, bill: Bill, shares: Mapping[str, int]) -> Account:
    """Divide a bill among the runs by how much of the machine each needed.

    >>> charge(Account(), Bill("spot", 3.6, 0.0, 1000.0), {"a": 3, "b": 1}).of_run("a").spent
    0.75
    """
    whole = sum(shares.values())
    parts = {run: share / whole for run, share in shares.items()} if whole else {"": 1.0}
    runs = {run: dict(pools) for run, pools in account.runs.items()}
    for run, part in parts.items():
        pools = runs.setdefault(run, {})
        pools[bill.pool] = pools.get(bill.pool, Cost()) + cost_of(bill, part)
    return replace(account, runs=runs)


def cost_of(bill: Bill, part: float = 1.0) -> Cost:
    seconds = bill.seconds * part
    spared = max(0.0, bill.instead_per_h - bill.price_per_h) if bill.instead_per_h else 0.0
    return Cost(seconds, seconds * bill.price_per_h / HOUR_S, seconds * spared / HOUR_S)
