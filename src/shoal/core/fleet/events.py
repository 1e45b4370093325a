"""Events of agents and member processes, and the instructions that follow from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Union

from shoal.core.fleet import restart_policy
from shoal.core.fleet.requirements import MachineRequirements, SlotSize
from shoal.core.note_kinds import NoteKind

DEFAULT_RESTARTS = restart_policy.RestartLimits()

# --- events


@dataclass(frozen=True, slots=True)
class CoordinatorStarted:
    """The coordinator started; `salt` keeps its incarnations apart from those of earlier starts."""

    salt: str


@dataclass(frozen=True, slots=True)
class AgentConnected:
    """An agent connected; `members` are the processes alive under it: (run, member, incarnation).

    `successor`: it is another process than the agent of that name before, whose members died with it. `pool` is the
    pool that its machine was requested from, "" for an agent that was started by hand; `size` is the requested size of
    a slot.
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
    """An agent's connection closed; its processes may still run."""

    agent: str


@dataclass(frozen=True, slots=True)
class AgentNotice:
    """An agent's machine will shut down within `within_s` seconds."""

    agent: str
    within_s: float
    cause: str


@dataclass(frozen=True, slots=True)
class RunRequested:
    """A run was submitted, or resumed.

    `requirements` says for each role which machines it may use; a role that is not named may use all. `ports` is the
    range that its members may listen on, such as 29400-29499; "" for any.
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
    """An agent started a process; `warm` if it was forked from a warm one."""

    run: str
    member: str
    incarnation: str
    pid: int
    warm: bool


@dataclass(frozen=True, slots=True)
class ProcessExited:
    """A process ended. `cause` is done, user, infrastructure, preempted, asked, refused or idle.

    The agent never reports *idle*: the coordinator told this member that others had finished without it. Nor does it
    know `before_first_step`: whether the run had not committed a step yet; nor `trained_nothing`: the error if the
    process ended well although its member never took part; nor `joining`: the run trains without this member, with
    at least the minimum of others.
    """

    run: str
    member: str
    incarnation: str
    cause: str
    detail: str = ""
    exit_code: int | None = None
    signal: int | None = None
    before_first_step: bool = False
    trained_nothing: str = ""
    joining: bool = False


@dataclass(frozen=True, slots=True)
class MemberUnresponsive:
    """A member was lost, but its process was not reported as ended.

    `hung` is the reason if it makes no progress; such a process is replaced at once.
    """

    run: str
    member: str
    hung: str = ""


@dataclass(frozen=True, slots=True)
class MemberResponsive:
    """A lost member connected again."""

    run: str
    member: str


@dataclass(frozen=True, slots=True)
class UnmanagedMembersChanged:
    """The members changed that take part without a process under an agent."""

    run: str
    unmanaged: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RunScaled:
    """A run wants another number of members; those in `keep` are stopped last."""

    run: str
    min_members: int
    max_members: int
    keep: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RunStopping:
    """The members of a run were told to stop; those in `idle` hold nothing worth waiting for."""

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
    """A run cannot begin: no pool can provide its machines."""

    run: str
    reason: str


@dataclass(frozen=True, slots=True)
class FleetTimerExpired:
    """A timer of an agent, a run or a process expired; `what` is one of:

    - agent: a disconnected agent did not reconnect
    - notice: a notice did not come true
    - grace: a run did not stop in time
    - no agents: a run has lost all members and agents
    - group restart: the pause before a group restart is over
    - backoff: a process may be restarted
    - unresponsive: a process is alive, but its member has been silent for long
    - missing: a process that its agent did not list is not reported as ended either
    - not joined: a process has run for long without joining
    """

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
    """Start a process; `env` is what only this process needs, beyond what every member is given."""

    agent: str
    run: str
    member: str
    incarnation: str
    restart: bool
    reason: str
    env: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class StopProcess:
    """Stop a process: SIGTERM, then SIGKILL after `grace_s`."""

    agent: str
    run: str
    member: str
    incarnation: str
    grace_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class MarkRunFailed:
    """The run failed."""

    run: str
    reason: str
    exit_code: int


@dataclass(frozen=True, slots=True)
class MarkRunEnded:
    """The run ended, done or resumable."""

    run: str
    reason: str
    exit_code: int


@dataclass(frozen=True, slots=True)
class MarkTrainingFinished:
    """All trainers have ended: no further checkpoint will have to be evaluated."""

    run: str


@dataclass(frozen=True, slots=True)
class FleetNote:
    """A sentence for the story; nothing to carry out."""

    run: str
    text: str
    member: str = ""
    kind: NoteKind = ""


Instruction = Union[StartProcess, StopProcess, MarkRunFailed, MarkRunEnded, MarkTrainingFinished, FleetNote]
