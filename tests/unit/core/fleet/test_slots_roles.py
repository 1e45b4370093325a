"""Roles that have pools of their own: processes start only there, and no other role takes their slots."""

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


def test_evaluator_with_its_own_pool_starts_only_there() -> None:
    fleet = Fleet()
    fleet.come("spot-1", "spot-2")
    fleet.want(1, 2, trainer=SPOT, evaluator=LAB)
    assert fleet.have() == ["spot-1/0", "spot-2/0"], "it waits for its machine"
    fleet.come("lab-3")
    assert fleet.have() == ["lab-3/evaluator-0", "spot-1/0", "spot-2/0"]


def test_no_trainer_uses_the_slot_of_the_evaluator() -> None:
    fleet = Fleet()
    fleet.want(1, 3, trainer=MachineRequirements(("spot", "lab")), evaluator=LAB)
    fleet.come("lab-1", "spot-2")
    assert fleet.have() == ["lab-1/evaluator-0", "spot-2/0"]
    fleet.come("lab-3")
    assert fleet.have() == ["lab-1/evaluator-0", "lab-3/0", "spot-2/0"], "trainers have their own place there"


def test_trainers_without_pools_avoid_reserved_pools() -> None:
    fleet = Fleet()
    fleet.want(1, 3, evaluator=LAB)
    fleet.come("lab-1", "lab-2", "friend", slots=2)
    assert fleet.have() == ["friend/0", "friend/1", "lab-1/evaluator-0"]


def test_servers_with_their_own_pool_start_there() -> None:
    fleet = Fleet()
    fleet.want(1, 2, servers=2, evaluators=0, trainer=SPOT, server=LAB)
    fleet.come("spot-1", "spot-2")
    assert fleet.have() == ["spot-1/0", "spot-2/0"]
    fleet.come("lab-3", "lab-4")
    assert fleet.have() == ["lab-3/server-0", "lab-4/server-0", "spot-1/0", "spot-2/0"]


def test_run_without_slots_for_its_servers_takes_none() -> None:
    fleet = Fleet()
    fleet.want(1, 1, run="other", evaluators=0)
    fleet.want(1, 1, servers=1, evaluators=0, trainer=SPOT, server=LAB)
    fleet.come("friend")
    fleet.come("spot-1")
    assert (fleet.have("other"), fleet.have()) == (["friend/0"], [])
    fleet.come("lab-2")
    assert fleet.have() == ["lab-2/server-0", "spot-1/0"]


def test_crashed_evaluator_restarts_in_its_slot() -> None:
    fleet = Fleet()
    fleet.want(1, 2, trainer=MachineRequirements(("spot", "lab")), evaluator=LAB)
    fleet.come("lab-1", "spot-2")
    name = "lab-1/evaluator-0"
    known = fleet.state.processes["r", name]
    fleet.on(fe.ProcessExited("r", name, known.incarnation, "infrastructure", "killed"))
    assert fleet.have() == [name, "spot-2/0"]


def test_members_use_only_slots_that_are_large_enough() -> None:
    fleet = Fleet()
    fleet.want(1, 3, evaluators=0, trainer=MachineRequirements(("spot",), cpus=4))
    fleet.come("spot-1", size=SlotSize(2))
    fleet.come("spot-2", size=SlotSize(4))
    assert fleet.have() == ["spot-2/0"]
