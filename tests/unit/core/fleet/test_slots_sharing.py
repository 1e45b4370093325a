"""Several runs on the same machines: each gets what it can use, by priority, and none hoards slots."""

from __future__ import annotations

from shoal.core.fleet import decide as fl
from shoal.core.fleet import events as fe
from shoal.core.fleet.requirements import MachineRequirements


class Fleet:
    def __init__(self, **agents: int) -> None:
        self.state, self.now = fl.FleetState(salt="s"), 1000.0
        for name, slots in agents.items():
            self.on(fe.AgentConnected(name, slots, "h"))

    def on(self, event: fe.Event) -> list[fe.Instruction]:
        self.now += 1.0
        self.state, instructions = fl.decide(self.state, event, self.now)
        return list(instructions)

    def want(self, run: str, low: int, high: int, priority: int = 0, pools: tuple[str, ...] = ()) -> None:
        self.on(
            fe.RunRequested(
                run, low, high, requirements={"trainer": MachineRequirements(pools)} if pools else {}, priority=priority
            )
        )

    def have(self, run: str) -> list[str]:
        return sorted(p.member for p in self.state.of_run(run) if p.status != fl.ENDING)

    def end(self, run: str) -> None:
        for p in self.state.of_run(run):
            self.on(fe.ProcessExited(run, p.member, p.incarnation, "asked"))


def test_spares_of_a_run_make_room_for_another() -> None:
    fleet = Fleet(lab=4)
    fleet.want("a", 1, 2)
    assert len(fleet.have("a")) == 4, "while it is alone, it keeps spares"
    fleet.want("b", 1, 2)
    assert fleet.have("a") == ["lab/0", "lab/1"]
    for p in [p for p in fleet.state.of_run("a") if p.status == fl.ENDING]:
        fleet.on(fe.ProcessExited("a", p.member, p.incarnation, "asked"))
    assert len(fleet.have("b")) == 2
    assert fleet.have("a") == ["lab/0", "lab/1"]


def test_run_that_cannot_begin_takes_no_slots() -> None:
    fleet = Fleet(lab=4)
    fleet.want("a", 1, 2)
    fleet.want("big", 4, 4)
    fleet.want("small", 1, 1)
    for p in [p for p in fleet.state.of_run("a") if p.status == fl.ENDING]:
        fleet.on(fe.ProcessExited("a", p.member, p.incarnation, "asked"))
    assert fleet.have("big") == []
    assert len(fleet.have("small")) == 1


def test_run_of_higher_priority_gets_free_slots() -> None:
    fleet = Fleet(lab=2)
    fleet.want("a", 2, 2)
    fleet.want("low", 2, 2)
    fleet.want("high", 2, 2, priority=5)
    assert (fleet.have("low"), fleet.have("high")) == ([], [])
    fleet.on(fe.RunStopping("a", 75, 5.0, "stopped"))
    fleet.end("a")
    assert (fleet.have("low"), len(fleet.have("high"))) == ([], 2)


def test_run_uses_its_pools_and_agents_started_by_hand() -> None:
    fleet = Fleet()
    fleet.on(fe.AgentConnected("spot-1", 1, "h", pool="spot"))
    fleet.on(fe.AgentConnected("lab-1", 1, "h", pool="lab"))
    fleet.on(fe.AgentConnected("friend", 1, "h"))
    fleet.want("a", 1, 3, pools=("spot",))
    assert fleet.have("a") == ["friend/0", "spot-1/0"]
    fleet.want("b", 1, 3, pools=("lab",))
    assert fleet.have("b") == ["lab-1/0"]


def test_run_without_rivals_begins_with_any_slots() -> None:
    fleet = Fleet(lab=1)
    fleet.want("a", 2, 2)
    assert len(fleet.have("a")) == 1, "the others may come"
