"""Which member processes should exist, and on which agents.

`decide(state, event, now)` returns the next state and what to tell which agent; `due(state, now)` says which waits are
over, as events. It knows processes only: whether their members are in a world is decided in `membership`.

A process's life::

    starting ──▶ running ──exit 0──▶ done
        ▲           │ └──asked──▶ ending ──▶ forgotten
        └─ backoff ◀┘ crash            budget spent: given up for a while, or the run fails
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shoal.core import budget
from shoal.core import fleet_events as fe
from shoal.core.compat import PS, Place, rendezvous, tasks
from shoal.core.roster import EVALUATOR, SERVER, TRAINER

STARTING, RUNNING, ENDING, BACKOFF, DONE, GIVEN_UP = "starting", "running", "ending", "backoff", "done", "given up"
GOING, FINISHING, STOPPING, OVER = "going", "finishing", "stopping", "over"
ALIVE = (STARTING, RUNNING, ENDING)
MARKS = {SERVER: "server-", EVALUATOR: "evaluator-"}
CHIEF_MARK = "chief-"
_TASK_MARKS = {"chief": CHIEF_MARK, "ps": MARKS[SERVER]}


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
    """An agent; `slots` is how many members it offers, None for as many as asked."""

    name: str
    slots: int | None
    host: str
    order: int
    away_since: float | None = None
    notice: str = ""
    notice_until: float = 0.0
    pool: str = ""

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

    `trained` says that nobody trains any more, and only evaluators are waited for.
    """

    run: str
    min_members: int
    max_members: int
    compat: str
    restarts: budget.BudgetSettings
    servers: int = 0
    evaluators: int = 0
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
    pools: tuple[str, ...] = ()

    @property
    def places(self) -> int:
        """How many processes that train or serve it could have at most."""
        return self.max_members + (self.beside if self.compat else self.servers)

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


def decide(state: State, event: fe.Event, now: float) -> tuple[State, tuple[fe.Instruction, ...]]:
    """The next state, and what to tell which agent."""
    draft = _Draft(state, now)
    _HANDLERS[type(event)](draft, event)
    draft.advance()
    return draft.freeze(), tuple(draft.asked)


def due(state: State, now: float) -> tuple[fe.WaitOver, ...]:
    """The waits that are over."""
    limits = state.limits
    fired = [
        fe.WaitOver("agent", agent=a.name)
        for a in state.agents.values()
        if a.away_since is not None and now - a.away_since > limits.agent_s
    ]
    fired += [fe.WaitOver("notice", agent=a.name) for a in state.agents.values() if a.notice and now > a.notice_until]
    for run in state.runs.values():
        if run.status == STOPPING and run.end_by is not None and now >= run.end_by:
            fired.append(fe.WaitOver("grace", run.run))
        if run.status == GOING and run.alone_since is not None and now - run.alone_since > limits.alone_s:
            fired.append(fe.WaitOver("alone", run.run))
        if run.status == GOING and run.compat and run.regroup and 0.0 < run.not_before <= now:
            fired.append(fe.WaitOver("regroup", run.run))
    for p in state.processes.values():
        agent = state.agents.get(p.agent)
        what = _process_due(p, now, limits, away=agent is None or agent.away_since is not None)
        if what:
            fired.append(fe.WaitOver(what, p.run, p.member))
    return tuple(fired)


def _process_due(p: Process, now: float, limits: Limits, *, away: bool) -> str:
    if p.status in (BACKOFF, GIVEN_UP) and now >= p.until:
        return "backoff"
    # A member that is silent together with its agent is most likely only cut off, and so may be we ourselves.
    if p.status == RUNNING and not away and p.silent_since is not None and now - p.silent_since > limits.revive_s:
        return "revive"
    if p.alive and p.missing_since is not None and now - p.missing_since > limits.missing_s:
        return "missing"
    return ""


