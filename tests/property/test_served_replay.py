"""A restarted coordinator rebuilds the same state of a run with servers from its journal, whatever happened before."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shoal.coordinator.storage import state_snapshot
from shoal.core.fleet import decide as fl
from shoal.core.fleet import events as fe
from shoal.core.membership import events as ev
from shoal.core.runs import events as run_events
from shoal.core.runs.decide import apply
from shoal.core.runs.state import CoordinatorState
from shoal.core.world import Address
from shoal.store import journal
from shoal.wire.api import RunSpec

ADDRESS = Address("h", 1)


class Served(RuleBasedStateMachine):
    """A run with servers on one agent, whose processes start and stop as instructed."""

    @initialize(servers=st.integers(1, 3), trainers=st.integers(1, 3))
    def begin(self, servers: int, trainers: int) -> None:
        self.state = CoordinatorState()
        self.entries: list[journal.JournalEntry] = []
        self.snapshot = (0, b"")
        self.now = 1000.0
        self.alive: dict[str, str] = {}
        self.requested = servers
        self.on("", fe.CoordinatorStarted("s0"))
        spec = RunSpec("r", ("t.py",), "/", (1, trainers))
        run_settings = {
            "sync": "stale:2",
            "servers": servers,
            "restarts.user": 1,
            "restarts.infrastructure": 5,
            "lease_s": 3.0,
        }
        self.on("r", run_events.RunCreated(spec, run_settings))
        self.on("", fe.AgentConnected("a", None, "h"))

    def on(self, run: str, event: Any) -> None:
        self.entries.append(journal.encode_event(len(self.entries) + 1, self.now, run, event))
        for _, instruction in apply(self.state, run, event, self.now):
            if isinstance(instruction, fe.StartProcess):
                self.alive[instruction.member] = instruction.incarnation
                assert (dict(instruction.env).get("SHOAL_ROLE") == "server") == ("server" in instruction.member)
            elif isinstance(instruction, fe.StopProcess):
                self.alive.pop(instruction.member, None)

    @property
    def run(self) -> Any:
        return self.state.runs["r"]

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), ready=st.booleans())
    def member_connects(self, data: st.DataObject, ready: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.alive)))
        role = "server" if "server" in name else "trainer"
        self.on("r", ev.MemberConnected(name, self.alive[name], ADDRESS, role=role))
        if ready:
            self.on("r", ev.MemberReady(name, "model", None))

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), cause=st.sampled_from(["infrastructure", "preempted", "user"]))
    def process_exits(self, data: st.DataObject, cause: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.alive)))
        self.on("r", fe.ProcessExited("r", name, self.alive.pop(name), cause))

    @precondition(lambda self: self.run.membership.placement is not None)
    @rule(data=st.data())
    def part_is_copied_or_released(self, data: st.DataObject) -> None:
        assignments = self.run.membership.placement.assignments
        part = data.draw(st.integers(0, len(assignments) - 1))
        assignment = assignments[part]
        if assignment.learner:
            self.on("r", ev.PartCopied(assignment.primary, part, assignment.learner, assignment.since))
        elif assignment.handing_off:
            self.on("r", ev.PartReleased(assignment.primary, part, self.run.membership.placement.number))

    @precondition(lambda self: self.run.membership.members)
    @rule(data=st.data(), what=st.sampled_from(["notice", "silent", "cut", "done", "unreachable", "restored"]))
    def member_event_arrives(self, data: st.DataObject, what: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.run.membership.members)))
        kinds = {
            "notice": ev.NoticeReceived(name, 30.0, "spot"),
            "silent": ev.MemberLost(name, "silent"),
            "cut": ev.MemberDisconnected(name),
            "done": ev.MemberDone(name, 5),
            "unreachable": ev.ServerUnreachable("a/0", name, self.run.membership.number, "reset"),
            "restored": ev.MemberReady(name, "model", 3, restored=True),
        }
        if what != "done" or "server" not in name:
            self.on("r", kinds[what])

    @rule(after_s=st.sampled_from([0.1, 5.0, 700.0]))
    def time_passes(self, after_s: float) -> None:
        self.now += after_s
        self.on("r", ev.TimerFired("regroup"))

    @rule()
    def run_is_stopped_or_resumed(self) -> None:
        if self.run.has_ended:
            self.on("r", run_events.RunResumed(1, 2))
        else:
            self.on("r", run_events.UserStopRequested("enough", True, 5.0))

    @rule()
    def journal_is_truncated(self) -> None:
        self.snapshot = len(self.entries), state_snapshot.encode(state_snapshot.StoredState(self.state))

    @rule()
    def coordinator_replays_its_journal(self) -> None:
        seq, body = self.snapshot
        replayed = state_snapshot.decode(body).state
        for entry in self.entries[seq:]:
            apply(replayed, entry.run, journal.decode_event(entry, run_events.KINDS), entry.at)
        assert replayed == self.state

    @invariant()
    def no_more_servers_run_than_requested(self) -> None:
        processes = getattr(self, "state", CoordinatorState()).fleet.processes.values()
        # A server that is being stopped, such as just before the run is resumed, no longer serves.
        serving = [p for p in processes if p.role == "server" and p.status != fl.ENDING]
        assert len(serving) <= getattr(self, "requested", 0)


TestServed = Served.TestCase
TestServed.settings = settings(max_examples=60, stateful_step_count=50)
