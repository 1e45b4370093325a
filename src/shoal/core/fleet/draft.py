"""Draft of a fleet: starting, restarting and stopping processes while one event is handled."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

from shoal.core.draft import Draft
from shoal.core.fleet import events as fe
from shoal.core.fleet.state import (
    ENDING,
    MARKS,
    RUNNING,
    STARTING,
    AgentState,
    DesiredRun,
    FleetState,
    ProcessState,
)
from shoal.core.membership.state import TRAINER


class FleetDraft(Draft[FleetState, fe.Instruction]):
    """Working copy of a fleet; `agents`, `runs` and `processes` are changed in place."""

    def __init__(self, state: FleetState, now: float) -> None:
        super().__init__(state, now)
        self.agents = dict(state.agents)
        self.runs = dict(state.runs)
        self.processes = state.processes.copy()
        self._used_numbers: dict[tuple[str, str], int] = {}

    def freeze(self) -> FleetState:
        return replace(self.state, agents=self.agents, runs=self.runs, processes=self.processes)

    def of_run(self, run: str) -> list[ProcessState]:
        """Return the processes of a run."""
        return list(self.processes.of_run(run).values())

    def update(self, p: ProcessState, **changes: object) -> ProcessState:
        """Replace fields of a process and return it."""
        changed = replace(p, **changes)  # type: ignore[arg-type]
        self.processes[p.run, p.member] = changed
        return changed

    def remove(self, p: ProcessState) -> None:
        """Forget a process."""
        del self.processes[p.run, p.member]
        self._used_numbers.clear()

    def set_run(self, run: str, **changes: object) -> DesiredRun:
        """Replace fields of a run and return it."""
        self.runs[run] = replace(self.runs[run], **changes)  # type: ignore[arg-type]
        return self.runs[run]

    def is_usable(self, agent: str) -> bool:
        """Return whether processes of an agent count; those of a disconnected agent do, since it may reconnect."""
        return agent in self.agents and not self.agents[agent].notice

    def next_incarnation(self) -> tuple[int, str]:
        """Return a number and an incarnation that no other process has had."""
        self.set(count=self.state.count + 1)
        return self.state.count, f"{self.state.salt}-{self.state.count}"

    def start(
        self,
        agent: AgentState,
        run: DesiredRun,
        reason: str,
        env: tuple[tuple[str, str], ...] = (),
        *,
        role: str = TRAINER,
        mark: str = "",
    ) -> None:
        """Start a new member on an agent, named after the agent and the first free number."""
        taken = self.processes.of_run(run.run)
        stem = f"{agent.name}/{mark or MARKS.get(role, '')}"
        # All numbers below the last one that this draft gave out are taken.
        first = self._used_numbers.get((run.run, stem), 0)
        index = next(i for i in count(first) if f"{stem}{i}" not in taken and f"{stem}{i}" not in run.unmanaged)
        self._used_numbers[run.run, stem] = index
        order, incarnation = self.next_incarnation()
        p = ProcessState(run.run, f"{stem}{index}", incarnation, agent.name, STARTING, order)
        self.processes[p.run, p.member] = p
        self.set_run(run.run, seen=True, preempted=False, no_agents_since=None)
        self.instruct(fe.StartProcess(agent.name, p.run, p.member, incarnation, False, reason, env or _role_env(p)))

    def restart(self, p: ProcessState, reason: str) -> None:
        """Start a process of the same name on the same agent, as a new incarnation."""
        order, incarnation = self.next_incarnation()
        self.processes[p.run, p.member] = ProcessState(p.run, p.member, incarnation, p.agent, STARTING, order)
        self.instruct(fe.StartProcess(p.agent, p.run, p.member, incarnation, True, reason, _role_env(p)))

    def stop(self, p: ProcessState, reason: str, grace_s: float, restart_reason: str = "") -> None:
        """Stop a process, or forget it if it is not alive; with `restart_reason` it is restarted once it has ended."""
        if p.status in (STARTING, RUNNING):
            self.update(p, status=ENDING, restart_reason=restart_reason)
            self.instruct(fe.StopProcess(p.agent, p.run, p.member, p.incarnation, grace_s, reason))
        elif p.status == ENDING:
            self.update(p, restart_reason=restart_reason)
        else:
            self.remove(p)


def _role_env(p: ProcessState) -> tuple[tuple[str, str], ...]:
    return (("SHOAL_ROLE", p.role),) if p.role != TRAINER else ()