class _Draft:
    """A state under change; it lives for one event."""

    def __init__(self, state: State, now: float) -> None:
        self.base = state
        self.now = now
        self.agents = dict(state.agents)
        self.runs = dict(state.runs)
        self.processes = dict(state.processes)
        self.asked: list[fe.Instruction] = []

    def freeze(self) -> State:
        return replace(self.base, agents=self.agents, runs=self.runs, processes=self.processes)

    def of_run(self, run: str) -> list[Process]:
        return [p for p in self.processes.values() if p.run == run]

    def update(self, p: Process, **changes: object) -> Process:
        changed = replace(p, **changes)  # type: ignore[arg-type]
        self.processes[p.run, p.member] = changed
        return changed

    def set_run(self, run: str, **changes: object) -> Wanted:
        self.runs[run] = replace(self.runs[run], **changes)  # type: ignore[arg-type]
        return self.runs[run]

    def next_incarnation(self) -> tuple[int, str]:
        self.base = replace(self.base, count=self.base.count + 1)
        return self.base.count, f"{self.base.salt}-{self.base.count}"

    # --- moving on

    def advance(self) -> None:
        for name in list(self.runs):
            if self.runs[name].status == FINISHING:
                self.fill_evaluators(self.runs[name])
            self.settle(name)
        for run in list(self.runs.values()):
            if run.status == GOING and run.compat:
                self.align(run)
            elif run.status == GOING:
                self.fill_servers(run)
                self.fill(run)
                self.fill_evaluators(run)

    def fill_servers(self, run: Wanted) -> None:
        """Spread the servers over the agents, so that no machine takes two of them with it if another has room."""
        while self.count(run, SERVER) < run.servers:
            usable = [a for a in self.offered(run) if a.slots is None or self.room(a, run) > 0]
            if not usable:
                return
            here = [p.agent for p in self.of_run(run.run) if p.role == SERVER]
            agent = min(usable, key=lambda a: (here.count(a.name), a.order))
            self.start_new(agent, self.runs[run.run], "the run needs servers", role=SERVER)

    def fill_evaluators(self, run: Wanted) -> None:
        """Where the fewest train; an evaluator takes nobody's place, and waits for those who train to be started."""
        while self.runs[run.run].seen and self.count(run, EVALUATOR) < run.evaluators:
            usable = self.offered(run)
            if not usable:
                return
            busy = [p.agent for p in self.processes.values() if p.alive]
            agent = min(usable, key=lambda a: (busy.count(a.name), a.order))
            self.start_new(agent, self.runs[run.run], "the run is evaluated beside the training", role=EVALUATOR)

    def count(self, run: Wanted, role: str) -> int:
        """How many processes of a role there are that stay."""
        staying = [p for p in self.of_run(run.run) if p.role == role and (p.status != ENDING or p.again)]
        return sum(1 for p in staying if self.is_usable(p.agent))

    def fill(self, run: Wanted) -> None:
        for agent in self.offered(run):
            while self.room(agent, run) > 0:
                self.start_new(agent, run, "there is room for it")

    def offered(self, run: Wanted) -> list[Agent]:
        """The agents that a run may use now, in the order in which they came."""
        found = [a for a in self.agents.values() if a.usable and (not run.pools or not a.pool or a.pool in run.pools)]
        return sorted(found, key=lambda a: a.order)

    def room(self, agent: Agent, run: Wanted) -> int:
        """How many more processes that train or serve an agent can take; evaluators count nowhere."""
        if agent.slots is not None:
            here = [p for p in self.processes.values() if p.agent == agent.name and p.role != EVALUATOR]
            return agent.slots - len(here)
        return run.max_members - self.count(run, TRAINER)

    def wants(self, agent: Agent, run: Wanted, role: str) -> bool:
        """Whether one more process of a role could be of use on an agent."""
        return self.count(run, role) < run.evaluators if role == EVALUATOR else self.room(agent, run) > 0

    def is_usable(self, agent: str) -> bool:
        """Whether processes there count; those of an agent that is away may still be back."""
        return agent in self.agents and not self.agents[agent].notice

    def start_new(
        self,
        agent: Agent,
        run: Wanted,
        reason: str,
        env: tuple[tuple[str, str], ...] = (),
        *,
        role: str = TRAINER,
        mark: str = "",
    ) -> None:
        taken = {p.member for p in self.of_run(run.run)} | set(run.guests)
        stem = f"{agent.name}/{mark or MARKS.get(role, '')}"
        index = next(i for i in range(len(taken) + 1) if f"{stem}{i}" not in taken)
        order, incarnation = self.next_incarnation()
        p = Process(run.run, f"{stem}{index}", incarnation, agent.name, STARTING, order)
        env = env or _role(p)
        self.processes[p.run, p.member] = p
        self.set_run(run.run, seen=True, preempted=False, alone_since=None)
        self.asked.append(fe.StartProcess(agent.name, p.run, p.member, incarnation, False, reason, env))

    def start_again(self, p: Process, reason: str) -> None:
        order, incarnation = self.next_incarnation()
        self.processes[p.run, p.member] = Process(p.run, p.member, incarnation, p.agent, STARTING, order)
        self.asked.append(fe.StartProcess(p.agent, p.run, p.member, incarnation, True, reason, _role(p)))

    def end(self, p: Process, reason: str, grace_s: float, again: str = "") -> None:
        if p.status in (STARTING, RUNNING):
            self.update(p, status=ENDING, again=again)
            self.asked.append(fe.EndProcess(p.agent, p.run, p.member, p.incarnation, grace_s, reason))
        elif p.status == ENDING:
            self.update(p, again=again)
        else:
            del self.processes[p.run, p.member]

    def settle(self, name: str) -> None:
        """End a run that has nothing left to wait for."""
        run = self.runs[name]
        processes = [p for p in self.of_run(name) if p.role != EVALUATOR]
        evaluators = [p for p in self.of_run(name) if p.role == EVALUATOR and (p.alive or p.status == BACKOFF)]
        waiting = any(p.status == BACKOFF for p in processes)
        if any(p.alive for p in processes) or run.guests or run.status == OVER:
            self.set_run(name, alone_since=None)
        elif evaluators and run.status == FINISHING:
            if not run.trained:
                self.set_run(name, trained=True)
                self.asked.append(fe.TrainingOver(name))
        elif run.status == STOPPING:
            if not evaluators:
                self.over(name)
                self.asked.append(fe.RunEnded(name, run.reason, run.exit_code))
        elif run.status == FINISHING or (not waiting and any(p.status == DONE for p in processes)):
            for p in evaluators:
                self.end(p, "the training is over", grace_s=5.0)
            self.over(name)
            self.asked.append(fe.RunEnded(name, "all members are done", 0))
        elif not any(a.away_since is None for a in self.agents.values()) and run.seen and run.alone_since is None:
            self.set_run(name, alone_since=self.now)

    def over(self, name: str) -> None:
        self.set_run(name, status=OVER, end_by=None, alone_since=None)
        for p in self.of_run(name):
            if not p.alive:
                del self.processes[p.run, p.member]

    def fail(self, name: str, reason: str, exit_code: int) -> None:
        for p in self.of_run(name):
            self.end(p, f"the run failed: {reason}", grace_s=5.0)
        self.over(name)
        self.asked.append(fe.RunFailed(name, reason, exit_code))

    # --- losing

    def lose(self, p: Process, cause: str, detail: str) -> None:
        """A process is gone that was not asked to go for good."""
        run = self.runs[p.run]
        if run.status != GOING and not (p.role == EVALUATOR and run.status == FINISHING):
            del self.processes[p.run, p.member]
            if run.status == FINISHING and cause == "user":
                self.fail(p.run, f"{p.member}: {detail}", 1)
            return
        agent = self.agents.get(p.agent)
        if cause == "preempted" and (agent is None or agent.notice):
            del self.processes[p.run, p.member]
            self.set_run(p.run, preempted=run.preempted or p.role != EVALUATOR)
            return
        if cause == "refused":
            self.give_up(p, cause, f"{p.member}: {detail}", "it does not fit into this run")
            return
        decision = self.judge(run, p.member, cause)
        if isinstance(decision, budget.GiveUp):
            self.give_up(p, cause, f"{p.member}: {detail or cause}", decision.reason)
        elif decision.after_s > 0.0 or agent is None or not agent.usable:
            # An agent that is away or about to go may be back; the wait ends when it can start something.
            self.update(
                p, status=BACKOFF, until=self.now + decision.after_s, again="", silent_since=None, missing_since=None
            )
            if decision.after_s > 0.0:
                text = f"{p.member} is started again in {decision.after_s:.1f} s: {decision.reason}"
                self.asked.append(fe.Tell(p.run, text, p.member))
        else:
            self.start_again(p, decision.reason)

    def judge(self, run: Wanted, who: str, cause: str) -> budget.Decision:
        kind: budget.Cause = "user" if cause == "user" else "preempted" if cause == "preempted" else "infrastructure"
        history = run.losses.get(who, ())
        losses = {**run.losses, who: (*history[-99:], budget.Loss(self.now, kind))}
        self.set_run(run.run, losses=losses)
        return budget.decide(history, kind, self.now, run.restarts)

    def give_up(self, p: Process, cause: str, what: str, why: str) -> None:
        if p.role == EVALUATOR:
            again_s = self.base.limits.forgive_s if cause == "infrastructure" else float("inf")
            self.update(p, status=GIVEN_UP, until=self.now + again_s, again="")
            self.asked.append(fe.Tell(p.run, f"the training goes on without its evaluator: {what} ({why})", p.member))
            return
        if cause == "user":
            del self.processes[p.run, p.member]
            self.fail(p.run, f"{what} ({why})", 1)
            return
        self.update(p, status=GIVEN_UP, until=self.now + self.base.limits.forgive_s, again="")
        run = self.runs[p.run]
        left = [q for q in self.of_run(p.run) if q.status not in (GIVEN_UP, DONE) and q.role == p.role]
        serves = p.role == SERVER
        needed = 1 if serves else run.min_members
        if len(left) + (0 if serves else len(run.guests)) < needed:
            kind = "servers" if serves else "members"
            self.fail(p.run, f"{what} ({why}); fewer than {needed} {kind} are left", 1 if cause == "refused" else 5)
        else:
            self.asked.append(fe.Tell(p.run, f"{p.member} is not started again for now: {why}", p.member))

    # --- compat: no membership, so any change starts all anew

    def layout(self, run: Wanted) -> list[Agent]:
        """The agent of each rank, if the group were started now."""
        places: list[Agent] = []
        for agent in self.offered(run):
            room = run.max_members + run.beside - len(places)
            if agent.slots is not None:
                others = sum(1 for p in self.processes.values() if p.agent == agent.name and p.run != run.run)
                room = min(room, agent.slots - others)
            places += [agent] * max(0, room)
        return places

    def align(self, run: Wanted) -> None:
        processes = self.of_run(run.run)
        places = self.layout(run)
        if processes and not run.regroup and not any(p.status == DONE for p in processes):
            have = sorted(p.agent for p in processes)
            away = any(a.away_since is not None for a in self.agents.values() if a.name in have)
            enough = len(places) >= run.min_members + run.beside
            if have != sorted(a.name for a in places) and not away and enough:
                self.regroup(run, f"the agents now offer {len(places)} places instead of {len(processes)}", 0.0)
        run = self.runs[run.run]
        if self.of_run(run.run) or len(places) < run.min_members + run.beside or self.now < run.not_before:
            return
        again = bool(run.generation)
        run = self.set_run(run.run, generation=run.generation + 1, regroup="", not_before=0.0)
        hosts = [Place(agent.name, agent.host or "127.0.0.1") for agent in places]
        restarts, most = run.generation - 1, run.restarts.infrastructure
        envs = rendezvous(run.compat, run.run, self.base.salt, hosts, restarts, most, run.servers)
        reason = "all start anew" if again else "the group is complete"
        for agent, env, task in zip(places, envs, tasks(run.compat, len(places), run.servers), strict=True):
            self.start_new(agent, run, reason, env, mark=_TASK_MARKS.get(task.type, ""))

    def regroup(self, run: Wanted, reason: str, after_s: float) -> None:
        self.set_run(run.run, regroup=reason, not_before=self.now + after_s if after_s else 0.0)
        self.asked.append(fe.Tell(run.run, f"all members are started anew: {reason}"))
        for p in self.of_run(run.run):
            self.end(p, f"all members are started anew: {reason}", grace_s=5.0)

    def dismiss(self, run: Wanted) -> None:
        """The chief is done; workers and servers would wait for its orders for ever."""
        self.set_run(run.run, status=FINISHING)
        for p in self.of_run(run.run):
            if p.status != DONE:
                self.end(p, "the chief is done", grace_s=5.0)

    def lose_of_group(self, run: Wanted, p: Process, cause: str, detail: str) -> None:
        del self.processes[p.run, p.member]
        if run.status != GOING or run.regroup:
            return
        decision = self.judge(run, "", cause)
        if isinstance(decision, budget.GiveUp):
            self.fail(run.run, f"{p.member}: {detail or cause} ({decision.reason})", 1 if cause == "user" else 5)
        else:
            self.regroup(self.runs[run.run], f"{p.member} ended: {detail or cause}", decision.after_s)


