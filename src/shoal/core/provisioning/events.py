"""What can happen to pools and hires, and what can be asked in answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Union


@dataclass(frozen=True, slots=True)
class PoolInfo:
    """A source of machines. `slots` is how many members each of them takes, `limit` how many machines there may be.

    `on_demand_per_h` is what the same would cost where nothing is preempted, if that is known. Whoever waits
    longer than `max_wait_s` for one of its machines asks the next pool. `labels` are what its machines carry.
    `sized` says that its engine can be asked for machines of a size; `cpus`
    and `memory_bytes` are that of each, if the pool itself says so.
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


@dataclass(frozen=True, slots=True)
class MachineDemand:
    """How many places a role of a run could use at most, and the pools that it may take them from, in its order.

    With fewer than `least` places it cannot go on; until it has `begun`, it is given up when its pools have only failed
    for `patience_s`. `cpus` and `memory_bytes` are those of a place; `budget` is what the run may spend in all, None
    for any amount. `held` are hires that are in use, and kept whatever else is said.
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
    """What is wrong with a pool, where, and what to do about it."""

    pool: str
    why: str
    where: str = ""
    do: str = ""


@dataclass(frozen=True, slots=True)
class ListedAllocation:
    """One hire that a pool knows: it runs, or waits for a machine."""

    allocation: str
    handle: str
    running: bool
    why: str = ""


def allocation_name(pool: str, number: int) -> str:
    """The name of a hire, which tells its pool."""
    return f"{pool}-{number}"


def pool_of(hire: str) -> str:
    return hire.rpartition("-")[0]


# --- events


@dataclass(frozen=True, slots=True)
class PoolsConfigured:
    pools: tuple[PoolInfo, ...]


@dataclass(frozen=True, slots=True)
class DemandChanged:
    demands: tuple[MachineDemand, ...]


@dataclass(frozen=True, slots=True)
class AllocationSubmitted:
    pool: str
    allocation: str
    handle: str


@dataclass(frozen=True, slots=True)
class AllocationRejected:
    """`final` says that the pool will never give it as it is asked."""

    pool: str
    allocation: str
    why: str
    where: str = ""
    do: str = ""
    final: bool = False


@dataclass(frozen=True, slots=True)
class PoolListed:
    """All that a pool has of ours; `ended` are those that it remembers to have ended, and how.

    `unsubmitted` are hires that nobody is submitting just now: the coordinator was away when it should have.
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
    """The coordinator was not there for so long: nobody could come to it, and it asked nobody."""

    seconds: float


@dataclass(frozen=True, slots=True)
class PoolClosed:
    """The coordinator ends for good, and has ended all that it had of a pool."""

    pool: str


@dataclass(frozen=True, slots=True)
class SetupProgressed:
    """A machine is there and makes ready what its agent needs, which may take long; `why` says what it does."""

    allocation: str
    why: str


@dataclass(frozen=True, slots=True)
class SetupFailed:
    """A machine is there, and cannot be made ready for its agent; `final` says that no other of its pool could."""

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
    agent: str
    why: str


@dataclass(frozen=True, slots=True)
class AgentLost:
    agent: str
    why: str


@dataclass(frozen=True, slots=True)
class AllocationEnded:
    """The engine has ended a hire that was to go."""

    allocation: str


@dataclass(frozen=True, slots=True)
class ProvisioningTimerExpired:
    """A wait for a hire, a pool or the first machines of a run is over; `what` says which.

    With `money` it is time to look at a budget again.
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
    pool: str
    allocation: str
    slots: int
    reason: str
    cpus: int = 0
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class CancelAllocation:
    pool: str
    allocation: str
    handle: str
    reason: str


@dataclass(frozen=True, slots=True)
class ProvisioningNote:
    """A sentence for the story, of one run or of all; nothing to carry out."""

    text: str
    run: str = ""


@dataclass(frozen=True, slots=True)
class FailInfeasibleRun:
    """A run that has not begun cannot begin with its pools as they are."""

    run: str
    problems: tuple[PoolProblem, ...]


@dataclass(frozen=True, slots=True)
class StopRunOverBudget:
    """What is left of a run's budget is needed to stop in order."""

    run: str
    reason: str


Instruction = Union[SubmitAllocation, CancelAllocation, ProvisioningNote, FailInfeasibleRun, StopRunOverBudget]
