"""All that a coordinator knows, as a function of its journal.

`Runs.apply(run, event, now)` is the one door: membership and fleet decide, and what follows from one for the other is
worked out here, so that the journal holds only what came from outside, and replaying it gives the same state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Union

from shoal import exit_codes
from shoal.core.fleet import decide as fl
from shoal.core.fleet import events as fe
from shoal.core.fleet import launcher_env
from shoal.core.fleet.requirements import SlotSize
from shoal.core.fleet.state import DesiredRun
from shoal.core.membership import decide as membership
from shoal.core.membership import events, leases
from shoal.core.membership.state import EVALUATOR, SERVER, TRAINER
from shoal.core.parameter_server import decide as parameter_server
from shoal.core.provisioning import decide as provisioning
from shoal.core.provisioning import events as se
from shoal.core.runs import evaluation
from shoal.core.runs import events as runs_events
from shoal.core.runs.settings import (
    machine_requirements,
    membership_settings,
    no_machines,
    restart_limits,
    server_count,
)
from shoal.core.runs.spec import Problem, RunSpec, Value

Instruction = Union[
    events.Instruction,
    fe.Instruction,
    se.Instruction,
    evaluation.Instruction,
    evaluation.AnnounceCheckpoint,
    evaluation.AnnounceTrainingFinished,
]
Asked = list[tuple[str, Instruction]]

DONE = "done"
_FLEET = tuple(kind for kind in fe.Event.__args__)  # type: ignore[attr-defined]
_SUPPLY = tuple(kind for kind in se.Event.__args__)  # type: ignore[attr-defined]
_CHANGES = (events.FormWorld, events.ProposeWorld, events.DissolveWorld, events.PublishPlacement)
EARLY_GRACE_S = 600.0
_VICTIMS = ("S204", "S207", "S209")


@dataclass(slots=True)
class RunState:
    """One run: its spec, its membership, and how it ended if it did."""

    name: str
    spec: RunSpec
    settings: Mapping[str, Value]
    membership: membership.MembershipState
    created: float
    since: float
    ended: float | None = None
    status: str = ""
    exit_code: int | None = None
    reason: str = ""
    ends_as: str = "resumable"
    last_change: str = ""
    failure: runs_events.ExceptionReported | None = None
    failed_at: float = 0.0
    pids: dict[str, int] = field(default_factory=dict)
    evaluation: evaluation.EvaluationState = field(default_factory=evaluation.EvaluationState)
    user: str = ""
    asked_to_stop: bool = False
    problem: Problem | None = None
    budget: float | None = None

    @property
    def over(self) -> bool:
        return self.ended is not None

    @property
    def tensorboard(self) -> bool:
        """Whether event files are written."""
        return bool(self.settings.get("tensorboard", True))

    @property
    def heartbeat_s(self) -> float:
        """How often its members renew their leases."""
        rules = self.membership.settings
        return leases.heartbeat_s(float(self.settings.get("heartbeat_s", 0.5)), rules.max_members, rules.lease_s)

    @property
    def state_name(self) -> str:
        """The status in one word."""
        if self.status:
            return self.status
        if self.membership.stopping is not None:
            return "stopping"
        state = self.membership
        if state.world is not None or state.placement is not None or state.finished:
            return "training"
        return "waiting" if self.membership.started else "starting"


@dataclass(slots=True)
class CoordinatorState:
    """The runs, the fleet, the supply and the machines of one coordinator; `at` is when it last heard of something."""

    runs: dict[str, RunState] = field(default_factory=dict)
    fleet: fl.FleetState = field(default_factory=fl.FleetState)
    supply: provisioning.ProvisioningState = field(default_factory=provisioning.ProvisioningState)
    machines: dict[str, runs_events.MachineReported] = field(default_factory=dict)
    at: float = 0.0

    def apply(self, name: str, event: Any, now: float) -> Asked:
        """Take in one event, and say what to do about it, in order, each with its run."""
        asked: Asked = []
        if isinstance(event, runs_events.RunCreated):
            self._create(name, event, now, asked)
        elif isinstance(event, runs_events.MachineReported):
            self.machines[event.agent] = event
        elif isinstance(event, _SUPPLY):
            self._supply(event, now, asked)
        elif isinstance(event, _FLEET):
            idle = self._is_idle(event)
            self._before_fleet(event, now, asked)
            self._fleet(replace(event, cause="idle") if idle else event, now, asked)
            self._tell_supply(event, now, asked)
        elif name in self.runs:
            self._run_event(self.runs[name], event, now, asked)
        if (needs := self._needs()) != self.supply.demands:
            self._supply(se.DemandChanged(needs), now, asked)
        self.at = now
        return asked

    def projects(self) -> list[str]:
        """Those of runs that go on, wait for their turn, or can be resumed."""
        return [run.spec.project for run in self.runs.values() if run.spec.project and run.status != DONE]

    def size_of(self, agent: str) -> SlotSize | None:
        """What each place of an agent was asked to have, None if nobody could ask."""
        hire = self.supply.allocations.get(agent)
        pool = self.supply.pools.get(hire.pool) if hire is not None else None
        return SlotSize(hire.cpus, hire.memory_bytes) if hire is not None and pool is not None and pool.sized else None

    # --- machines, and what runs need of them

    def _supply(self, event: se.Event, now: float, asked: Asked) -> None:
        self.supply, instructions = provisioning.decide(self.supply, event, now)
        going = [run.name for run in self.runs.values() if not run.over]
        for instruction in instructions:
            if isinstance(instruction, se.StopRunOverBudget):
                self._out_of_money(instruction, now, asked)
                continue
            if isinstance(instruction, se.FailInfeasibleRun):
                self._give_up(instruction, now, asked)
                continue
            # What happens to machines concerns all who may use them.
            told = (
                ([instruction.run] if instruction.run else going)
                if isinstance(instruction, se.ProvisioningNote)
                else [""]
            )
            asked.extend((name, instruction) for name in told)

    def _give_up(self, instruction: se.FailInfeasibleRun, now: float, asked: Asked) -> None:
        run = self.runs[instruction.run]
        asked.append((run.name, instruction))
        run.problem = no_machines(run.name, instruction.problems)
        self._fleet(fe.RunInfeasible(run.name, f"{run.problem.what}: {run.problem.why}"), now, asked)

    def _out_of_money(self, told: se.StopRunOverBudget, now: float, asked: Asked) -> None:
        run = self.runs.get(told.run)
        if run is not None and not run.over and run.membership.stopping is None:
            run.ends_as = "resumable"
            asked.append((run.name, told))
            self._membership(
                run, events.StopRequested(told.reason, checkpoint=True, exit_code=exit_codes.BUDGET_REACHED), now, asked
            )

    def _tell_supply(self, event: fe.Event, now: float, asked: Asked) -> None:
        if isinstance(event, fe.CoordinatorStarted):
            self._supply(se.CoordinatorWasDown(now - self.at), now, asked)
        elif isinstance(event, fe.AgentConnected):
            self._supply(se.AgentArrived(event.agent), now, asked)
        elif isinstance(event, fe.AgentNotice):
            self._supply(se.AgentLeaving(event.agent, event.cause), now, asked)
        elif isinstance(event, fe.FleetTimerExpired) and event.what == "agent" and event.agent not in self.fleet.agents:
            self._supply(se.AgentLost(event.agent, "its agent did not come back"), now, asked)

    def _needs(self) -> tuple[se.MachineDemand, ...]:
        """How many places each run could use: those of higher priority first, then in the order of submission."""
        needs: list[se.MachineDemand] = []
        for run in sorted((run for run in self.runs.values() if not run.over), key=lambda run: -run.spec.priority):
            wanted = self.fleet.runs.get(run.name)
            if wanted is not None and (run.spec.on or wanted.reserved):
                needs += self._needs_of(run, wanted)
        return tuple(needs)

    def _needs_of(self, run: RunState, wanted: DesiredRun) -> list[se.MachineDemand]:
        """Those of a run's roles; who is about to end gets nothing more, and keeps what it has until then."""
        going, finishing = wanted.status == fl.ACTIVE, wanted.status == fl.FINISHING
        asked = [
            (SERVER, wanted.servers, wanted.servers, going and wanted.has_own_pools(SERVER)),
            (EVALUATOR, wanted.evaluators, wanted.evaluators, (going or finishing) and wanted.has_own_pools(EVALUATOR)),
            (TRAINER, wanted.max_slots, wanted.min_slots, going and bool(run.spec.on)),
        ]
        needs = []
        for role, most, least, wants in asked:
            terms = wanted.requirements_of(role)
            if wants and most:
                # An evaluator that cannot be had keeps nobody from training.
                begun = role == EVALUATOR or _has_begun(run, wanted)
                need = se.MachineDemand(run.name, terms.pools, most, least, terms.cpus, terms.memory_bytes)
                budget = run.budget if going else None
                start_timeout_s = float(run.settings.get("start_timeout_s", need.start_timeout_s))
                needs.append(replace(need, budget=budget, started=begun, start_timeout_s=start_timeout_s))
        agents = dict.fromkeys(p.agent for p in self.fleet.of_run(run.name) if p.alive and not going)
        if held := tuple(name for name in agents if name in self.supply.allocations):
            needs.append(se.MachineDemand(run.name, (), 0, in_use=held))
        return needs

    # --- the life of a run

    def _create(self, name: str, event: runs_events.RunCreated, now: float, asked: Asked) -> None:
        low, high = event.spec.members
        rules = membership_settings(event.settings, low, high, pools=bool(event.spec.on))
        state = membership.MembershipState(settings=rules, started=event.spec.resume)
        run = RunState(name, event.spec, event.settings, state, created=now, since=now, reason=state.reason)
        run.user, run.budget = event.user, event.spec.budget
        self.runs[name] = run
        self._want(self.runs[name], low, high, now, asked)

    def _want(self, run: RunState, low: int, high: int, now: float, asked: Asked) -> None:
        servers, evaluators = _serving(run), int(bool(run.settings.get("evaluator", False)))
        restarts = restart_limits(run.settings)
        asking = (machine_requirements(run.spec), run.spec.priority)
        wanted = fe.RunRequested(run.name, low, high, run.spec.compat, restarts, servers, evaluators, *asking)
        self._fleet(replace(wanted, ports=str(run.settings.get("ports", ""))), now, asked)

    def _resume(self, run: RunState, event: runs_events.RunResumed, now: float, asked: Asked) -> None:
        """The number of worlds and the checkpoint are remembered; members are not, nor claims, which are done again."""
        old = run.membership
        run.membership = membership.MembershipState(
            settings=membership_settings(run.settings, event.min_members, event.max_members, pools=bool(run.spec.on)),
            number=old.number,
            generation=old.generation,
            order=old.order,
            started=old.started or old.checkpoint_step is not None,
            step=old.step,
            checkpoint_step=old.checkpoint_step,
            checkpoint_path=old.checkpoint_path,
            losses=old.losses,
            joins=old.joins,
            reason="resumed: waiting for members",
        )
        run.ended, run.status, run.exit_code, run.failure = None, "", None, None
        run.since, run.reason, run.ends_as = now, run.membership.reason, "resumable"
        run.asked_to_stop, run.problem = False, None
        run.evaluation = replace(run.evaluation, members={})
        self._want(run, event.min_members, event.max_members, now, asked)

    def _end(self, run: RunState, status: str, reason: str, exit_code: int, now: float) -> None:
        run.status, run.exit_code, run.ended, run.since = status, exit_code, now, now
        run.reason = run.last_change = reason

    def _run_event(self, run: RunState, event: Any, now: float, asked: Asked) -> None:
        if isinstance(event, runs_events.RunResumed):
            if run.over:
                self._resume(run, event, now, asked)
        elif isinstance(event, runs_events.BudgetSet):
            run.budget = event.budget
        elif run.over or isinstance(event, runs_events.ProgressMeasured):
            return
        elif isinstance(event, runs_events.UserStopRequested):
            run.ends_as, run.asked_to_stop = event.status, True
            self._membership(
                run,
                events.StopRequested(event.reason, event.checkpoint, exit_codes.RESUMABLE),
                now,
                asked,
                event.grace_s,
            )
        elif fl.role_of(getattr(event, "member", "")) == EVALUATOR:
            self._evaluation(run, event, now, asked)
        elif isinstance(event, runs_events.ExceptionReported):
            self._raised(run, event, now)
        else:
            if isinstance(event, events.CoordinatorRestarted):
                run.evaluation, _ = evaluation.decide(run.evaluation, event, now)
            self._membership(run, event, now, asked)

    def _raised(self, run: RunState, event: runs_events.ExceptionReported, now: float) -> None:
        """Keep the first cause: those that only lost their peers, and those that follow at once, are its victims."""
        follows = run.failure is not None and now - run.failed_at < 10.0
        if event.code in _VICTIMS or (follows and run.failure is not None and run.failure.code not in _VICTIMS):
            return
        run.failure, run.failed_at = event, now

    def _wait_for_others(self, run: RunState, reason: str, now: float, asked: Asked) -> None:
        """All were told to go before anybody had come to take over: those who are hired next begin where they ended."""
        asked.append((run.name, fe.FleetNote(run.name, f"{reason}; waiting for machines that are hired instead")))
        rules = run.membership.settings
        self._resume(run, runs_events.RunResumed(rules.min_members, rules.max_members), now, asked)

    # --- evaluators, whose comings and goings concern nobody else

    def _evaluation(self, run: RunState, event: Any, now: float, asked: Asked) -> None:
        if isinstance(event, evaluation.EvaluationReported) and run.membership.stopping is not None:
            return  # it is decided that the run ends; its last checkpoint is evaluated if it is resumed
        before = run.evaluation
        run.evaluation, instructions = evaluation.decide(before, event, now)
        asked.extend((run.name, instruction) for instruction in instructions)
        if isinstance(event, events.MemberLost) and event.member in before.members:
            self._fleet(fe.MemberUnresponsive(run.name, event.member), now, asked)
        elif isinstance(event, events.MemberConnected):
            self._fleet(fe.MemberResponsive(run.name, event.member), now, asked)
            if self.fleet.runs[run.name].trained:
                asked.append((run.name, evaluation.AnnounceTrainingFinished((event.member,), run.membership.step)))
        going = run.membership.stopping is None and not run.membership.finished
        for instruction in instructions:
            if isinstance(instruction, evaluation.StopEarly) and going:
                stop = events.StopRequested(instruction.reason, checkpoint=True, exit_code=exit_codes.OK)
                self._membership(run, stop, now, asked, EARLY_GRACE_S)

    # --- membership, and what follows from it for the processes

    def _membership(self, run: RunState, event: events.Event, now: float, asked: Asked, grace_s: float = 30.0) -> None:
        before = run.membership
        decide = parameter_server.decide if before.settings.servers else membership.decide
        after, instructions = decide(before, event, now)
        run.membership = after
        if after.reason != before.reason:
            run.reason, run.since = after.reason, now
        for instruction in instructions:
            asked.append((run.name, instruction))
            if isinstance(instruction, _CHANGES):
                run.last_change = instruction.reason
        if isinstance(event, events.MemberLost) and event.member in before.members:
            stuck = event.reason if event.hung else ""
            self._fleet(fe.MemberUnresponsive(run.name, event.member, stuck), now, asked)
        elif isinstance(event, events.MemberConnected):
            self._fleet(fe.MemberResponsive(run.name, event.member), now, asked)
        elif isinstance(event, events.ScaleRequested):
            keep = tuple(s.member for s in before.world.seats[: event.max_members]) if before.world else ()
            scaled = fe.RunScaled(run.name, event.min_members, event.max_members, keep)
            self._fleet(scaled, now, asked)
        elif isinstance(event, events.CheckpointWritten) and run.evaluation.members:
            told = evaluation.AnnounceCheckpoint(tuple(run.evaluation.members), event.step, event.path)
            asked.append((run.name, told))
        self._tell_guests(run, now, asked)
        if after.stopping is not None and (before.stopping is None or isinstance(event, events.StopRequested)):
            idle = self._idle(run.name, after)
            stop = fe.RunStopping(run.name, after.stopping.exit_code, grace_s, after.stopping.reason, idle)
            self._fleet(stop, now, asked)
        if after.finished and not before.finished:
            self._fleet(fe.RunFinished(run.name), now, asked)

    def _idle(self, run: str, state: membership.MembershipState) -> tuple[str, ...]:
        """Processes that have not come so far as to hold a state; nothing is lost if they end at once."""
        names = self.fleet.processes.of_run(run)
        busy = {name for name, member in state.members.items() if member.status != membership.STARTING}
        return tuple(name for name in names if name not in busy)

    def _tell_guests(self, run: RunState, now: float, asked: Asked) -> None:
        wanted = self.fleet.runs.get(run.name)
        if wanted is None:
            return
        members = run.membership.members
        strangers = members.keys() - self.fleet.processes.of_run(run.name).keys()
        known = [members[name] for name in members if name in strangers] if strangers else []
        guests = tuple(m.name for m in known if m.connected or not run.membership.finished)
        if guests != wanted.unmanaged:
            self._fleet(fe.UnmanagedMembersChanged(run.name, guests), now, asked)

    # --- processes, and what follows from them for the membership

    def _is_idle(self, event: fe.Event) -> bool:
        """Whether a process ends that had no part in the last step: it does not come to the end of the script."""
        if not isinstance(event, fe.ProcessExited) or event.run not in self.runs:
            return False
        state = self.runs[event.run].membership
        member = state.members.get(event.member)
        if member is None or member.incarnation != event.incarnation:
            return False
        return state.finished and member.status != membership.DONE

    def _before_fleet(self, event: fe.Event, now: float, asked: Asked) -> None:
        """The loss of a member is decided first: others wait for it, while a restart can wait."""
        if isinstance(event, fe.ProcessExited) and event.run in self.runs:
            run = self.runs[event.run]
            evaluator = run.evaluation.members.get(event.member)
            if evaluator is not None and evaluator.incarnation == event.incarnation:
                run.evaluation, _ = evaluation.decide(run.evaluation, events.MemberLeft(event.member, None), now)
            member = run.membership.members.get(event.member)
            if run.over or member is None or member.incarnation != event.incarnation:
                return
            if member.status == membership.DONE:
                if run.membership.finished and member.connected:
                    self._membership(run, events.MemberDisconnected(event.member), now, asked)
            else:
                detail = event.detail or event.cause
                self._membership(run, events.MemberLost(event.member, f"its process ended: {detail}"), now, asked)
        elif isinstance(event, fe.AgentNotice):
            for process in list(self.fleet.processes.values()):
                run_of = self.runs.get(process.run)
                if process.agent == event.agent and process.alive and run_of is not None and not run_of.over:
                    given = events.NoticeReceived(process.member, event.within_s, event.cause)
                    self._membership(run_of, given, now, asked)

    def _fleet(self, event: fe.Event, now: float, asked: Asked) -> None:
        self.fleet, instructions = fl.decide(self.fleet, event, now)
        for instruction in instructions:
            run = self.runs.get(instruction.run)
            if run is not None and isinstance(instruction, fe.MarkRunEnded) and _goes_on(run):
                self._wait_for_others(run, instruction.reason, now, asked)
                continue
            asked.append((instruction.run, instruction))
            if run is None or run.over:
                continue
            if isinstance(instruction, fe.MarkRunFailed):
                failure = run.failure if instruction.exit_code == exit_codes.FAILED else None
                self._end(run, "failed", _with_failure(instruction.reason, failure), instruction.exit_code, now)
            elif isinstance(instruction, fe.MarkTrainingFinished):
                told = evaluation.AnnounceTrainingFinished(tuple(run.evaluation.members), run.membership.step)
                asked.append((run.name, told))
            elif isinstance(instruction, fe.MarkRunEnded):
                status = DONE if instruction.exit_code == exit_codes.OK else run.ends_as
                self._end(run, status, instruction.reason, instruction.exit_code, now)
        if isinstance(event, fe.ProcessExited) and event.run in self.runs and not self.runs[event.run].over:
            self._tell_guests(self.runs[event.run], now, asked)


def _has_begun(run: RunState, wanted: DesiredRun) -> bool:
    """Whether somebody has trained; of an unmodified script, whether it was ever started."""
    state = run.membership
    return state.started or state.placement is not None or bool(run.spec.compat and wanted.seen)


def _goes_on(run: RunState) -> bool:
    """Whether a run whose members are gone only waits for others."""
    state = run.membership
    waits = state.stopping is not None and state.stopping.until_replaced and not state.finished
    return waits and not run.over and not run.asked_to_stop


def _with_failure(reason: str, failure: runs_events.ExceptionReported | None) -> str:
    if failure is None:
        return reason
    return f"{failure.member} raised {failure.kind}: {failure.text}"


def _serving(run: RunState) -> int:
    """How many processes of a run hold parameters, ours or TensorFlow's."""
    if run.spec.compat == launcher_env.PS:
        return server_count(run.settings)
    return run.membership.settings.servers