def _role(p: Process) -> tuple[tuple[str, str], ...]:
    return (("SHOAL_ROLE", p.role),) if p.role != TRAINER else ()


def _on_opened(draft: _Draft, event: fe.Opened) -> None:
    draft.base = replace(draft.base, salt=event.salt)
    for name, agent in draft.agents.items():
        draft.agents[name] = replace(agent, away_since=draft.now)
    for p in list(draft.processes.values()):
        draft.update(p, silent_since=None)


def _on_agent_joined(draft: _Draft, event: fe.AgentJoined) -> None:
    known = draft.agents.get(event.agent)
    order = known.order if known else 1 + max((a.order for a in draft.agents.values()), default=0)
    notice = (known.notice, known.notice_until) if known else ("", 0.0)
    draft.agents[event.agent] = Agent(event.agent, event.slots, event.host, order, None, *notice, event.pool)
    living = set(event.members)
    for p in [p for p in draft.processes.values() if p.agent == event.agent and p.alive]:
        if (p.run, p.member, p.incarnation) not in living and event.successor:
            detail = "its agent died, and it with it"
            _on_exited(draft, fe.ProcessExited(p.run, p.member, p.incarnation, "infrastructure", detail))
        elif (p.run, p.member, p.incarnation) not in living:
            draft.update(p, missing_since=draft.now)
        elif p.status == ENDING:
            draft.asked.append(fe.EndProcess(p.agent, p.run, p.member, p.incarnation, 5.0, "it was asked to end"))
        else:
            since = draft.now if p.silent_since is not None else None
            draft.update(p, status=RUNNING, missing_since=None, silent_since=since)
    for run, member, incarnation in event.members:
        if not _is_known(draft, run, member, incarnation):
            _adopt_or_end(draft, event.agent, run, member, incarnation)


