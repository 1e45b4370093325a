"""What one event costs grows no faster than the number of members, so that a thousand cost no more than they must.

Steps of the interpreter are counted, not seconds: they are the same on every machine, however busy.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from shoal.coordinator import api_views
from shoal.coordinator.live_state import LiveRun
from shoal.core.fleet import decide as fl
from shoal.core.fleet import events as fe
from shoal.core.membership import decide as mb
from shoal.core.membership import events as ev
from shoal.core.runs.decide import apply
from shoal.core.runs.events import RunCreated
from shoal.core.runs.state import CoordinatorState
from shoal.core.runs.story import tell
from shoal.core.world import Address
from shoal.wire import member_messages as ms
from shoal.wire.api import RunSpec

FEW, MANY = 40, 160
NOW = 1000.0
# Linear is 4; sorting and what is constant blur it a little. Quadratic is 16.
AT_MOST = 5.0


class Cluster:
    """So many agents with a place each, and one run that wants all of them; its members are in a world."""

    def __init__(self, members: int) -> None:
        self.coordinator = CoordinatorState()
        self.live = LiveRun()
        self.size = members
        self.on(fe.CoordinatorStarted("s"), "")
        for number in range(members):
            self.join(number)
        self.on(RunCreated(RunSpec("r", ("t.py",), "/", (members, members), on=("lab",)), {}))
        for name in self.names:
            self.start(name)
            self.on(self.ready(name))
            self.live.leases[name] = mb.LastHeartbeat(NOW, 1, 5, "compute", 0.1, 0.2)
            self.live.heartbeats[name] = ms.HeartbeatMsg(1, 5, "compute", 0.1, share=8, samples_per_s=100.0)
        assert self.membership.world is not None

    @property
    def names(self) -> list[str]:
        return [p.member for p in self.coordinator.fleet.of_run("r")]

    @property
    def membership(self) -> mb.MembershipState:
        return self.coordinator.runs["r"].membership

    def on(self, event: Any, run: str = "r") -> list[Any]:
        instructions = apply(self.coordinator, run, event, NOW)
        tell(1, NOW, run, event, instructions)
        return [instruction for _, instruction in instructions]

    def join(self, number: int) -> None:
        self.on(fe.AgentConnected(f"node-{number}", 1, "10.0.0.1", (), pool="lab"), "")

    def start(self, name: str) -> None:
        p = self.coordinator.fleet.processes["r", name]
        self.on(fe.ProcessStarted("r", name, p.incarnation, 7, True))
        self.on(ev.MemberConnected(name, p.incarnation, Address("10.0.0.1", 1)))

    def ready(self, name: str) -> ev.MemberReady:
        return ev.MemberReady(name, "model", None)

    def dissolve(self) -> None:
        self.on(ev.MemberLost(self.names[0], "gone"))

    def widen(self) -> str:
        """One more machine; the name of its member, which is not ready yet."""
        self.on(ev.ScaleRequested(self.size, self.size + 1))
        self.join(self.size)
        name = f"node-{self.size}/0"
        self.start(name)
        return name


def steps_of(action: Callable[[], object]) -> int:
    """How many steps of the interpreter an action takes."""
    count = 0

    def trace(frame: FrameType, what: str, _arg: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += what == "opcode"
        return trace

    before = sys.gettrace()
    # Python 3.12 counts no opcodes unless a frame asked for them before tracing begins.
    sys._getframe().f_trace_opcodes = True
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
    return count


def agent_joins(cluster: Cluster) -> Callable[[], object]:
    return lambda: cluster.join(cluster.size)


def process_starts(cluster: Cluster) -> Callable[[], object]:
    name = cluster.widen()
    return lambda: cluster.start(name)


def newcomer_is_ready(cluster: Cluster) -> Callable[[], object]:
    name = cluster.widen()
    return lambda: cluster.on(cluster.ready(name))


def newcomer_is_entered_with(cluster: Cluster) -> Callable[[], object]:
    cluster.on(cluster.ready(cluster.widen()))
    proposal = cluster.membership.proposal
    assert proposal is not None
    return lambda: cluster.on(ev.WorldEntered(cluster.names[0], proposal.number, 9))


def member_is_lost(cluster: Cluster) -> Callable[[], object]:
    return cluster.dissolve


def survivor_answers(cluster: Cluster) -> Callable[[], object]:
    world = cluster.membership.world
    assert world is not None
    cluster.dissolve()
    return lambda: cluster.on(ev.WorldBroken(cluster.names[1], world.number, 9))


def last_survivor_answers(cluster: Cluster) -> Callable[[], object]:
    world = cluster.membership.world
    assert world is not None
    cluster.dissolve()
    for name in cluster.names[1:-1]:
        cluster.on(ev.WorldBroken(name, world.number, 9))
    return lambda: cluster.on(ev.WorldBroken(cluster.names[-1], world.number, 9))


def process_ends(cluster: Cluster) -> Callable[[], object]:
    p = cluster.coordinator.fleet.processes["r", cluster.names[3]]
    return lambda: cluster.on(fe.ProcessExited("r", p.member, p.incarnation, "infrastructure", "killed"))


def run_is_submitted(cluster: Cluster) -> Callable[[], object]:
    for number in range(cluster.size, 2 * cluster.size):
        # The first run may not use them, so they are free.
        cluster.on(fe.AgentConnected(f"node-{number}", 1, "10.0.0.1", (), pool="other"), "")
    spec = RunSpec("q", ("t.py",), "/", (cluster.size, cluster.size), on=("other",))
    return lambda: cluster.on(RunCreated(spec, {}), "q")


def waits_are_looked_for(cluster: Cluster) -> Callable[[], object]:
    return lambda: (mb.due(cluster.membership, cluster.live.leases, NOW), fl.due(cluster.coordinator.fleet, NOW))


def run_is_shown(cluster: Cluster) -> Callable[[], object]:
    return lambda: api_views.run_view(cluster.coordinator.runs["r"], cluster.coordinator, cluster.live, "/", NOW)


def agents_are_shown(cluster: Cluster) -> Callable[[], object]:
    return lambda: api_views.agent_views(cluster.coordinator, {}, NOW)


CASES = [
    agent_joins,
    process_starts,
    newcomer_is_ready,
    newcomer_is_entered_with,
    member_is_lost,
    survivor_answers,
    last_survivor_answers,
    process_ends,
    run_is_submitted,
    waits_are_looked_for,
    run_is_shown,
    agents_are_shown,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_cost_of_an_event_grows_at_most_linearly_with_members(
    case: Callable[[Cluster], Callable[[], object]],
) -> None:
    few, many = steps_of(case(Cluster(FEW))), steps_of(case(Cluster(MANY)))
    assert many <= AT_MOST * few, f"{few} steps with {FEW} members, {many} with {MANY}"
