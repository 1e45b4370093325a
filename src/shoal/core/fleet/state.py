"""The processes of runs, the agents that they are under, and what each run wants; values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from shoal.core.fleet import restart_policy
from shoal.core.fleet.launcher_env import PS
from shoal.core.fleet.requirements import MachineRequirements, SlotSize
from shoal.core.membership.state import EVALUATOR, SERVER, TRAINER

STARTING, RUNNING, ENDING, BACKOFF, DONE, GIVEN_UP = "starting", "running", "ending", "backoff", "done", "given up"
ACTIVE, FINISHING, STOPPING, ENDED = "active", "finishing", "stopping", "ended"
ALIVE = (STARTING, RUNNING, ENDING)
MARKS = {SERVER: "server-", EVALUATOR: "evaluator-"}
CHIEF_MARK = "chief-"
TASK_MARKS = {"chief": CHIEF_MARK, "ps": MARKS[SERVER]}


@lru_cache(maxsize=1 << 14)
def role_of(member: str) -> str:
    """What a process does in its run; names are given here, and tell."""
    last = member.rpartition("/")[2]
    return next((role for role, mark in MARKS.items() if last.startswith(mark)), TRAINER)


@dataclass(frozen=True, slots=True)
class FleetTimeouts:
    """How long things are waited for."""

    unresponsive_s: float = 10.0
    agent_s: float = 10.0
    no_agents_s: float = 60.0
    missing_s: float = 2.0
    give_up_s: float = 600.0
    grace_s: float = 30.0


@dataclass(frozen=True, slots=True)
class AgentState:
    """An agent; `slots` is how many members it offers, None for as many as asked, `size` what a place there has."""

    name: str
    slots: int | None
    host: str
    order: int
    disconnected_since: float | None = None
    notice: str = ""
    notice_until: float = 0.0
    pool: str = ""
    size: SlotSize | None = None

    @property
    def usable(self) -> bool:
        return self.disconnected_since is None and not self.notice


@dataclass(frozen=True, slots=True)
class ProcessState:
    """A member's process. `until` is the end of its back-off; `again` says why it is ended only to be started anew."""

    run: str
    member: str
    incarnation: str
    agent: str
    status: str
    order: int
    pid: int = 0
    until: float = 0.0
    restart_reason: str = ""
    unresponsive_since: float | None = None
    missing_since: float | None = None

    @property
    def alive(self) -> bool:
        return self.status in ALIVE

    @property
    def role(self) -> str:
        return role_of(self.member)

    @property
    def is_chief(self) -> bool:
        """Whether it is the chief of a script with parameter servers, which is done when the chief is."""
        return self.member.rpartition("/")[2].startswith(CHIEF_MARK)


class ProcessTable(dict[tuple[str, str], ProcessState]):
    """Processes by run and member, and at hand by run and by agent, so that nobody looks at a thousand to find one.

    What is in here changes by assigning, `del` and `pop` only.
    """

    __slots__ = ("_by_run", "_scoring", "_taken")

    def __init__(self, known: Mapping[tuple[str, str], ProcessState] = {}) -> None:
        super().__init__()
        self._by_run: dict[str, dict[str, ProcessState]] = {}
        self._taken: dict[str, int] = {}
        self._scoring: dict[str, frozenset[tuple[str, str]]] = {}
        for key, p in known.items():
            self[key] = p

    def copy(self) -> ProcessTable:
        twin = ProcessTable()
        dict.update(twin, self)
        twin._by_run = {run: dict(members) for run, members in self._by_run.items()}
        twin._taken, twin._scoring = dict(self._taken), dict(self._scoring)
        return twin

    def of_run(self, run: str) -> Mapping[str, ProcessState]:
        """The processes of a run, by member."""
        return self._by_run.get(run, {})

    def slots_used(self, agent: str) -> int:
        """How many processes of an agent train or serve."""
        return self._taken.get(agent, 0)

    def evaluators(self, agent: str) -> list[ProcessState]:
        """The evaluators of an agent."""
        return [self[key] for key in sorted(self._scoring.get(agent, ()))]

    def __setitem__(self, key: tuple[str, str], p: ProcessState) -> None:
        self._count(self.get(key), -1)
        super().__setitem__(key, p)
        self._by_run.setdefault(key[0], {})[key[1]] = p
        self._count(p, 1)

    def __delitem__(self, key: tuple[str, str]) -> None:
        self._count(self[key], -1)
        super().__delitem__(key)
        del self._by_run[key[0]][key[1]]
        if not self._by_run[key[0]]:
            del self._by_run[key[0]]

    def pop(self, key: tuple[str, str], default: ProcessState | None = None) -> ProcessState | None:  # type: ignore[override]
        found = self.get(key, default)
        if key in self:
            del self[key]
        return found

    def _count(self, p: ProcessState | None, change: int) -> None:
        if p is None:
            return
        if p.role == EVALUATOR:
            known, one = self._scoring.get(p.agent, frozenset()), {(p.run, p.member)}
            self._scoring[p.agent] = known | one if change > 0 else known - one
        else:
            self._taken[p.agent] = self._taken.get(p.agent, 0) + change
            if not self._taken[p.agent]:
                del self._taken[p.agent]