def _is_known(draft: _Draft, run: str, member: str, incarnation: str) -> bool:
    p = draft.processes.get((run, member))
    return p is not None and p.incarnation == incarnation and p.alive


def _adopt_or_end(draft: _Draft, agent: str, run: str, member: str, incarnation: str) -> None:
    """A process that nobody counted on any more: it may go on if there is room for it."""
    wanted = draft.runs.get(run)
    p = draft.processes.get((run, member))
    free = p is None or not p.alive
    if wanted is not None and wanted.status == GOING and not wanted.compat and free:
        draft.processes.pop((run, member), None)
        if draft.wants(draft.agents[agent], wanted, role_of(member)):
            order, _ = draft.next_incarnation()
            draft.processes[run, member] = Process(run, member, incarnation, agent, RUNNING, order)
            draft.set_run(run, seen=True, alone_since=None)
            return
    draft.asked.append(fe.EndProcess(agent, run, member, incarnation, 5.0, "nobody counts on it any more"))


def _on_agent_away(draft: _Draft, event: fe.AgentAway) -> None:
    agent = draft.agents.get(event.agent)
    if agent is not None and agent.away_since is None:
        draft.agents[event.agent] = replace(agent, away_since=draft.now)


def _on_agent_notice(draft: _Draft, event: fe.AgentNotice) -> None:
    agent = draft.agents.get(event.agent)
    if agent is not None:
        until = draft.now + event.within_s + 60.0
        draft.agents[event.agent] = replace(agent, notice=event.cause or "a notice", notice_until=until)
        for p in [p for p in draft.processes.values() if p.agent == event.agent and p.status in (BACKOFF, GIVEN_UP)]:
            del draft.processes[p.run, p.member]


