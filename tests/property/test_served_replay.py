"""Whatever happens to a run with servers, the coordinator that reads its journal knows what the one before it knew."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shoal.core.fleet import decide as fl
from shoal.core.fleet import events as fe
from shoal.core.membership import events as ev
from shoal.core.runs import events as run_events
from shoal.core.runs.decide import apply
from shoal.core.runs.state import CoordinatorState
from shoal.core.world import Address
from shoal.store import journal
from shoal.wire.api import RunSpec

HERE = Address("h", 1)


class Served(RuleBasedStateMachine):
    """Two agents, one of which offers three places, and processes that do as they are told."""

    @initialize(servers=st.integers(1, 3), trainers=st.integers(1, 3))
    def begin(self, servers: int, trainers: int) -> None:
        self.state = CoordinatorState()
        self.entries: list[journal.JournalEntry] = []
        self.now = 1000.0
        self.alive: dict[str, str] = {}
        self.wanted = servers
        self.on("", fe.CoordinatorStarted("s0"))
        spec = RunSpec("r", ("t.py",), "/", (1, trainers))
        told = {"sync": "stale:2", "servers": servers, "restarts.user": 1, "restarts.infrastructure": 5, "lease_s": 3.0}
        self.on("r", run_events.RunCreated(spec, told))
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
    def connect(self, data: st.DataObject, ready: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.alive)))
        role = "server" if "server" in name else "trainer"
        self.on("r", ev.MemberConnected(name, self.alive[name], HERE, role=role))
        if ready:
            self.on("r", ev.MemberReady(name, "model", None))

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), cause=st.sampled_from(["infrastructure", "preempted", "user"]))
    def exit(self, data: st.DataObject, cause: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.alive)))
        self.on("r", fe.ProcessExited("r", name, self.alive.pop(name), cause))

    @precondition(lambda self: self.run.membership.placement is not None)
    @rule(data=st.data())
    def copy(self, data: st.DataObject) -> None:
        holdings = self.run.membership.placement.assignments
        part = data.draw(st.integers(0, len(holdings) - 1))
        if holdings[part].learner:
            self.on("r", ev.PartCopied(holdings[part].primary, part, holdings[part].learner, holdings[part].since))
        elif holdings[part].handing_off:
            self.on("r", ev.PartReleased(holdings[part].primary, part, self.run.membership.placement.number))

    @precondition(lambda self: self.run.membership.members)
    @rule(data=st.data(), what=st.sampled_from(["notice", "silent", "cut", "done", "unreachable", "restored"]))
    def report(self, data: st.DataObject, what: str) -> None:
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
    def wait(self, after_s: float) -> None:
        self.now += after_s
        self.on("r", ev.TimerFired("regroup"))

    @rule()
    def stop_and_resume(self) -> None:
        if self.run.has_ended:
            self.on("r", run_events.RunResumed(1, 2))
        else:
            self.on("r", run_events.UserStopRequested("enough", True, 5.0))

    @rule()
    def restart(self) -> None:
        again = CoordinatorState()
        for entry in self.entries:
            apply(again, entry.run, journal.decode_event(entry, run_events.KINDS), entry.at)
        assert again == self.state

    @invariant()
    def as_many_servers_as_asked_for(self) -> None:
        known = getattr(self, "runs", CoordinatorState()).fleet.processes.values()
        # One that is being ended, such as by a stop just before the run is resumed, does not serve any more.
        serving = [p for p in known if p.role == "server" and p.status != fl.ENDING]
        assert len(serving) <= getattr(self, "wanted", 0)


TestServed = Served.TestCase
TestServed.settings = settings(max_examples=60, stateful_step_count=50)
