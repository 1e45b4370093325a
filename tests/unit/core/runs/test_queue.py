from __future__ import annotations

from typing import Any

from shoal.core.fleet.requirements import MachineRequirements
from shoal.core.fleet.restart_policy import RestartLimits
from shoal.core.fleet.state import (
    RUNNING,
    STOPPING,
    AgentState,
    DesiredRun,
    FleetState,
    ProcessState,
    ProcessTable,
)
from shoal.core.membership.state import TRAINER, MembershipSettings, MembershipState, MemberState
from shoal.core.provisioning.state import SUBMITTED, Allocation, PoolHealth, ProvisioningState
from shoal.core.runs.queue import QueuedRun, queue_position, queued_runs
from shoal.core.runs.spec import RunSpec
from shoal.core.runs.state import CoordinatorState, RunState
from shoal.core.world import Address


class Coordinator:
    """A coordinator with runs a, b, …, which have no processes yet."""

    def __init__(self, **priorities: int) -> None:
        self.state = CoordinatorState(fleet=FleetState(runs={}, agents={}, processes=ProcessTable()))
        for name, priority in priorities.items():
            spec = RunSpec(name, ("t.py",), "/", (2, 4), on=("spot",), priority=priority)
            membership = MembershipState(MembershipSettings(2, 4))
            self.state.runs[name] = RunState(name, spec, {}, membership, 0.0, 0.0)
            self.want(name)

    def want(self, name: str, **changes: Any) -> None:
        required = {TRAINER: MachineRequirements(("spot",), False, False)}
        fields = {"requirements": required, **changes}
        self.state.fleet.runs[name] = DesiredRun(name, 2, 4, "", RestartLimits(), **fields)  # type: ignore[index]

    def place(self, run: str, agent: str, member: str = "", pool: str = "") -> None:
        member = member or f"{agent}/0"
        self.state.fleet.agents[agent] = AgentState(agent, 4, "h", 0, pool=pool)  # type: ignore[index]
        self.state.fleet.processes[run, member] = ProcessState(run, member, "1", agent, RUNNING, 0)

    def position(self, name: str, now: float = 100.0) -> QueuedRun | None:
        return queue_position(self.state.runs[name], self.state, now)


def test_queue_goes_by_priority_and_then_by_age() -> None:
    assert queued_runs(Coordinator(a=0, b=0, c=1).state) == ["c", "a", "b"]


def test_run_with_a_process_or_a_member_is_not_queued() -> None:
    coordinator = Coordinator(a=0, b=0, c=0)
    coordinator.place("a", "lab")
    coordinator.place("b", "lab", "lab/evaluator-0")
    member = MemberState("laptop/0", "1", Address("h", 1), "waiting", 1, 0.0)
    coordinator.state.runs["c"].membership = MembershipState(MembershipSettings(), members={"laptop/0": member})
    assert queued_runs(coordinator.state) == ["b"], "an evaluator alone is no start"
    assert coordinator.position("a") is None


def test_run_that_has_ended_or_stops_is_not_queued() -> None:
    coordinator = Coordinator(a=0, b=0)
    coordinator.state.runs["a"].ended_at = 1.0
    coordinator.want("b", status=STOPPING)
    assert queued_runs(coordinator.state) == []


def test_position_counts_from_one_and_names_what_is_waited_for() -> None:
    coordinator = Coordinator(a=0, b=0)
    position = coordinator.position("b")
    assert position is not None
    assert (position.position, position.waits_for) == (2, "2 slots; no machine is connected")


def test_requested_machines_are_counted_by_pool_with_their_age() -> None:
    coordinator = Coordinator(a=0)
    allocations = {
        name: Allocation(name, pool, 1, SUBMITTED, since, why=why, slots_by_run={run: 1})
        for name, pool, since, why, run in (
            ("s1", "spot", 40.0, "", "a"),
            ("s2", "spot", 90.0, "busy", "a"),
            ("l1", "lab", 95.0, "", "a"),
            ("x1", "spot", 0.0, "", "other"),
        )
    }
    health = {"spot": PoolHealth(why="no quota")}
    coordinator.state.provisioning = ProvisioningState(allocations=allocations, health=health)
    position = coordinator.position("a")
    assert position is not None
    assert position.waits_for == (
        "2 slots; 1 of lab, 2 of spot requested 60 s ago (busy); pool spot: no quota; no machine is connected"
    )


def test_slots_that_others_hold_are_named_if_the_run_may_use_them() -> None:
    coordinator = Coordinator(a=0, b=0)
    coordinator.place("b", "spot-1", pool="spot")
    coordinator.place("b", "laptop")
    coordinator.place("b", "gpu-1", pool="gpu")
    position = coordinator.position("a")
    assert position is not None
    assert position.waits_for == "2 slots; held by b (2)"