def _on_run_wanted(draft: _Draft, event: fe.RunWanted) -> None:
    wanted = Wanted(event.run, event.min_members, event.max_members, event.compat, event.restarts, event.servers)
    wanted = replace(wanted, evaluators=event.evaluators, pools=event.pools)
    draft.runs[event.run] = wanted


def _on_started(draft: _Draft, event: fe.ProcessStarted) -> None:
    p = draft.processes.get((event.run, event.member))
    if p is not None and p.incarnation == event.incarnation:
        draft.update(p, pid=event.pid, status=RUNNING if p.status == STARTING else p.status)


def _on_exited(draft: _Draft, event: fe.ProcessExited) -> None:
    p = draft.processes.get((event.run, event.member))
    if p is None or p.incarnation != event.incarnation or not p.alive:
        return
    run = draft.runs[event.run]
    if p.status == ENDING and not p.again:
        del draft.processes[p.run, p.member]
    elif event.cause == "done" and not p.again and run.status in (GOING, FINISHING):
        draft.update(p, status=DONE)
        if run.compat and p.leads:
            draft.dismiss(run)
    elif run.compat:
        draft.lose_of_group(run, p, event.cause, event.detail)
    elif event.cause == "asked" and not p.again:
        # Somebody else ended it, most likely the agent on its way out: a breath shows which.
        draft.update(p, status=BACKOFF, until=draft.now + 1.0)
    else:
        draft.lose(p, "infrastructure" if p.again else event.cause, p.again or event.detail)


