"""Agents and members connect, leave and crash in any order; replaying the journal gives the same state.

Agents carry out their instructions, but messages to them may be lost with their connection.
"""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shoal.coordinator.storage import state_snapshot
from shoal.core.fleet import decide as fl
from shoal.core.fleet import events as fe
from shoal.core.fleet.draft import FleetDraft
from shoal.core.membership import decide as mb
from shoal.core.membership import events as ev
from shoal.core.runs import events as run_events
from shoal.core.runs.decide import apply
from shoal.core.runs.state import CoordinatorState
from shoal.core.world import Address
from shoal.store import journal
from shoal.wire.api import RunSpec

AGENTS = st.sampled_from(["a", "b"])
RUNS = st.sampled_from(["r", "c"])


class Fleet(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.state = CoordinatorState()
        self.entries: list[journal.JournalEntry] = []
        self.snapshot = (0, b"")
        self.now = 1000.0
        self.slots: dict[str, int | None] = {"a": None, "b": 2}
        self.linked: set[str] = set()
        self.alive: dict[str, set[tuple[str, str, str]]] = {"a": set(), "b": set()}
        self.ends: list[tuple[str, str]] = []

    def on(self, run: str, event: Any) -> None:
        entry = journal.encode_event(len(self.entries) + 1, self.now, run, event)
        self.entries.append(entry)
        for name, instruction in apply(self.state, run, event, self.now):
            self.carry_out(name, instruction)

    def carry_out(self, run: str, instruction: Any) -> None:
        if isinstance(instruction, fe.StartProcess) and instruction.agent in self.linked:
            self.alive[instruction.agent].add((instruction.run, instruction.member, instruction.incarnation))
        elif isinstance(instruction, (fe.MarkRunEnded, fe.MarkRunFailed)):
            self.ends.append((run, type(instruction).__name__))

    @initialize(low=st.integers(1, 2), more=st.integers(0, 2))
    def begin(self, low: int, more: int) -> None:
        self.on("", fe.CoordinatorStarted("s0"))
        settings = {"restarts.user": 1, "restarts.infrastructure": 3, "lease_s": 3.0}
        for run, compat in (("r", ""), ("c", "torchrun")):
            spec = RunSpec(run, ("t.py",), "/", (low, low + more), compat=compat)
            self.on(run, run_events.RunCreated(spec, settings))

    @rule(agent=AGENTS)
    def agent_connects(self, agent: str) -> None:
        if agent not in self.linked:
            self.linked.add(agent)
            self.on("", fe.AgentConnected(agent, self.slots[agent], "h", tuple(sorted(self.alive[agent]))))

    @rule(agent=AGENTS, dies=st.booleans())
    def agent_disconnects(self, agent: str, dies: bool) -> None:
        if agent in self.linked:
            self.linked.discard(agent)
            if dies:
                self.alive[agent].clear()
            self.on("", fe.AgentDisconnected(agent))

    @rule(agent=AGENTS)
    def agent_gets_notice(self, agent: str) -> None:
        if agent in self.linked:
            self.on("", fe.AgentNotice(agent, 30.0, "spot"))

    def _processes(self, linked_only: bool = True) -> list[tuple[str, tuple[str, str, str]]]:
        names = self.linked if linked_only else self.alive
        return [(agent, name) for agent in sorted(names) for name in sorted(self.alive[agent])]

    @precondition(lambda self: self._processes())
    @rule(data=st.data(), cause=st.sampled_from(["done", "user", "infrastructure", "preempted"]))
    def process_exits(self, data: st.DataObject, cause: str) -> None:
        agent, name = data.draw(st.sampled_from(self._processes()))
        self.alive[agent].discard(name)
        self.on(name[0], fe.ProcessExited(*name, cause))

    @precondition(lambda self: self._processes())
    @rule(data=st.data())
    def member_connects(self, data: st.DataObject) -> None:
        _, (run, member, incarnation) = data.draw(st.sampled_from(self._processes()))
        if run == "r" and not self.state.runs[run].has_ended:
            self.on(run, ev.MemberConnected(member, incarnation, Address("h", 1)))
            self.on(run, ev.MemberReady(member, "model", None))

    @rule()
    def unmanaged_member_connects(self) -> None:
        if not self.state.runs["r"].has_ended:
            self.on("r", ev.MemberConnected("unmanaged/0", "g", Address("h", 1)))

    @rule(run=RUNS, low=st.integers(1, 2), more=st.integers(0, 3))
    def run_is_scaled(self, run: str, low: int, more: int) -> None:
        self.on(run, ev.ScaleRequested(low, low + more))

    @rule(run=RUNS)
    def run_is_stopped(self, run: str) -> None:
        self.on(run, run_events.UserStopRequested("enough", True, 5.0))

    @rule(run=RUNS)
    def run_is_resumed(self, run: str) -> None:
        self.on(run, run_events.RunResumed(1, 2))

    @rule()
    def journal_is_truncated(self) -> None:
        self.snapshot = len(self.entries), state_snapshot.encode(state_snapshot.StoredState(self.state))

    @rule()
    def coordinator_restarts(self) -> None:
        """Kill the coordinator and let it read its snapshot and its journal."""
        seq, body = self.snapshot
        replayed = state_snapshot.decode(body).state
        for entry in self.entries[seq:]:
            apply(replayed, entry.run, journal.decode_event(entry, run_events.KINDS), entry.at)
        assert replayed == self.state
        self.state = replayed
        self.linked.clear()
        self.on("", fe.CoordinatorStarted(f"s{len(self.entries)}"))
        for run in [run for run in self.state.runs.values() if not run.has_ended]:
            self.on(run.name, ev.CoordinatorRestarted())

    @rule(seconds=st.sampled_from([0.1, 1.1, 4.0, 11.0, 70.0]))
    def time_passes(self, seconds: float) -> None:
        """Advance the clock; agents have ended by then all processes that they were instructed to end."""
        self.now += seconds
        for agent in sorted(self.linked):
            for name in sorted(self.alive[agent]):
                process = self.state.fleet.processes.get(name[:2])
                if process is None or process.incarnation != name[2] or process.status == fl.ENDING:
                    self.alive[agent].discard(name)
                    self.on(name[0], fe.ProcessExited(*name, "asked"))
        for run in self.state.runs.values():
            if not run.has_ended:
                for event in mb.due(run.membership, {}, self.now):
                    self.on(run.name, event)
        for timer in fl.due(self.state.fleet, self.now):
            self.on(timer.run, timer)

    @invariant()
    def no_agent_holds_more_than_its_slots(self) -> None:
        for agent in self.state.fleet.agents.values():
            if agent.slots is not None:
                held = [p for p in self.state.fleet.processes.values() if p.agent == agent.name]
                assert len(held) <= agent.slots

    @invariant()
    def indexes_agree_with_the_processes(self) -> None:
        processes = self.state.fleet.processes
        for run in self.state.runs:
            expected = {p.member: p for p in processes.values() if p.run == run}
            assert list(processes.of_run(run).items()) == list(expected.items())
        for agent in ("a", "b"):
            assert processes.slots_used(agent) == sum(p.agent == agent for p in processes.values())

    @invariant()
    def no_decision_is_pending(self) -> None:
        """Check that deciding again without an event changes nothing."""
        draft = FleetDraft(self.state.fleet, self.now)
        fl.advance(draft)
        assert (draft.instructions, draft.freeze()) == ([], self.state.fleet)

    @invariant()
    def incarnations_are_never_used_twice(self) -> None:
        incarnations = [p.incarnation for p in self.state.fleet.processes.values()]
        assert len(incarnations) == len(set(incarnations))

    @invariant()
    def ended_run_starts_no_process(self) -> None:
        for run in self.state.runs.values():
            wanted = self.state.fleet.runs[run.name]
            assert run.has_ended == (wanted.status == fl.ENDED)
            if run.has_ended:
                assert run.exit_code is not None
                assert not [p for p in self.state.fleet.of_run(run.name) if p.status in (fl.STARTING, fl.RUNNING)]

    @invariant()
    def compat_group_is_never_larger_than_requested(self) -> None:
        """Check the size, unless a process is done or an agent is unusable, when no better group can be formed."""
        wanted = self.state.fleet.runs.get("c")
        away = not all(agent.usable for agent in self.state.fleet.agents.values())
        processes = self.state.fleet.of_run("c")
        done = any(p.status == fl.DONE for p in processes)
        if wanted is not None and wanted.status == fl.ACTIVE and not away and not done:
            assert len([p for p in processes if p.status in (fl.STARTING, fl.RUNNING)]) <= wanted.max_members

    def teardown(self) -> None:
        """Check that with one stable agent every active run gets processes, or ends."""
        if "r" not in self.state.runs:
            return
        self.now += 200.0
        for timer in fl.due(self.state.fleet, self.now):
            self.on(timer.run, timer)
        self.agent_connects("a")
        for _ in range(6):
            self.time_passes(11.0)
        for run in self.state.runs.values():
            if not run.has_ended and self.state.fleet.runs[run.name].status == fl.ACTIVE:
                processes = self.state.fleet.of_run(run.name)
                assert processes, run.name


TestFleet = Fleet.TestCase
TestFleet.settings = settings(max_examples=40, stateful_step_count=40, suppress_health_check=list(HealthCheck))
