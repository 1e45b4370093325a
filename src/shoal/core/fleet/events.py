"""What can happen to agents and member processes, and what can be asked in answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Union

from shoal.core.fleet import restart_policy
from shoal.core.fleet.requirements import MachineRequirements, SlotSize

DEFAULT_RESTARTS = restart_policy.RestartLimits()

# --- events


@dataclass(frozen=True, slots=True)
class CoordinatorStarted:
    """The coordinator began, or began again; `salt` makes the incarnations of this life unlike those of any other."""

    salt: str


@dataclass(frozen=True, slots=True)
class AgentConnected:
    """An agent connected; `members` are the processes alive under it, as (run, member, incarnation).

    `successor` says that it is another process than the agent of that name before, whose members died with it. `pool`
    is where its machine was hired, empty if it came by itself; `size` is what each of its places was asked to have.
    """

    agent: str
    slots: int | None
    host: str
    members: tuple[tuple[str, str, str], ...] = ()
    successor: bool = False
    pool: str = ""
    size: SlotSize | None = None


@dataclass(frozen=True, slots=True)
class AgentDisconnected:
    agent: str


@dataclass(frozen=True, slots=True)
class AgentNotice:
    agent: str
    within_s: float
    cause: str


@dataclass(frozen=True, slots=True)
class RunRequested:
    """`terms` say for each role which machines it may use: all, if nothing is said.

    `ports` are those that its members may listen on, such as 29400-29499; empty for any.
    """

    run: str
    min_members: int
    max_members: int
    compat: str = ""
    restarts: restart_policy.RestartLimits = DEFAULT_RESTARTS
    servers: int = 0
    evaluators: int = 0
    requirements: Mapping[str, MachineRequirements] = field(default_factory=dict)
    priority: int = 0
    ports: str = ""


@dataclass(frozen=True, slots=True)
class ProcessStarted:
    run: str
    member: str
    incarnation: str
    pid: int
    warm: bool


@dataclass(frozen=True, slots=True)
class ProcessExited:
    """`cause` is one of: done, user, infrastructure, preempted, asked, refused, and idle.

    `idle` is not the agent's word: others had trained to the end, and it was told that it was not needed.
    """

    run: str
    member: str
    incarnation: str
    cause: str
    detail: str = ""
    exit_code: int | None = None
    signal: int | None = None


@dataclass(frozen=True, slots=True)
class MemberUnresponsive:
    """The member was lost, but nobody said that its process ended; `stuck` says why that must not be waited for."""

    run: str
    member: str
    hung: str = ""


@dataclass(frozen=True, slots=True)
class MemberResponsive:
    run: str
    member: str


@dataclass(frozen=True, slots=True)
class UnmanagedMembersChanged:
    """Members that take part without a process that an agent answers for."""

    run: str
    unmanaged: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RunScaled:
    """`keep` are the members to keep if some have to go."""

    run: str
    min_members: int
    max_members: int
    keep: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RunStopping:
    """The members were told to stop; `idle` are those that hold nothing worth waiting for."""

    run: str
    exit_code: int
    grace_s: float
    reason: str
    idle: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RunFinished:
    """The last step is committed; members end by themselves."""

    run: str


@dataclass(frozen=True, slots=True)
class RunInfeasible:
    """A run cannot begin: there are no machines for it."""

    run: str
    reason: str


@dataclass(frozen=True, slots=True)
class FleetTimerExpired:
    """A wait for an agent, a run or a process is over; `what` says which."""

    what: str
    run: str = ""
    member: str = ""
    agent: str = ""


Event = Union[
    CoordinatorStarted,
    AgentConnected,
    AgentDisconnected,
    AgentNotice,
    RunRequested,
    ProcessStarted,
    ProcessExited,
    MemberUnresponsive,
    MemberResponsive,
    UnmanagedMembersChanged,
    RunScaled,
    RunStopping,
    RunFinished,
    RunInfeasible,
    FleetTimerExpired,
]

# --- instructions


@dataclass(frozen=True, slots=True)
class StartProcess:
    """`env` is what only this process needs, beyond what every member is given."""

    agent: str
    run: str
    member: str
    incarnation: str
    restart: bool
    reason: str
    env: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class StopProcess:
    agent: str
    run: str
    member: str
    incarnation: str
    grace_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class MarkRunFailed:
    run: str
    reason: str
    exit_code: int


@dataclass(frozen=True, slots=True)
class MarkRunEnded:
    run: str
    reason: str
    exit_code: int


@dataclass(frozen=True, slots=True)
class MarkTrainingFinished:
    """Whoever trained is gone: what there is now to evaluate is all that there will be."""

    run: str


@dataclass(frozen=True, slots=True)
class FleetNote:
    """A sentence for the story; nothing to carry out."""

    run: str
    text: str
    member: str = ""


Instruction = Union[StartProcess, StopProcess, MarkRunFailed, MarkRunEnded, MarkTrainingFinished, FleetNote]