def _on_silent(draft: _Draft, event: fe.MemberSilent) -> None:
    p = draft.processes.get((event.run, event.member))
    if p is not None and p.alive and p.silent_since is None:
        draft.update(p, silent_since=draft.now)


def _on_back(draft: _Draft, event: fe.MemberBack) -> None:
    p = draft.processes.get((event.run, event.member))
    if p is not None:
        draft.update(p, silent_since=None)


def _on_guests(draft: _Draft, event: fe.GuestsChanged) -> None:
    draft.set_run(event.run, guests=event.guests)


def _on_scaled(draft: _Draft, event: fe.Scaled) -> None:
    run = draft.set_run(event.run, min_members=event.min_members, max_members=event.max_members)
    if run.compat or run.status != GOING:
        return
    staying = [p for p in draft.of_run(event.run) if p.status != ENDING and draft.is_usable(p.agent)]
    staying = [p for p in staying if p.role == TRAINER]
    elastic = [p for p in staying if draft.agents[p.agent].slots is None]
    extra = max(0, len(staying) - event.max_members)
    elastic.sort(key=lambda p: (p.status in (STARTING, RUNNING), p.member in event.keep, -p.order))
    for p in elastic[:extra]:
        draft.end(p, f"scaled to at most {event.max_members} members", draft.base.limits.grace_s)


