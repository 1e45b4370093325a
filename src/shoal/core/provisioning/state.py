"""The hires of a coordinator, and who has which: the needs of runs are served in their order, as far as they can pay.

Nothing is decided here: `supply` asks what there is and what that means.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shoal.core.provisioning import budget as provisioning_budget
from shoal.core.provisioning.costs import Account
from shoal.core.provisioning.events import MachineDemand, PoolInfo

REQUESTED, SUBMITTED, RUNNING, RELEASING = "requested", "submitted", "running", "releasing"
LIVE = (REQUESTED, SUBMITTED, RUNNING)


@dataclass(frozen=True, slots=True)
class ProvisioningTimeouts:
    """How long things are waited for. `min_lifetime_s` is how long an agent lives at least if its machine
    is any good."""

    surplus_s: float = 5.0
    join_s: float = 300.0
    min_lifetime_s: float = 30.0
    backoff_s: float = 5.0
    backoff_max_s: float = 600.0
    cancel_retry_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Allocation:
    """One agent of a pool. `since` is when it got where it is; its machine is paid for up to `billed_until`.

    `overdue` says that nobody counts on its coming any more, `going` that it goes by itself, after a notice;
    `unused_since` is since when no run needs it, and `unused_why` why. While its machine is made ready,
    `setup_reported_at`
    is when it last said so. `cpus` and `memory_bytes` are those of each of its places. `slots_by_run` are the runs
    that need it, or needed it last, and how many of its places.
    """

    name: str
    pool: str
    slots: int
    status: str
    since: float
    handle: str = ""
    started: bool = False
    overdue: bool = False
    leaving: bool = False
    billed_until: float | None = None
    unused_since: float | None = None
    setup_reported_at: float | None = None
    why: str = ""
    unused_why: str = ""
    cpus: int = 0
    memory_bytes: int = 0
    slots_by_run: Mapping[str, int] = field(default_factory=dict)

    @property
    def preparing(self) -> bool:
        return self.status == SUBMITTED and self.setup_reported_at is not None


@dataclass(frozen=True, slots=True)
class PoolHealth:
    """How a pool is doing. It is asked for nothing before `until`; `failures` are failures not long after each other.

    `failing_since` is since when it has taken no hire; `final` says that it never will, as it is asked; `failed_starts`
    counts the hires in a row that were gone before their agents came.
    """

    retry_at: float = 0.0
    failures: int = 0
    failed_at: float = 0.0
    why: str = ""
    where: str = ""
    do: str = ""
    unreachable_since: float | None = None
    failing_since: float | None = None
    final: bool = False
    failed_starts: int = 0


@dataclass(frozen=True, slots=True)
class ProvisioningState:
    """All pools, needs and hires of a coordinator."""

    timeouts: ProvisioningTimeouts = ProvisioningTimeouts()
    pools: Mapping[str, PoolInfo] = field(default_factory=dict)
    health: Mapping[str, PoolHealth] = field(default_factory=dict)
    demands: tuple[MachineDemand, ...] = ()
    allocations: Mapping[str, Allocation] = field(default_factory=dict)
    count: int = 0
    account: Account = field(default_factory=Account)


def users(state: ProvisioningState) -> dict[str, dict[str, int]]:
    """For each hire that lives, how many of its places which run needs, the needs served in their order."""
    found: dict[str, dict[str, int]] = {name: {} for name, hire in state.allocations.items() if hire.status in LIVE}
    for need in state.demands:
        serve(state, need, found)
    return found


@dataclass(frozen=True, slots=True)
class AssignmentResult:
    """How many places a need lacks, and the hires that it would have, if they were not too dear."""

    lacks: int
    dear: list[str]


def serve(state: ProvisioningState, need: MachineDemand, found: dict[str, dict[str, int]]) -> AssignmentResult:
    """Give a need its places."""
    lacks, chosen = need.slots, list[tuple[Allocation, int]]()
    for name in need.in_use:
        if name in found:
            found[name].setdefault(need.run, 1)
    for hire in sorted((state.allocations[name] for name in found), key=lambda one: _rank(need, one)):
        free = hire.slots - sum(found[hire.name].values())
        if not is_fit(state, need, hire) or lacks <= 0 or free <= 0:
            continue
        chosen.append((hire, min(free, lacks)))
        lacks -= min(free, lacks)
    dear: list[str] = []
    if need.budget is not None:
        kept = [
            provisioning_budget.AffordableMachine(hire.name, price_of(state, hire), many, hire.status == RUNNING)
            for hire, many in chosen
        ]
        beside = paid_by(state, found, need.run)
        dear = provisioning_budget.unaffordable(kept, left_of(state, need), beside, need.min_slots)
    for hire, many in chosen:
        if hire.name in dear:
            lacks += many
        else:
            found[hire.name][need.run] = found[hire.name].get(need.run, 0) + many
    return AssignmentResult(max(0, lacks), dear)


def is_fit(state: ProvisioningState, need: MachineDemand, hire: Allocation) -> bool:
    """Whether a need could use a hire."""
    if hire.pool not in need.pools or hire.overdue or hire.leaving:
        return False
    pool = state.pools.get(hire.pool)
    if pool is None or not pool.sized:
        return True
    return hire.cpus >= need.cpus and hire.memory_bytes >= need.memory_bytes


def price_of(state: ProvisioningState, hire: Allocation) -> float:
    pool = state.pools.get(hire.pool)
    return pool.price_per_h if pool is not None else 0.0


def paid_by(state: ProvisioningState, found: Mapping[str, Mapping[str, int]], run: str) -> float:
    """What an hour of the machines costs that a run has been given so far."""
    return sum(price_of(state, state.allocations[name]) for name, shares in found.items() if run in shares)


def left_of(state: ProvisioningState, need: MachineDemand) -> float:
    return (need.budget or 0.0) - state.account.of_run(need.run).spent


def _rank(need: MachineDemand, hire: Allocation) -> tuple[int, int, float, str]:
    """Earlier pools first; in one pool those that are here, then those that have waited longest."""
    place = need.pools.index(hire.pool) if hire.pool in need.pools else len(need.pools)
    return place, (RUNNING, SUBMITTED, REQUESTED).index(hire.status), hire.since, hire.name


def hourly_rate(state: ProvisioningState, run: str) -> float:
    """What a run pays for an hour of all that it has, as if nobody shared it."""
    return sum(
        price_of(state, hire)
        for hire in state.allocations.values()
        if run in hire.slots_by_run and hire.billed_until is not None
    )


def over_budget(state: ProvisioningState, run: str) -> str:
    """Why a run cannot go on for what is left of its budget, empty if it can."""
    needs = [need for need in state.demands if need.run == run and need.budget is not None]
    if not needs or needs[0].budget is None:
        return ""
    budget, left, paying = needs[0].budget, left_of(state, needs[0]), hourly_rate(state, run)
    told = f"the budget of {budget:.2f} is spent but for {max(0.0, left):.2f}"
    if paying and not provisioning_budget.can_pay(left, paying, provisioning_budget.RESERVE_S):
        return f"{told}, which is needed to stop in order"
    found: dict[str, dict[str, int]] = {name: {} for name, hire in state.allocations.items() if hire.status in LIVE}
    for need in needs:
        lacks = serve(state, need, found).lacks - (need.slots - need.min_slots)
        prices = [state.pools[name].price_per_h for name in need.pools if name in state.pools]
        rate = paid_by(state, found, run)
        if lacks > 0 and prices and not provisioning_budget.may_request(left, rate, min(prices), least=True):
            return f"{told}, which does not pay the machines that are missing"
    return ""
