"""Costs of machines: what each run and pool has spent, and saved compared with on-demand machines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class MachineCharge:
    """Usage of one machine of a pool for so many seconds.

    `on_demand_per_h` is the price of a comparable machine that is never preempted, 0 if unknown. `in_use` means that
    its agent was connected and some run needed it.
    """

    pool: str
    price_per_h: float
    on_demand_per_h: float
    seconds: float
    in_use: bool = True


@dataclass(frozen=True, slots=True)
class MachineCost:
    """Machine seconds, the money spent on them, and the money saved compared with on-demand machines.

    `unused` is the part spent on machines that were still starting, or already being released; `lost` counts the
    machines that were lost.
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
    """Costs by run and pool; the key "" holds the costs of machines that no run used at the time."""

    runs: Mapping[str, Mapping[str, MachineCost]] = field(default_factory=dict)

    def of_run(self, run: str) -> MachineCost:
        """Return the costs of a run in all pools."""
        return sum(self.runs.get(run, {}).values(), MachineCost())

    def of_pool(self, pool: str) -> MachineCost:
        """Return the costs of a pool for all runs."""
        return sum((pools.get(pool, MachineCost()) for pools in self.runs.values()), MachineCost())

    @property
    def total(self) -> MachineCost:
        """The costs of all runs."""
        return sum((self.of_run(run) for run in self.runs), MachineCost())


def charge(account: Account, usage: MachineCharge, slots_by_run: Mapping[str, int]) -> Account:
    """Return the account with a machine's usage divided among its runs, by the slots of each.

    >>> charge(Account(), MachineCharge("spot", 3.6, 0.0, 1000.0), {"a": 3, "b": 1}).of_run("a").spent
    0.75
    """
    total = sum(slots_by_run.values())
    parts = {run: slots / total for run, slots in slots_by_run.items()} if total else {"": 1.0}
    return _add(account, usage.pool, {run: _cost_of(usage, part) for run, part in parts.items()})


def count_loss(account: Account, pool: str, runs: Iterable[str]) -> Account:
    """Return the account with one lost machine counted for every run that used it."""
    return _add(account, pool, dict.fromkeys(runs, MachineCost(lost=1)))


def _add(account: Account, pool: str, costs: Mapping[str, MachineCost]) -> Account:
    runs = {run: dict(pools) for run, pools in account.runs.items()}
    for run, cost in costs.items():
        pools = runs.setdefault(run, {})
        pools[pool] = pools.get(pool, MachineCost()) + cost
    return replace(account, runs=runs)


def _cost_of(usage: MachineCharge, part: float) -> MachineCost:
    seconds = usage.seconds * part
    saved_per_h = max(0.0, usage.on_demand_per_h - usage.price_per_h) if usage.on_demand_per_h else 0.0
    spent = seconds * usage.price_per_h / HOUR_S
    return MachineCost(seconds, spent, seconds * saved_per_h / HOUR_S, 0.0 if usage.in_use else spent)