def _on_stopping(draft: _Draft, event: fe.RunStopping) -> None:
    run = draft.runs[event.run]
    end_by = draft.now + event.grace_s
    if run.status == STOPPING and run.end_by is not None:
        # Asked again by somebody in a greater hurry.
        draft.set_run(event.run, end_by=min(run.end_by, end_by))
    if run.status not in (GOING, FINISHING):
        return
    draft.set_run(event.run, status=STOPPING, exit_code=event.exit_code, reason=event.reason, end_by=end_by)
    for p in draft.of_run(event.run):
        if run.compat or not p.alive or p.member in event.idle:
            draft.end(p, event.reason, event.grace_s)


def _on_finished(draft: _Draft, event: fe.RunFinished) -> None:
    if draft.runs[event.run].status == GOING:
        draft.set_run(event.run, status=FINISHING)
        for p in draft.of_run(event.run):
            if p.status in (BACKOFF, GIVEN_UP) and p.role != EVALUATOR:
                del draft.processes[p.run, p.member]


def _on_wait_over(draft: _Draft, event: fe.WaitOver) -> None:
    if event.what == "agent":
        _forget_agent(draft, event.agent)
    elif event.what == "notice" and event.agent in draft.agents:
        draft.agents[event.agent] = replace(draft.agents[event.agent], notice="")
    elif event.what == "grace":
        for p in draft.of_run(event.run):
            draft.end(p, "it did not stop in time", grace_s=5.0)
        draft.set_run(event.run, end_by=None)
    elif event.what == "alone" and draft.runs[event.run].preempted:
        draft.over(event.run)
        draft.asked.append(fe.RunEnded(event.run, "every machine went away after a notice, and no other came", 75))
    elif event.what == "alone":
        draft.fail(event.run, "all members are lost and no agent is left to start others", 5)
    elif event.what == "regroup":
        draft.set_run(event.run, not_before=0.0)
    else:
        _process_wait_over(draft, event)


def _process_wait_over(draft: _Draft, event: fe.WaitOver) -> None:
    p = draft.processes.get((event.run, event.member))
    if p is None:
        return
    if event.what == "backoff":
        if p.agent in draft.agents and draft.agents[p.agent].usable:
            draft.start_again(p, "its back-off is over")
        else:
            draft.update(p, until=draft.now + 1.0)
    elif event.what == "revive":
        why = f"its member was silent for {draft.base.limits.revive_s:g} s"
        draft.end(p, why, grace_s=1.0, again=why)
    elif event.what == "missing":
        detail = "it was gone when its agent came back"
        _on_exited(draft, fe.ProcessExited(p.run, p.member, p.incarnation, "infrastructure", detail))


def _forget_agent(draft: _Draft, name: str) -> None:
    """The agent did not come back: its processes are not counted on any more."""
    if draft.agents.pop(name, None) is None:
        return
    for p in [p for p in draft.processes.values() if p.agent == name]:
        run = draft.runs[p.run]
        if p.status == DONE:
            continue
        if run.compat and p.alive and p.status != ENDING:
            draft.lose_of_group(run, p, "preempted", f"agent {name} is lost")
        else:
            draft.processes.pop((p.run, p.member), None)
    for run in draft.runs.values():
        if run.status != OVER:
            draft.asked.append(
                fe.Tell(run.run, f"agent {name} is lost: it did not come back within {draft.base.limits.agent_s:g} s")
            )


_HANDLERS: dict[type, Callable[[_Draft, Any], None]] = {
    fe.Opened: _on_opened,
    fe.AgentJoined: _on_agent_joined,
    fe.AgentAway: _on_agent_away,
    fe.AgentNotice: _on_agent_notice,
    fe.RunWanted: _on_run_wanted,
    fe.ProcessStarted: _on_started,
    fe.ProcessExited: _on_exited,
    fe.MemberSilent: _on_silent,
    fe.MemberBack: _on_back,
    fe.GuestsChanged: _on_guests,
    fe.Scaled: _on_scaled,
    fe.RunStopping: _on_stopping,
    fe.RunFinished: _on_finished,
    fe.WaitOver: _on_wait_over,
}
