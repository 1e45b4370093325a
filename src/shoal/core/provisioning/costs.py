"""What machines have cost, and what they would have cost elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class MachineCharge:
    """So many seconds of one machine of a pool. `on_demand_per_h` is the price of what it stands in for, 0 if unknown.

    `at_work` says that its agent was there and some run needed it.
    """

    pool: str
    price_per_h: float
    on_demand_per_h: float
    seconds: float
    at_work: bool = True


@dataclass(frozen=True, slots=True)
class MachineCost:
    """Machine seconds, money spent on them, and money not spent because they were cheaper than others.

    `unused` is what was spent on machines that were still starting, or already going; `lost` is how many were lost.
    """

    machine_s: float = 0.0
    spent: float = 0.0
    saved: float = 0.0
    unused: float = 0.0
    lost: int = 0

    def __add__(self, other: MachineCost) -> MachineCost:
        return MachineCost(
            self.machine_s + other.machine_s,
            self.spent + other.spent,
            self.saved + other.saved,
            self.unused + other.unused,
            self.lost + other.lost,
        )


@dataclass(frozen=True, slots=True)
class Account:
    """The costs of each run by pool, and under "" of what no run needed at the time."""

    runs: Mapping[str, Mapping[str, MachineCost]] = field(default_factory=dict)

    def of_run(self, run: str) -> MachineCost:
        return sum(self.runs.get(run, {}).values(), MachineCost())

    def of_pool(self, pool: str) -> MachineCost:
        return sum((pools.get(pool, MachineCost()) for pools in self.runs.values()), MachineCost())

    @property
    def total(self) -> MachineCost:
        return sum((self.of_run(run) for run in self.runs), MachineCost())


def charge(account: Account, bill: MachineCharge, shares: Mapping[str, int]) -> Account:
    """Divide a bill among the runs by how much of the machine each needed.

    >>> charge(Account(), Bill("spot", 3.6, 0.0, 1000.0), {"a": 3, "b": 1}).of_run("a").spent
    0.75
    """
    whole = sum(shares.values())
    parts = {run: share / whole for run, share in shares.items()} if whole else {"": 1.0}
    return _add(account, bill.pool, {run: cost_of(bill, part) for run, part in parts.items()})


def lose(account: Account, pool: str, runs: Iterable[str]) -> Account:
    """Count a machine that was lost to all who used it."""
    return _add(account, pool, dict.fromkeys(runs, MachineCost(lost=1)))


def _add(account: Account, pool: str, costs: Mapping[str, MachineCost]) -> Account:
    runs = {run: dict(pools) for run, pools in account.runs.items()}
    for run, cost in costs.items():
        pools = runs.setdefault(run, {})
        pools[pool] = pools.get(pool, MachineCost()) + cost
    return replace(account, runs=runs)


def cost_of(bill: MachineCharge, part: float = 1.0) -> MachineCost:
    seconds = bill.seconds * part
    spared = max(0.0, bill.on_demand_per_h - bill.price_per_h) if bill.on_demand_per_h else 0.0
    spent = seconds * bill.price_per_h / HOUR_S
    return MachineCost(seconds, spent, seconds * spared / HOUR_S, 0.0 if bill.at_work else spent)
