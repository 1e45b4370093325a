"""A fleet under change: who is started where, who is ended, and when a run is over."""

from __future__ import annotations

from dataclasses import replace
from itertools import count as counting

from shoal import exit_codes
from shoal.core import addresses
from shoal.core.fleet import events as fe
from shoal.core.fleet import restart_policy
from shoal.core.fleet.launcher_env import ANY_PORTS, RankHost, launcher_environments, tf_tasks
from shoal.core.fleet.requirements import admits
from shoal.core.fleet.state import (
    ACTIVE,
    BACKOFF,
    DONE,
    ENDED,
    ENDING,
    FINISHING,
    GIVEN_UP,
    MARKS,
    RUNNING,
    STARTING,
    STOPPING,
    TASK_MARKS,
    AgentState,
    DesiredRun,
    FleetState,
    ProcessState,
)
from shoal.core.membership.state import EVALUATOR, SERVER, TRAINER

ALL_DONE = ("all members are done", exit_codes.OK)


class FleetDraft:
    """A state under change; it lives for one event."""

    def __init__(self, state: FleetState, now: float) -> None:
        self.base = state
        self.now = now
        self.agents = dict(state.agents)
        self.runs = dict(state.runs)
        self.processes = state.processes.copy()
        self.asked: list[fe.Instruction] = []

    def freeze(self) -> FleetState:
        return replace(self.base, agents=self.agents, runs=self.runs, processes=self.processes)

    def of_run(self, run: str) -> list[ProcessState]:
        return list(self.processes.of_run(run).values())

    def update(self, p: ProcessState, **changes: object) -> ProcessState:
        changed = replace(p, **changes)  # type: ignore[arg-type]
        self.processes[p.run, p.member] = changed
        return changed

    def set_run(self, run: str, **changes: object) -> DesiredRun:
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
        # Those that matter more come first, then those that came first.
        going = sorted((run for run in self.runs.values() if run.status == ACTIVE), key=lambda run: -run.priority)
        for run in going:
            if run.compat:
                self.align(run)
            elif self.can_begin(run):
                self.fill_servers(run)
                if run.has_own_pools(EVALUATOR):
                    # Before the trainers: theirs may be the same pools, and its place was hired for it.
                    self.fill_evaluators(run)
                self.fill(run)
                self.fill_evaluators(run)
        lacking = [run for run in going if not run.compat and self.lacks(run)]
        if lacking:
            self.make_room(lacking, going)
        else:
            for run in going:
                self.fill_with_spares(run)

    def can_begin(self, run: DesiredRun) -> bool:
        """Whether a run goes on, or has places enough to begin: one that waits holds nothing that others could use."""
        begun = [p for p in self.of_run(run.run) if p.role != EVALUATOR]
        if any(p.alive or p.status in (BACKOFF, DONE) for p in begun) or run.unmanaged:
            return True
        offered = self.offered(run)
        alone = all(other.status != ACTIVE or other.run == run.run for other in self.runs.values())
        if alone or any(agent.slots is None for agent in offered):
            return True
        free = sum(max(0, self.room(agent, run)) for agent in offered)
        if not run.has_own_pools(SERVER):
            return free >= run.min_members + run.servers
        beside = sum(max(0, self.room(agent, run)) for agent in self.offered(run, SERVER) if agent not in offered)
        return free >= run.min_members and free + beside >= run.min_members + run.servers

    def lacks(self, run: DesiredRun) -> int:
        """How many more places a run could use."""
        servers = max(0, run.servers - self.count(run, SERVER))
        beside = max(0, run.evaluators - self.count(run, EVALUATOR)) if run.has_own_pools(EVALUATOR) else 0
        return servers + beside + max(0, run.max_members - self.count(run, TRAINER))

    def make_room(self, lacking: list[DesiredRun], going: list[DesiredRun]) -> None:
        """End as many spares of other runs as those that lack members could use."""
        for run in lacking:
            roles = [TRAINER, *(role for role in (SERVER, EVALUATOR) if run.has_own_pools(role))]
            mine = {agent.name for role in roles for agent in self.offered(run, role) if agent.slots is not None}
            wanted = self.lacks(run) - self.ending_for(mine)
            for other in going:
                extra = self.count(other, TRAINER) - other.max_members
                spares = [p for p in self.of_run(other.run) if p.agent in mine and p.status in (STARTING, RUNNING)]
                spares = sorted((p for p in spares if p.role == TRAINER), key=lambda p: -p.order)
                for p in spares[: max(0, min(extra, wanted))] if other.run != run.run and not other.compat else ():
                    self.end(p, f"run {run.run} needs its place", self.base.timeouts.grace_s)
                    wanted -= 1

    def ending_for(self, agents: set[str]) -> int:
        """How many places on these agents will be free in a moment."""
        return sum(p.status == ENDING and not p.restart_reason and p.agent in agents for p in self.processes.values())

    def fill_servers(self, run: DesiredRun) -> None:
        """Spread the servers over the agents, so that no machine takes two of them with it if another has room."""
        while self.count(run, SERVER) < run.servers:
            usable = [a for a in self.offered(run, SERVER) if a.slots is None or self.room(a, run) > 0]
            if not usable:
                return
            here = [p.agent for p in self.of_run(run.run) if p.role == SERVER]
            agent = min(usable, key=lambda a: (here.count(a.name), a.order))
            self.start_new(agent, self.runs[run.run], "the run needs servers", role=SERVER)

    def fill_evaluators(self, run: DesiredRun) -> None:
        """Where the fewest train; an evaluator takes nobody's place, and waits for those who train to be started.

        One that has pools of its own has a place there.
        """
        own = run.has_own_pools(EVALUATOR)
        while (own or self.runs[run.run].seen) and self.count(run, EVALUATOR) < run.evaluators:
            usable = self.offered(run, EVALUATOR)
            usable = [a for a in usable if a.slots is None or self.room(a, run) > 0] if own else usable
            if not usable:
                return
            busy = [p.agent for p in self.processes.values() if p.alive]
            agent = min(usable, key=lambda a: (busy.count(a.name), a.order))
            self.start_new(agent, self.runs[run.run], "the run is evaluated beside the training", role=EVALUATOR)

    def count(self, run: DesiredRun, role: str) -> int:
        """How many processes of a role there are that stay."""
        staying = [p for p in self.of_run(run.run) if p.role == role and (p.status != ENDING or p.restart_reason)]
        return sum(1 for p in staying if self.is_usable(p.agent))

    def fill(self, run: DesiredRun) -> None:
        lacking = run.max_members - self.count(run, TRAINER)
        for agent in self.offered(run) if lacking > 0 else ():
            while lacking > 0 and self.room(agent, run) > 0:
                self.start_new(agent, run, "there is room for it")
                lacking -= 1

    def fill_with_spares(self, run: DesiredRun) -> None:
        """Nobody lacks anything: who would only stand by may as well be warm."""
        for agent in self.offered(run) if not run.compat and self.can_begin(run) else ():
            while agent.slots is not None and self.room(agent, run) > 0:
                self.start_new(agent, run, "there is room for it")

    def offered(self, run: DesiredRun, role: str = TRAINER) -> list[AgentState]:
        """The agents that a role of a run may use now, in the order in which they came."""
        return sorted(
            (a for a in self.agents.values() if a.usable and self.admits(a, run, role)), key=lambda a: a.order
        )

    def admits(self, agent: AgentState, run: DesiredRun, role: str) -> bool:
        """Whether processes of this role may run there."""
        terms = run.requirements_of(role)
        if not terms.pools and agent.pool in run.reserved:
            return False
        return admits(terms, agent.pool, agent.size)

    def room(self, agent: AgentState, run: DesiredRun) -> int:
        """How many more processes an agent can take; evaluators count only where they have pools of their own."""
        if agent.slots is not None:
            scoring = sum(self.runs[p.run].has_own_pools(EVALUATOR) for p in self.processes.evaluators(agent.name))
            return agent.slots - self.processes.slots_used(agent.name) - scoring
        return run.max_members - self.count(run, TRAINER)

    def wants(self, agent: AgentState, run: DesiredRun, role: str) -> bool:
        """Whether one more process of a role could be of use on an agent."""
        if not self.admits(agent, run, role):
            return False
        return self.count(run, role) < run.evaluators if role == EVALUATOR else self.room(agent, run) > 0

    def is_usable(self, agent: str) -> bool:
        """Whether processes there count; those of an agent that is away may still be back."""
        return agent in self.agents and not self.agents[agent].notice

    def start_new(
        self,
        agent: AgentState,
        run: DesiredRun,
        reason: str,
        env: tuple[tuple[str, str], ...] = (),
        *,
        role: str = TRAINER,
        mark: str = "",
    ) -> None:
        mine = self.processes.of_run(run.run)
        stem = f"{agent.name}/{mark or MARKS.get(role, '')}"
        index = next(i for i in counting() if f"{stem}{i}" not in mine and f"{stem}{i}" not in run.unmanaged)
        order, incarnation = self.next_incarnation()
        p = ProcessState(run.run, f"{stem}{index}", incarnation, agent.name, STARTING, order)
        env = env or _role(p)
        self.processes[p.run, p.member] = p
        self.set_run(run.run, seen=True, preempted=False, no_agents_since=None)
        self.asked.append(fe.StartProcess(agent.name, p.run, p.member, incarnation, False, reason, env))

    def start_again(self, p: ProcessState, reason: str) -> None:
        order, incarnation = self.next_incarnation()
        self.processes[p.run, p.member] = ProcessState(p.run, p.member, incarnation, p.agent, STARTING, order)
        self.asked.append(fe.StartProcess(p.agent, p.run, p.member, incarnation, True, reason, _role(p)))

    def end(self, p: ProcessState, reason: str, grace_s: float, restart_reason: str = "") -> None:
        if p.status in (STARTING, RUNNING):
            self.update(p, status=ENDING, restart_reason=restart_reason)
            self.asked.append(fe.StopProcess(p.agent, p.run, p.member, p.incarnation, grace_s, reason))
        elif p.status == ENDING:
            self.update(p, restart_reason=restart_reason)
        else:
            del self.processes[p.run, p.member]

    def settle(self, name: str) -> None:
        """End a run that has nothing left to wait for."""
        run = self.runs[name]
        if run.unmanaged or run.status == ENDED or any(p.alive and p.role != EVALUATOR for p in self.of_run(name)):
            self.set_run(name, no_agents_since=None)
            return
        processes = [p for p in self.of_run(name) if p.role != EVALUATOR]
        evaluators = [p for p in self.of_run(name) if p.role == EVALUATOR and (p.alive or p.status == BACKOFF)]
        came_to_the_end = any(p.status == DONE and p.role == TRAINER for p in processes)
        waiting = any(p.status == BACKOFF for p in processes)
        if evaluators and run.status == FINISHING:
            if not run.trained:
                self.set_run(name, trained=True)
                self.asked.append(fe.MarkTrainingFinished(name))
        elif run.status == STOPPING:
            if not evaluators:
                self.over(name)
                # Told to stop in its last step, it may have got to its end first.
                how = ALL_DONE if run.finished and came_to_the_end else (run.reason, run.exit_code)
                self.asked.append(fe.MarkRunEnded(name, *how))
        elif run.status == FINISHING or (not waiting and any(p.status == DONE for p in processes)):
            for p in evaluators:
                self.end(p, "the training is over", grace_s=5.0)
            self.over(name)
            if run.died_after_training and not came_to_the_end:
                # What the script does after its training, such as saving the model, may not be done.
                reason = f"trained to the end, but nobody came to the end of the script: {run.died_after_training}"
                self.asked.append(fe.MarkRunEnded(name, reason, exit_codes.RESUMABLE))
            else:
                self.asked.append(fe.MarkRunEnded(name, *ALL_DONE))
        elif run.requirements_of(TRAINER).pools:
            return  # others are hired for it
        elif (
            not any(a.disconnected_since is None for a in self.agents.values())
            and run.seen
            and run.no_agents_since is None
        ):
            self.set_run(name, no_agents_since=self.now)

    def over(self, name: str) -> None:
        self.set_run(name, status=ENDED, end_by=None, no_agents_since=None)
        for p in self.of_run(name):
            if not p.alive:
                del self.processes[p.run, p.member]

    def fail(self, name: str, reason: str, exit_code: int) -> None:
        for p in self.of_run(name):
            self.end(p, f"the run failed: {reason}", grace_s=5.0)
        self.over(name)
        self.asked.append(fe.MarkRunFailed(name, reason, exit_code))

    # --- losing

    def lose(self, p: ProcessState, cause: str, detail: str) -> None:
        """A process is gone that was not asked to go for good."""
        run = self.runs[p.run]
        if run.status != ACTIVE and not (p.role == EVALUATOR and run.status == FINISHING):
            del self.processes[p.run, p.member]
            if run.status == FINISHING and cause == "user":
                self.fail(p.run, f"{p.member}: {detail}", exit_codes.FAILED)
            elif run.status == FINISHING and p.role == TRAINER:
                self.set_run(p.run, died_after_training=f"{p.member}: {detail or cause}")
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
        if isinstance(decision, restart_policy.StopRestarting):
            self.give_up(p, cause, f"{p.member}: {detail or cause}", decision.reason)
        elif decision.after_s > 0.0 or agent is None or not agent.usable:
            # An agent that is away or about to go may be back; the wait ends when it can start something.
            self.update(
                p,
                status=BACKOFF,
                until=self.now + decision.after_s,
                restart_reason="",
                unresponsive_since=None,
                missing_since=None,
            )
            if decision.after_s > 0.0:
                text = f"{p.member} is started again in {decision.after_s:.1f} s: {decision.reason}"
                self.asked.append(fe.FleetNote(p.run, text, p.member))
        else:
            self.start_again(p, decision.reason)

    def judge(self, run: DesiredRun, who: str, cause: str) -> restart_policy.Decision:
        kind: restart_policy.Cause = (
            "user" if cause == "user" else "preempted" if cause == "preempted" else "infrastructure"
        )
        history = run.losses.get(who, ())
        losses = {**run.losses, who: (*history[-99:], restart_policy.PastExit(self.now, kind))}
        self.set_run(run.run, losses=losses)
        return restart_policy.decide(history, kind, self.now, run.restarts)

    def give_up(self, p: ProcessState, cause: str, what: str, why: str) -> None:
        if p.role == EVALUATOR:
            again_s = self.base.timeouts.give_up_s if cause == "infrastructure" else float("inf")
            self.update(p, status=GIVEN_UP, until=self.now + again_s, restart_reason="")
            self.asked.append(
                fe.FleetNote(p.run, f"the training goes on without its evaluator: {what} ({why})", p.member)
            )
            return
        if cause == "user":
            del self.processes[p.run, p.member]
            self.fail(p.run, f"{what} ({why})", exit_codes.FAILED)
            return
        self.update(p, status=GIVEN_UP, until=self.now + self.base.timeouts.give_up_s, restart_reason="")
        run = self.runs[p.run]
        left = [q for q in self.of_run(p.run) if q.status not in (GIVEN_UP, DONE) and q.role == p.role]
        serves = p.role == SERVER
        needed = 1 if serves else run.min_members
        if len(left) + (0 if serves else len(run.unmanaged)) < needed:
            kind = "servers" if serves else "members"
            self.fail(
                p.run,
                f"{what} ({why}); fewer than {needed} {kind} are left",
                exit_codes.FAILED if cause == "refused" else exit_codes.MEMBERS_LOST,
            )
        else:
            self.asked.append(fe.FleetNote(p.run, f"{p.member} is not started again for now: {why}", p.member))

    # --- compat: no membership, so any change starts all anew

    def layout(self, run: DesiredRun) -> list[AgentState]:
        """The agent of each rank, if the group were started now."""
        places: list[AgentState] = []
        for agent in self.offered(run):
            room = run.max_members + run.extra_processes - len(places)
            if agent.slots is not None:
                others = sum(1 for p in self.processes.values() if p.agent == agent.name and p.run != run.run)
                room = min(room, agent.slots - others)
            places += [agent] * max(0, room)
        return places

    def align(self, run: DesiredRun) -> None:
        processes = self.of_run(run.run)
        places = self.layout(run)
        if processes and not run.restart_reason and not any(p.status == DONE for p in processes):
            have = sorted(p.agent for p in processes)
            away = any(a.disconnected_since is not None for a in self.agents.values() if a.name in have)
            enough = len(places) >= run.min_members + run.extra_processes
            if have != sorted(a.name for a in places) and not away and enough:
                self.regroup(run, f"the agents now offer {len(places)} places instead of {len(processes)}", 0.0)
        run = self.runs[run.run]
        if self.of_run(run.run) or len(places) < run.min_members + run.extra_processes or self.now < run.restart_at:
            return
        again = bool(run.generation)
        run = self.set_run(run.run, generation=run.generation + 1, restart_reason="", restart_at=0.0)
        hosts = [RankHost(agent.name, agent.host or "127.0.0.1") for agent in places]
        restarts, most = run.generation - 1, run.restarts.infrastructure
        span = addresses.port_range(run.ports) or ANY_PORTS
        envs = launcher_environments(run.compat, run.run, self.base.salt, hosts, restarts, most, run.servers, span)
        reason = "all start anew" if again else "the group is complete"
        for agent, env, task in zip(places, envs, tf_tasks(run.compat, len(places), run.servers), strict=True):
            self.start_new(agent, run, reason, env, mark=TASK_MARKS.get(task.type, ""))

    def regroup(self, run: DesiredRun, reason: str, after_s: float) -> None:
        self.set_run(run.run, restart_reason=reason, restart_at=self.now + after_s if after_s else 0.0)
        self.asked.append(fe.FleetNote(run.run, f"all members are started anew: {reason}"))
        for p in self.of_run(run.run):
            self.end(p, f"all members are started anew: {reason}", grace_s=5.0)

    def dismiss(self, run: DesiredRun) -> None:
        """The chief is done; workers and servers would wait for its orders for ever."""
        self.set_run(run.run, status=FINISHING)
        for p in self.of_run(run.run):
            if p.status != DONE:
                self.end(p, "the chief is done", grace_s=5.0)

    def lose_of_group(self, run: DesiredRun, p: ProcessState, cause: str, detail: str) -> None:
        del self.processes[p.run, p.member]
        if run.status != ACTIVE or run.restart_reason:
            return
        decision = self.judge(run, "", cause)
        if isinstance(decision, restart_policy.StopRestarting):
            self.fail(
                run.run,
                f"{p.member}: {detail or cause} ({decision.reason})",
                exit_codes.FAILED if cause == "user" else exit_codes.MEMBERS_LOST,
            )
        else:
            self.regroup(self.runs[run.run], f"{p.member} ended: {detail or cause}", decision.after_s)


def _role(p: ProcessState) -> tuple[tuple[str, str], ...]:
    return (("SHOAL_ROLE", p.role),) if p.role != TRAINER else ()