@dataclass(frozen=True, slots=True)
class DesiredRun:
    """What a run wants. `regroup` says why a compat run's processes are all being started anew.

    `finished` says that the last step is done, `trained` that nobody trains any more, and only evaluators are waited
    for. Runs of higher `priority` get places first. `terms` are those of each role that has some. `fell` names who died
    after the last step, on the way to the end of the script.
    """

    run: str
    min_members: int
    max_members: int
    compat: str
    restarts: restart_policy.RestartLimits
    servers: int = 0
    evaluators: int = 0
    ports: str = ""
    finished: bool = False
    trained: bool = False
    status: str = ACTIVE
    exit_code: int = 0
    reason: str = ""
    end_by: float | None = None
    losses: Mapping[str, tuple[restart_policy.PastExit, ...]] = field(default_factory=dict)
    unmanaged: tuple[str, ...] = ()
    seen: bool = False
    preempted: bool = False
    died_after_training: str = ""
    no_agents_since: float | None = None
    generation: int = 0
    restart_reason: str = ""
    restart_at: float = 0.0
    requirements: Mapping[str, MachineRequirements] = field(default_factory=dict)
    priority: int = 0

    def has_own_pools(self, role: str) -> bool:
        """Whether a role has pools for itself, and so a place of its own there."""
        return self.requirements_of(role).reserved

    def requirements_of(self, role: str) -> MachineRequirements:
        return self.requirements.get(role, MachineRequirements())

    @property
    def reserved(self) -> frozenset[str]:
        """Pools that some role has for itself; who may train anywhere does not train there."""
        return frozenset(pool for terms in self.requirements.values() if terms.reserved for pool in terms.pools)

    @property
    def max_slots(self) -> int:
        """How many places it could use at most where its trainers are."""
        if self.compat:
            return self.max_members + self.extra_processes
        return self.max_members + (0 if self.has_own_pools(SERVER) else self.servers)

    @property
    def min_slots(self) -> int:
        """How few of these it can do with."""
        return self.max_slots - self.max_members + self.min_members

    @property
    def extra_processes(self) -> int:
        """How many processes a compat run has besides those that are counted as its members: chief and servers."""
        return 1 + self.servers if self.compat == PS else 0


@dataclass(frozen=True, slots=True)
class FleetState:
    """All agents, runs and processes of a coordinator."""

    timeouts: FleetTimeouts = FleetTimeouts()
    salt: str = ""
    count: int = 0
    agents: Mapping[str, AgentState] = field(default_factory=dict)
    runs: Mapping[str, DesiredRun] = field(default_factory=dict)
    processes: ProcessTable = field(default_factory=ProcessTable)

    def of_run(self, run: str) -> list[ProcessState]:
        return list(self.processes.of_run(run).values())
