"""Several runs on the same machines: each gets what it can use, first those that matter more, and nobody hoards."""

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
        self.state, asked = fl.decide(self.state, event, self.now)
        return list(asked)

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


def test_the_spares_of_one_run_make_room_for_another() -> None:
    fleet = Fleet(lab=4)
    fleet.want("a", 1, 2)
    assert len(fleet.have("a")) == 4, "while it is alone, it keeps spares"
    fleet.want("b", 1, 2)
    assert fleet.have("a") == ["lab/0", "lab/1"]
    for p in [p for p in fleet.state.of_run("a") if p.status == fl.ENDING]:
        fleet.on(fe.ProcessExited("a", p.member, p.incarnation, "asked"))
    assert len(fleet.have("b")) == 2
    assert fleet.have("a") == ["lab/0", "lab/1"]


def test_who_cannot_begin_holds_nothing_that_others_can_use() -> None:
    fleet = Fleet(lab=4)
    fleet.want("a", 1, 2)
    fleet.want("big", 4, 4)
    fleet.want("small", 1, 1)
    for p in [p for p in fleet.state.of_run("a") if p.status == fl.ENDING]:
        fleet.on(fe.ProcessExited("a", p.member, p.incarnation, "asked"))
    assert fleet.have("big") == []
    assert len(fleet.have("small")) == 1


def test_a_run_of_higher_priority_gets_what_becomes_free() -> None:
    fleet = Fleet(lab=2)
    fleet.want("a", 2, 2)
    fleet.want("low", 2, 2)
    fleet.want("high", 2, 2, priority=5)
    assert (fleet.have("low"), fleet.have("high")) == ([], [])
    fleet.on(fe.RunStopping("a", 75, 5.0, "stopped"))
    fleet.end("a")
    assert (fleet.have("low"), len(fleet.have("high"))) == ([], 2)


def test_a_run_uses_only_machines_of_its_pools_and_those_that_came_by_themselves() -> None:
    fleet = Fleet()
    fleet.on(fe.AgentConnected("spot-1", 1, "h", pool="spot"))
    fleet.on(fe.AgentConnected("lab-1", 1, "h", pool="lab"))
    fleet.on(fe.AgentConnected("friend", 1, "h"))
    fleet.want("a", 1, 3, pools=("spot",))
    assert fleet.have("a") == ["friend/0", "spot-1/0"]
    fleet.want("b", 1, 3, pools=("lab",))
    assert fleet.have("b") == ["lab-1/0"]


def test_a_run_that_is_alone_begins_with_what_there_is() -> None:
    fleet = Fleet(lab=1)
    fleet.want("a", 2, 2)
    assert len(fleet.have("a")) == 1, "the others may come"
