"""Roles that have pools of their own: nobody is started anywhere else, and nobody takes another role's place."""

from __future__ import annotations

from shoal.core.fleet import decide as fl
from shoal.core.fleet import events as fe
from shoal.core.fleet.requirements import MachineRequirements, SlotSize

SPOT, LAB = MachineRequirements(("spot",)), MachineRequirements(("lab",), pools_only=True, reserved=True)


class Fleet:
    def __init__(self) -> None:
        self.state, self.now = fl.FleetState(salt="s"), 1000.0

    def on(self, event: fe.Event) -> None:
        self.now += 1.0
        self.state, _ = fl.decide(self.state, event, self.now)

    def come(self, *agents: str, slots: int = 1, size: SlotSize | None = None) -> None:
        for agent in agents:
            self.on(fe.AgentConnected(agent, slots, "h", pool=agent.rpartition("-")[0], size=size))

    def want(
        self, low: int, high: int, run: str = "r", servers: int = 0, evaluators: int = 1, **terms: MachineRequirements
    ) -> None:
        self.on(fe.RunRequested(run, low, high, servers=servers, evaluators=evaluators, requirements=terms))

    def have(self, run: str = "r") -> list[str]:
        return sorted(p.member for p in self.state.of_run(run) if p.status != fl.ENDING)


def test_an_evaluator_with_a_pool_of_its_own_is_started_there_and_nowhere_else() -> None:
    fleet = Fleet()
    fleet.come("spot-1", "spot-2")
    fleet.want(1, 2, trainer=SPOT, evaluator=LAB)
    assert fleet.have() == ["spot-1/0", "spot-2/0"], "it waits for its machine"
    fleet.come("lab-3")
    assert fleet.have() == ["lab-3/evaluator-0", "spot-1/0", "spot-2/0"]


def test_nobody_trains_on_the_machine_that_was_hired_for_the_evaluator() -> None:
    fleet = Fleet()
    fleet.want(1, 3, trainer=MachineRequirements(("spot", "lab")), evaluator=LAB)
    fleet.come("lab-1", "spot-2")
    assert fleet.have() == ["lab-1/evaluator-0", "spot-2/0"]
    fleet.come("lab-3")
    assert fleet.have() == ["lab-1/evaluator-0", "lab-3/0", "spot-2/0"], "trainers have their own place there"


def test_trainers_that_may_run_anywhere_stay_away_from_another_roles_pool() -> None:
    fleet = Fleet()
    fleet.want(1, 3, evaluator=LAB)
    fleet.come("lab-1", "lab-2", "friend", slots=2)
    assert fleet.have() == ["friend/0", "friend/1", "lab-1/evaluator-0"]


def test_servers_with_a_pool_of_their_own_are_started_there() -> None:
    fleet = Fleet()
    fleet.want(1, 2, servers=2, evaluators=0, trainer=SPOT, server=LAB)
    fleet.come("spot-1", "spot-2")
    assert fleet.have() == ["spot-1/0", "spot-2/0"]
    fleet.come("lab-3", "lab-4")
    assert fleet.have() == ["lab-3/server-0", "lab-4/server-0", "spot-1/0", "spot-2/0"]


def test_a_run_whose_servers_have_no_place_yet_holds_nothing_that_another_could_use() -> None:
    fleet = Fleet()
    fleet.want(1, 1, run="other", evaluators=0)
    fleet.want(1, 1, servers=1, evaluators=0, trainer=SPOT, server=LAB)
    fleet.come("friend")
    fleet.come("spot-1")
    assert (fleet.have("other"), fleet.have()) == (["friend/0"], [])
    fleet.come("lab-2")
    assert fleet.have() == ["lab-2/server-0", "spot-1/0"]


def test_an_evaluator_that_crashed_finds_its_place_again() -> None:
    fleet = Fleet()
    fleet.want(1, 2, trainer=MachineRequirements(("spot", "lab")), evaluator=LAB)
    fleet.come("lab-1", "spot-2")
    name = "lab-1/evaluator-0"
    known = fleet.state.processes["r", name]
    fleet.on(fe.ProcessExited("r", name, known.incarnation, "infrastructure", "killed"))
    assert fleet.have() == [name, "spot-2/0"]


def test_members_go_only_to_places_that_are_large_enough() -> None:
    fleet = Fleet()
    fleet.want(1, 3, evaluators=0, trainer=MachineRequirements(("spot",), cpus=4))
    fleet.come("spot-1", size=SlotSize(2))
    fleet.come("spot-2", size=SlotSize(4))
    assert fleet.have() == ["spot-2/0"]
