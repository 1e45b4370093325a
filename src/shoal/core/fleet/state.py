"""State of the fleet: agents with their slots, runs with what they want, and processes."""

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
# A run's trainers; more would be a mistake, or an attempt to keep the coordinator busy.
MAX_MEMBERS = 10_000
# Processes that an agent without a limit starts at a time.
MAX_STARTING = 64
# Spare members of a run beyond its maximum, however many slots are free.
MAX_SPARES = 64
TASK_MARKS = {"chief": CHIEF_MARK, "ps": MARKS[SERVER]}


@lru_cache(maxsize=1 << 14)
def role_of(member: str) -> str:
    """Return the role of a member, which is part of its name."""
    last = member.rpartition("/")[2]
    return next((role for role, mark in MARKS.items() if last.startswith(mark)), TRAINER)


@dataclass(frozen=True, slots=True)
class FleetTimeouts:
    """How long the fleet waits, in seconds.

    `unresponsive_s` for a silent member whose process runs, `agent_s` for a disconnected agent, `no_agents_s` before a
    run without agents ends, `missing_s` for the exit of a process that its agent did not list, `give_up_s` before a
    member that failed too often is tried again, and `grace_s` for a process to stop.
    """

    unresponsive_s: float = 10.0
    agent_s: float = 10.0
    no_agents_s: float = 60.0
    missing_s: float = 2.0
    give_up_s: float = 600.0
    grace_s: float = 30.0


@dataclass(frozen=True, slots=True)
class AgentState:
    """An agent. `slots` is how many members it offers, None for any number; `size` is the size of a slot, if known.

    `notice` is why its machine will shut down, "" if it will not. Agents are ordered by their first connection.
    """

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
    """A member's process.

    `until` is the end of its back-off. `restart_reason` says why it is stopped only to be restarted. `missing_since` is
    when its agent reconnected without it. `joined` says that its member has connected to the coordinator; if it
    has not by `join_by`, that is said.
    """

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
    joined: bool = False
    join_by: float | None = None

    @property
    def alive(self) -> bool:
        return self.status in ALIVE

    @property
    def role(self) -> str:
        return role_of(self.member)

    @property
    def is_chief(self) -> bool:
        """Whether it is the chief of a script with parameter servers; the script is done when the chief is."""
        return self.member.rpartition("/")[2].startswith(CHIEF_MARK)


