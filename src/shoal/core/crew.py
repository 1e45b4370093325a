"""The processes of runs, the agents that they are under, and what each run wants; values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shoal.core import budget
from shoal.core.compat import PS
from shoal.core.roster import EVALUATOR, SERVER, TRAINER
from shoal.core.terms import Size, Terms

STARTING, RUNNING, ENDING, BACKOFF, DONE, GIVEN_UP = "starting", "running", "ending", "backoff", "done", "given up"
GOING, FINISHING, STOPPING, OVER = "going", "finishing", "stopping", "over"
ALIVE = (STARTING, RUNNING, ENDING)
MARKS = {SERVER: "server-", EVALUATOR: "evaluator-"}
CHIEF_MARK = "chief-"
TASK_MARKS = {"chief": CHIEF_MARK, "ps": MARKS[SERVER]}


def role_of(member: str) -> str:
    """What a process does in its run; names are given here, and tell."""
    last = member.rpartition("/")[2]
    return next((role for role, mark in MARKS.items() if last.startswith(mark)), TRAINER)


@dataclass(frozen=True, slots=True)
class Limits:
    """How long things are waited for."""

    revive_s: float = 10.0
    agent_s: float = 10.0
    alone_s: float = 60.0
    missing_s: float = 2.0
    forgive_s: float = 600.0
    grace_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Agent:
    """An agent; `slots` is how many members it offers, None for as many as asked, `size` what a place there has."""

    name: str
    slots: int | None
    host: str
    order: int
    away_since: float | None = None
    notice: str = ""
    notice_until: float = 0.0
    pool: str = ""
    size: Size | None = None

    @property
    def usable(self) -> bool:
        return self.away_since is None and not self.notice


@dataclass(frozen=True, slots=True)
class Process:
    """A member's process. `until` is the end of its back-off; `again` says why it is ended only to be started anew."""

    run: str
    member: str
    incarnation: str
    agent: str
    status: str
    order: int
    pid: int = 0
    until: float = 0.0
    again: str = ""
    silent_since: float | None = None
    missing_since: float | None = None

    @property
    def alive(self) -> bool:
        return self.status in ALIVE

    @property
    def role(self) -> str:
        return role_of(self.member)

    @property
    def leads(self) -> bool:
        """Whether it is the chief of a script with parameter servers, which is done when the chief is."""
        return self.member.rpartition("/")[2].startswith(CHIEF_MARK)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a run wants. `regroup` says why a compat run's processes are all being started anew.

    `trained` says that nobody trains any more, and only evaluators are waited for. Runs of higher `priority` get
    places first. `terms` are those of each role that has some.
    """

    run: str
    min_members: int
    max_members: int
    compat: str
    restarts: budget.BudgetSettings
    servers: int = 0
    evaluators: int = 0
    ports: str = ""
    trained: bool = False
    status: str = GOING
    exit_code: int = 0
    reason: str = ""
    end_by: float | None = None
    losses: Mapping[str, tuple[budget.Loss, ...]] = field(default_factory=dict)
    guests: tuple[str, ...] = ()
    seen: bool = False
    preempted: bool = False
    alone_since: float | None = None
    generation: int = 0
    regroup: str = ""
    not_before: float = 0.0
    terms: Mapping[str, Terms] = field(default_factory=dict)
    priority: int = 0

    def has_own(self, role: str) -> bool:
        """Whether a role has pools for itself, and so a place of its own there."""
        return self.terms_of(role).apart

    def terms_of(self, role: str) -> Terms:
        return self.terms.get(role, Terms())

    @property
    def apart(self) -> frozenset[str]:
        """Pools that some role has for itself; who may train anywhere does not train there."""
        return frozenset(pool for terms in self.terms.values() if terms.apart for pool in terms.pools)

    @property
    def places(self) -> int:
        """How many places it could use at most where its trainers are."""
        if self.compat:
            return self.max_members + self.beside
        return self.max_members + (0 if self.has_own(SERVER) else self.servers)

    @property
    def least(self) -> int:
        """How few of these it can do with."""
        return self.places - self.max_members + self.min_members

    @property
    def beside(self) -> int:
        """How many processes a compat run has besides those that are counted as its members: chief and servers."""
        return 1 + self.servers if self.compat == PS else 0


@dataclass(frozen=True, slots=True)
class State:
    """All agents, runs and processes of a coordinator."""

    limits: Limits = Limits()
    salt: str = ""
    count: int = 0
    agents: Mapping[str, Agent] = field(default_factory=dict)
    runs: Mapping[str, Wanted] = field(default_factory=dict)
    processes: Mapping[tuple[str, str], Process] = field(default_factory=dict)

    def of_run(self, run: str) -> list[Process]:
        return [p for p in self.processes.values() if p.run == run]
