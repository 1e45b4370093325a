from __future__ import annotations

from typing import Any

from shoal.core.fleet.requirements import MachineRequirements
from shoal.core.fleet.restart_policy import RestartLimits
from shoal.core.fleet.state import (
    ACTIVE,
    FINISHING,
    RUNNING,
    STOPPING,
    DesiredRun,
    FleetState,
    ProcessState,
    ProcessTable,
)
from shoal.core.membership.state import EVALUATOR, SERVER, TRAINER, MembershipSettings, MembershipState
from shoal.core.provisioning.state import Allocation, ProvisioningState
from shoal.core.runs.demand import machine_demands
from shoal.core.runs.spec import RunSpec
from shoal.core.runs.state import CoordinatorState, RunState

SPOT = MachineRequirements(("spot",), False, False, 2, 1 << 30)
APART = MachineRequirements(("lab",), True, True)


def add_run(state: CoordinatorState, name: str = "r", *, on: tuple[str, ...] = ("spot",), **desired: Any) -> RunState:
    """Add a run of one to four members that takes machines of these pools."""
    priority = desired.get("priority", 0)
    spec = RunSpec(name, ("t.py",), "/", (1, 4), on=on, priority=priority, compat=desired.get("compat", ""))
    membership = MembershipState(MembershipSettings(1, 4))
    run = RunState(name, spec, {"start_timeout_s": 60.0}, membership, 0.0, 0.0, budget=5.0)
    state.runs[name] = run
    fields = {"compat": "", "requirements": {TRAINER: SPOT}, **desired}
    state.fleet.runs[name] = DesiredRun(name, 1, 4, restarts=RestartLimits(), **fields)
    return run


def coordinator(**desired: Any) -> CoordinatorState:
    state = CoordinatorState(fleet=FleetState(runs={}))
    add_run(state, **desired)
    return state


def test_active_run_demands_slots_between_its_minimum_and_maximum() -> None:
    (demand,) = machine_demands(coordinator())
    assert (demand.run, demand.pools, demand.slots, demand.min_slots) == ("r", ("spot",), 4, 1)
    assert (demand.cpus, demand.memory_bytes) == (2, 1 << 30)
    assert (demand.budget, demand.started, demand.start_timeout_s) == (5.0, False, 60.0)


def test_run_of_higher_priority_comes_first_and_the_older_among_equals() -> None:
    state = coordinator()
    add_run(state, "second")
    add_run(state, "urgent", priority=1)
    assert [demand.run for demand in machine_demands(state)] == ["urgent", "r", "second"]


def test_run_without_pools_or_that_has_ended_demands_nothing() -> None:
    assert machine_demands(coordinator(on=())) == ()
    state = coordinator()
    state.runs["r"].ended_at = 1.0
    assert machine_demands(state) == ()


def test_roles_with_pools_of_their_own_have_their_own_demand() -> None:
    roles = {TRAINER: SPOT, SERVER: APART, EVALUATOR: APART}
    servers, evaluator, trainers = machine_demands(coordinator(requirements=roles, servers=2, evaluators=1))
    assert (servers.pools, servers.slots, servers.min_slots) == (("lab",), 2, 2)
    assert (evaluator.slots, evaluator.started) == (1, True), "training starts without the evaluator"
    assert trainers.pools == ("spot",)


def test_finishing_run_demands_only_its_evaluator_and_has_no_budget() -> None:
    roles = {TRAINER: SPOT, EVALUATOR: APART}
    (evaluator,) = machine_demands(coordinator(requirements=roles, evaluators=1, status=FINISHING))
    assert (evaluator.pools, evaluator.budget) == (("lab",), None)


def test_stopping_run_keeps_the_machines_of_its_processes() -> None:
    state = coordinator(status=STOPPING)
    processes = {("r", f"{a}/0"): ProcessState("r", f"{a}/0", "1", a, RUNNING, 0) for a in ("spot-1", "laptop")}
    state.fleet = FleetState(runs=state.fleet.runs, processes=ProcessTable(processes))
    state.provisioning = ProvisioningState(allocations={"spot-1": Allocation("spot-1", "spot", 1, "running", 0.0)})
    (kept,) = machine_demands(state)
    assert (kept.slots, kept.in_use) == (0, ("spot-1",))


def test_unmodified_script_has_started_once_a_process_was() -> None:
    assert [d.started for d in machine_demands(coordinator(compat="torchrun", seen=True, status=ACTIVE))] == [True]
    assert [d.started for d in machine_demands(coordinator(seen=True))] == [False]
