"""State of provisioning: pools, demands and allocations, as frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shoal.core.provisioning.costs import Account
from shoal.core.provisioning.events import MachineDemand, PoolInfo

REQUESTED, SUBMITTED, RUNNING, RELEASING = "requested", "submitted", "running", "releasing"
LIVE = (REQUESTED, SUBMITTED, RUNNING)


@dataclass(frozen=True, slots=True)
class ProvisioningTimeouts:
    """Timeouts of allocations and pools, in seconds.

    `surplus_s` is how long an unused machine is kept, `join_s` how long a running machine may take until its agent
    connects. An agent that lives for less than `min_lifetime_s` counts as a failure of its pool. A failing pool is
    retried after `backoff_s`, doubled each time up to `backoff_max_s`; a cancellation is repeated every
    `cancel_retry_s` until the engine confirms it.
    """

    surplus_s: float = 5.0
    join_s: float = 300.0
    min_lifetime_s: float = 30.0
    backoff_s: float = 5.0
    backoff_max_s: float = 600.0
    cancel_retry_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Allocation:
    """One agent requested from a pool.

    `since` is when it got its status. `started` means that the engine reports its machine as running. `overdue` means
    that it took longer than its pool's `max_wait_s`, so other pools were asked; `leaving` that its agent has notice and
    will leave on its own. `billed_until` is the time up to which it has been charged, None if nothing is charged yet.
    No run has used it since `unused_since`, for the reason `unused_why`. While the machine installs what its agent
    needs, `setup_reported_at` is the time of its last report. `cpus` and `memory_bytes` are those of one slot.
    `slots_by_run` counts the slots of each run that uses it, or used it last.
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
        """Whether its machine is still installing what the agent needs."""
        return self.status == SUBMITTED and self.setup_reported_at is not None


@dataclass(frozen=True, slots=True)
class PoolHealth:
    """Recent failures of a pool.

    Nothing is requested from it before `retry_at`. `failures` counts failures in short succession, the last of them at
    `failed_at`, and sets the backoff. It has accepted no request since `failing_since`; `final` means that it never
    will accept this one. `failed_starts` counts allocations in a row that ended before their agents connected.
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
    """All pools, demands and allocations of a coordinator; `count` numbers the allocations."""

    timeouts: ProvisioningTimeouts = ProvisioningTimeouts()
    pools: Mapping[str, PoolInfo] = field(default_factory=dict)
    health: Mapping[str, PoolHealth] = field(default_factory=dict)
    demands: tuple[MachineDemand, ...] = ()
    allocations: Mapping[str, Allocation] = field(default_factory=dict)
    count: int = 0
    account: Account = field(default_factory=Account)

    def price_of(self, allocation: Allocation) -> float:
        """Return the price of an allocation for an hour; 0 if its pool is no longer configured."""
        pool = self.pools.get(allocation.pool)
        return pool.price_per_h if pool is not None else 0.0

    def remaining_budget(self, demand: MachineDemand) -> float:
        """Return what the run of a demand may still spend; negative if it overspent."""
        return (demand.budget or 0.0) - self.account.of_run(demand.run).spent


def hourly_rate(state: ProvisioningState, run: str) -> float:
    """Return the price for an hour of all machines that a run uses, as if it shared none of them."""
    return sum(
        state.price_of(allocation)
        for allocation in state.allocations.values()
        if run in allocation.slots_by_run and allocation.billed_until is not None
    )