class ProcessTable(dict[tuple[str, str], ProcessState]):
    """Processes by run and member, with indexes by run and by agent, so that lookups do not scan thousands.

    Change it only by assignment, `del` and `pop`, which keep the indexes true.
    """

    __slots__ = ("_by_run", "_evaluators", "_slots_used", "_starting", "_staying")

    def __init__(self, processes: Mapping[tuple[str, str], ProcessState] = {}) -> None:
        super().__init__()
        self._by_run: dict[str, dict[str, ProcessState]] = {}
        self._slots_used: dict[str, int] = {}
        self._starting: dict[str, int] = {}
        self._staying: dict[str, dict[tuple[str, str], int]] = {}
        self._evaluators: dict[str, frozenset[tuple[str, str]]] = {}
        for key, p in processes.items():
            self[key] = p

    def copy(self) -> ProcessTable:
        twin = ProcessTable()
        dict.update(twin, self)
        twin._by_run = {run: dict(members) for run, members in self._by_run.items()}
        twin._slots_used, twin._evaluators = dict(self._slots_used), dict(self._evaluators)
        twin._starting = dict(self._starting)
        twin._staying = {run: dict(counts) for run, counts in self._staying.items()}
        return twin

    def of_run(self, run: str) -> Mapping[str, ProcessState]:
        """Return the processes of a run, by member."""
        return self._by_run.get(run, {})

    def slots_used(self, agent: str) -> int:
        """Return how many processes of an agent train or serve."""
        return self._slots_used.get(agent, 0)

    def starting(self, agent: str) -> int:
        """Return how many processes an agent was told to start and has not reported yet."""
        return self._starting.get(agent, 0)

    def staying(self, run: str) -> Mapping[tuple[str, str], int]:
        """Return how many processes a run has by role and agent, without those that end for good."""
        return self._staying.get(run, {})

    def evaluators(self, agent: str) -> list[ProcessState]:
        """Return the evaluators of an agent."""
        return [self[key] for key in sorted(self._evaluators.get(agent, ()))]

    def __setitem__(self, key: tuple[str, str], p: ProcessState) -> None:
        self._index(self.get(key), -1)
        super().__setitem__(key, p)
        self._by_run.setdefault(key[0], {})[key[1]] = p
        self._index(p, 1)

    def __delitem__(self, key: tuple[str, str]) -> None:
        self._index(self[key], -1)
        super().__delitem__(key)
        del self._by_run[key[0]][key[1]]
        if not self._by_run[key[0]]:
            del self._by_run[key[0]]
            self._staying.pop(key[0], None)

    def pop(self, key: tuple[str, str], default: ProcessState | None = None) -> ProcessState | None:  # type: ignore[override]
        p = self.get(key, default)
        if key in self:
            del self[key]
        return p

    def _index(self, p: ProcessState | None, change: int) -> None:
        if p is None:
            return
        if p.status == STARTING:
            self._starting[p.agent] = self._starting.get(p.agent, 0) + change
        if p.status != ENDING or p.restart_reason:
            counts, place = self._staying.setdefault(p.run, {}), (p.role, p.agent)
            counts[place] = counts.get(place, 0) + change
        if p.role == EVALUATOR:
            keys, key = self._evaluators.get(p.agent, frozenset()), {(p.run, p.member)}
            self._evaluators[p.agent] = keys | key if change > 0 else keys - key
        else:
            self._slots_used[p.agent] = self._slots_used.get(p.agent, 0) + change
            if not self._slots_used[p.agent]:
                del self._slots_used[p.agent]


@dataclass(frozen=True, slots=True)
class DesiredRun:
    """What a run wants, and how far it is.

    `finished`: the last step is committed. `trained`: only evaluators are waited for. `died_after_training` names a
    trainer that died after the last step, before the end of its script. `seen`: a process was started once.
    `preempted`: its latest losses were machines taken away. `losses` are past exits by member, for the restart policy.
    Runs of higher `priority` get slots first. `requirements` are those of each role that has some. For unmodified
    scripts, `generation` counts starts of the group, `restart_reason` says why all processes are being restarted, and
    `restart_at` when at the earliest.
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
        """Return whether a role has pools of its own, and so its processes take slots there."""
        return self.requirements_of(role).reserved

    def requirements_of(self, role: str) -> MachineRequirements:
        """Return on which machines processes of a role may run."""
        return self.requirements.get(role, MachineRequirements())

    @property
    def reserved(self) -> frozenset[str]:
        """Pools that a role has for itself; processes that may run anywhere do not run there."""
        return frozenset(pool for needed in self.requirements.values() if needed.reserved for pool in needed.pools)

    @property
    def max_slots(self) -> int:
        """Slots that it could use at most where its trainers are."""
        if self.compat:
            return self.max_members + self.extra_processes
        return self.max_members + (0 if self.has_own_pools(SERVER) else self.servers)

    @property
    def min_slots(self) -> int:
        """Slots that it needs at least where its trainers are."""
        return self.max_slots - self.max_members + self.min_members

    @property
    def extra_processes(self) -> int:
        """Processes of an unmodified script that do not count as members: chief and servers."""
        return 1 + self.servers if self.compat == PS else 0


@dataclass(frozen=True, slots=True)
class FleetState:
    """All agents, runs and processes of a coordinator; `salt` and `count` make incarnations unique."""

    timeouts: FleetTimeouts = FleetTimeouts()
    salt: str = ""
    count: int = 0
    agents: Mapping[str, AgentState] = field(default_factory=dict)
    runs: Mapping[str, DesiredRun] = field(default_factory=dict)
    processes: ProcessTable = field(default_factory=ProcessTable)

    def of_run(self, run: str) -> list[ProcessState]:
        return list(self.processes.of_run(run).values())
