"""Events that change provisioning, the instructions it gives in return, and the values that both carry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Union


@dataclass(frozen=True, slots=True)
class PoolInfo:
    """A source of machines: at most `limit` of them, each with `slots` slots for members.

    `on_demand_per_h` is the price of a comparable machine that is never preempted, 0 if unknown. A run that waits
    longer than `max_wait_s` for one of its machines asks the next pool. `labels` describe the machines for --where.
    `sized` means that the engine can be asked for machines of a given size; `cpus` and `memory_bytes` are the size of
    each machine if the pool itself fixes it. A `retired` pool gives nothing more, but what it gave stays until no run
    needs it.
    """

    name: str
    engine: str
    limit: int
    slots: int = 1
    price_per_h: float = 0.0
    on_demand_per_h: float = 0.0
    max_wait_s: float = 60.0
    labels: Mapping[str, str] = field(default_factory=dict)
    sized: bool = False
    cpus: int = 0
    memory_bytes: int = 0
    retired: bool = False


@dataclass(frozen=True, slots=True)
class MachineDemand:
    """Slots that one role of a run can use, and the pools to take them from, preferred ones first.

    It cannot work with fewer than `min_slots`. Until the run has `started`, it fails once its pools have only failed
    for `start_timeout_s`. `cpus` and `memory_bytes` are needed per slot. `budget` limits what the run may spend in
    all, None for no limit. `in_use` names allocations with processes of the run, which are kept whatever else holds.
    """

    run: str
    pools: tuple[str, ...]
    slots: int
    min_slots: int = 0
    cpus: int = 0
    memory_bytes: int = 0
    budget: float | None = None
    in_use: tuple[str, ...] = ()
    started: bool = True
    start_timeout_s: float = 600.0


@dataclass(frozen=True, slots=True)
class PoolProblem:
    """Why a pool cannot deliver, where that was seen, and the remedy."""

    pool: str
    why: str
    where: str = ""
    do: str = ""


@dataclass(frozen=True, slots=True)
class ListedAllocation:
    """An allocation as the pool's engine lists it: running, or waiting for a machine."""

    allocation: str
    handle: str
    running: bool
    why: str = ""


def allocation_name(pool: str, number: int) -> str:
    """Return the name of an allocation, which contains that of its pool."""
    return f"{pool}-{number}"


def pool_of(allocation: str) -> str:
    """Return the name of the pool of an allocation.

    >>> pool_of(allocation_name("gpu-spot", 12))
    'gpu-spot'
    """
    return allocation.rpartition("-")[0]


# --- events


@dataclass(frozen=True, slots=True)
class PoolsConfigured:
    pools: tuple[PoolInfo, ...]


@dataclass(frozen=True, slots=True)
class DemandChanged:
    demands: tuple[MachineDemand, ...]


@dataclass(frozen=True, slots=True)
class AllocationSubmitted:
    """The engine accepted a request and knows it by `handle`."""

    pool: str
    allocation: str
    handle: str


@dataclass(frozen=True, slots=True)
class AllocationRejected:
    """The engine rejected a request; `final` means that it will never accept it as it is."""

    pool: str
    allocation: str
    why: str
    where: str = ""
    do: str = ""
    final: bool = False


@dataclass(frozen=True, slots=True)
class PoolListed:
    """All allocations of this coordinator that a pool's engine knows.

    `ended` are pairs (allocation, reason) that the engine remembers to have ended. `unsubmitted` are requested
    allocations whose submission is not in progress, because the coordinator was down when it should have happened.
    """

    pool: str
    listed: tuple[ListedAllocation, ...]
    ended: tuple[tuple[str, str], ...] = ()
    unsubmitted: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PoolUnreachable:
    pool: str
    why: str
    where: str = ""
    do: str = ""
    final: bool = False


@dataclass(frozen=True, slots=True)
class CoordinatorWasDown:
    """The coordinator did not run for so long: no agent could connect to it, and it requested nothing."""

    seconds: float


@dataclass(frozen=True, slots=True)
class PoolClosed:
    """The coordinator shuts down for good and has ended all its allocations of a pool."""

    pool: str


@dataclass(frozen=True, slots=True)
class SetupProgressed:
    """A machine is still installing what its agent needs, which may take long; `why` is the current step."""

    allocation: str
    why: str


@dataclass(frozen=True, slots=True)
class SetupFailed:
    """A machine could not install what its agent needs; `final` means that no machine of its pool can."""

    allocation: str
    why: str
    where: str = ""
    do: str = ""
    final: bool = False


@dataclass(frozen=True, slots=True)
class AgentArrived:
    agent: str


@dataclass(frozen=True, slots=True)
class AgentLeaving:
    """An agent has notice that its machine will be taken away."""

    agent: str
    why: str


@dataclass(frozen=True, slots=True)
class AgentLost:
    agent: str
    why: str


@dataclass(frozen=True, slots=True)
class AllocationEnded:
    """The engine has ended an allocation that was being released."""

    allocation: str


@dataclass(frozen=True, slots=True)
class ProvisioningTimerExpired:
    """A timer of an allocation, a pool, a run's start or a budget expired.

    `timer` is ``wait`` (the machine takes too long), ``join`` (its agent does), ``cancel`` (the engine has not
    confirmed), ``surplus`` (unused for too long), ``pool`` (the backoff is over), ``start`` (the run cannot start)
    or ``budget``.
    """

    timer: str
    allocation: str = ""
    pool: str = ""
    run: str = ""


Event = Union[
    PoolsConfigured,
    DemandChanged,
    AllocationSubmitted,
    AllocationRejected,
    PoolListed,
    PoolUnreachable,
    CoordinatorWasDown,
    PoolClosed,
    SetupProgressed,
    SetupFailed,
    AgentArrived,
    AgentLeaving,
    AgentLost,
    AllocationEnded,
    ProvisioningTimerExpired,
]

# --- instructions


@dataclass(frozen=True, slots=True)
class SubmitAllocation:
    """Start an agent in a pool; `cpus` and `memory_bytes` are those of one slot, 0 for the pool's default."""

    pool: str
    allocation: str
    slots: int
    reason: str
    cpus: int = 0
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class CancelAllocation:
    """End an allocation, whatever its state; `handle` is the engine's name for it, "" if none is known yet."""

    pool: str
    allocation: str
    handle: str
    reason: str


@dataclass(frozen=True, slots=True)
class ProvisioningNote:
    """A sentence for the story of one run, or of all if `run` is ""; nothing to carry out."""

    text: str
    run: str = ""


@dataclass(frozen=True, slots=True)
class FailInfeasibleRun:
    """Fail a run that has not started and cannot start with its pools."""

    run: str
    problems: tuple[PoolProblem, ...]


@dataclass(frozen=True, slots=True)
class StopRunOverBudget:
    """Stop a run cleanly, because the rest of its budget is needed for that."""

    run: str
    reason: str


Instruction = Union[SubmitAllocation, CancelAllocation, ProvisioningNote, FailInfeasibleRun, StopRunOverBudget]
