"""Demand of runs for machines, their admission, their budget and their queue."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from shoal.coordinator import api_views
from shoal.coordinator.live_state import LiveRun
from shoal.core.fleet import events as fe
from shoal.core.membership import events as ev
from shoal.core.provisioning import budget
from shoal.core.provisioning import decide as provisioning
from shoal.core.provisioning import events as pe
from shoal.core.provisioning.events import MachineDemand, PoolInfo
from shoal.core.runs import admission, queue
from shoal.core.runs import events as run_events
from shoal.core.runs.decide import apply
from shoal.core.runs.state import CoordinatorState
from shoal.core.world import Address
from shoal.errors import BadBudget, BadLabels, BadPool, BadRole, SlotTooSmall
from shoal.exit_codes import BUDGET_REACHED
from shoal.settings import RunSettings
from shoal.store import journal
from shoal.wire.api import RoleSpec, RunSpec

SPOT = PoolInfo("spot", "slurm", limit=4, price_per_h=1.0, on_demand_per_h=3.0, labels={"gpu": "a100"}, sized=True)
LAB = PoolInfo("lab", "ssh", limit=2, labels={"gpu": "none"})
POOLS = {pool.name: pool for pool in (SPOT, LAB)}
SPEC = RunSpec("t", ("t.py",), "/", (1, 2), on=("spot",))


class Coordinator:
    def __init__(self) -> None:
        self.state, self.now = CoordinatorState(), 1000.0
        self.entries: list[journal.JournalEntry] = []
        self.on("", fe.CoordinatorStarted("s"))
        self.on("", pe.PoolsConfigured(tuple(POOLS.values())))

    def on(self, run: str, event: object, after_s: float = 1.0) -> list[object]:
        self.now += after_s
        self.entries.append(journal.encode_event(len(self.entries) + 1, self.now, run, event))
        return [instruction for _, instruction in apply(self.state, run, event, self.now)]

    def create(self, name: str, spec: RunSpec, **settings: object) -> None:
        self.on(name, run_events.RunCreated(spec, {**msgspec.to_builtins(RunSettings()), **settings}))

    def deliver(self) -> None:
        """Connect every requested machine and make every process on it ready."""
        for allocation in [
            a for a in self.state.provisioning.allocations.values() if a.status == provisioning.REQUESTED
        ]:
            self.on("", pe.AllocationSubmitted(allocation.pool, allocation.name, allocation.name))
            size = self.state.slot_size(allocation.name)
            self.on("", fe.AgentConnected(allocation.name, allocation.slots, "h", pool=allocation.pool, size=size))
        for p in list(self.state.fleet.processes.values()):
            self.on(p.run, fe.ProcessStarted(p.run, p.member, p.incarnation, 7, False))
            self.on(p.run, ev.MemberConnected(p.member, p.incarnation, Address("h", 1)))
            if "evaluator" not in p.member:
                self.on(p.run, ev.MemberReady(p.member, "model", None))

    def pay(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now += budget.CHECK_INTERVAL_S
            state = self.state.provisioning
            for event in (
                *provisioning.expired_timers(state, self.now),
                *provisioning.expired_budget_timer(state, self.now),
            ):
                self.on("", event, after_s=0.0)

    def members(self, run: str) -> list[str]:
        return sorted(p.member for p in self.state.fleet.of_run(run))


def test_each_role_demands_machines_of_its_own_pools() -> None:
    coordinator = Coordinator()
    roles = {"evaluator": RoleSpec(on=("lab",)), "trainer": RoleSpec(cpus=4, memory_bytes=7)}
    coordinator.create("r", replace(SPEC, roles=roles), evaluator=True)
    assert coordinator.state.provisioning.demands == (
        MachineDemand("r", ("lab",), 1, 1),
        MachineDemand("r", ("spot",), 2, 1, cpus=4, memory_bytes=7, started=False),
    )
    assert {
        allocation.pool: (allocation.cpus, allocation.memory_bytes)
        for allocation in coordinator.state.provisioning.allocations.values()
    } == {
        "lab": (0, 0),
        "spot": (4, 7),
    }
    coordinator.deliver()
    assert coordinator.members("r") == ["lab-1/evaluator-0", "spot-2/0", "spot-3/0"]


def test_servers_without_own_pools_are_counted_with_the_trainers() -> None:
    coordinator = Coordinator()
    coordinator.create("r", SPEC, sync="async", servers=2)
    assert coordinator.state.provisioning.demands == (MachineDemand("r", ("spot",), 4, 3, started=False),)
    coordinator.create("apart", replace(SPEC, roles={"server": RoleSpec(on=("lab",))}), sync="async")
    assert coordinator.state.provisioning.demands[1:] == tuple(
        MachineDemand("apart", pools, 2, least, started=False) for pools, least in ((("lab",), 2), (("spot",), 1))
    )


def test_stopping_run_keeps_its_machines_until_its_processes_end() -> None:
    coordinator = Coordinator()
    coordinator.create("r", SPEC)
    coordinator.deliver()
    coordinator.on("r", run_events.UserStopRequested("enough", True, 30.0))
    assert coordinator.state.provisioning.demands == (MachineDemand("r", (), 0, in_use=("spot-1", "spot-2")),)
    first, second = coordinator.state.fleet.of_run("r")
    coordinator.on("r", fe.ProcessExited("r", first.member, first.incarnation, "done"))
    assert coordinator.state.provisioning.demands == (MachineDemand("r", (), 0, in_use=(second.agent,)),)
    coordinator.on("r", fe.ProcessExited("r", second.member, second.incarnation, "done"))
    assert coordinator.state.provisioning.demands == ()


def test_evaluator_keeps_its_machine_after_the_training_finished() -> None:
    coordinator = Coordinator()
    roles = {"evaluator": RoleSpec(on=("lab",))}
    coordinator.create("r", replace(SPEC, members=(1, 1), roles=roles), evaluator=True)
    coordinator.deliver()
    trainer = next(p for p in coordinator.state.fleet.of_run("r") if p.agent.startswith("spot"))
    coordinator.on("r", ev.MemberDone(trainer.member, 10))
    coordinator.on("r", fe.ProcessExited("r", trainer.member, trainer.incarnation, "done"))
    assert coordinator.state.provisioning.demands == (
        MachineDemand("r", ("lab",), 1, 1),
        MachineDemand("r", (), 0, in_use=("lab-1",)),
    )


def test_run_over_budget_stops_with_a_checkpoint_and_resumes_with_more() -> None:
    coordinator = Coordinator()
    coordinator.create("r", replace(SPEC, budget=0.2))
    coordinator.deliver()
    assert len(coordinator.members("r")) == 1, "two would be too expensive to last"
    coordinator.pay(700.0)
    run = coordinator.state.runs["r"]
    assert run.membership.stopping is not None
    assert (run.membership.stopping.exit_code, run.membership.stopping.checkpoint) == (BUDGET_REACHED, True)
    (p,) = coordinator.state.fleet.of_run("r")
    coordinator.on("r", fe.ProcessExited("r", p.member, p.incarnation, "asked", exit_code=BUDGET_REACHED))
    assert (run.status, run.exit_code) == ("resumable", BUDGET_REACHED)
    assert "0.02 remain of the budget of 0.20" in run.reason
    view = api_views.run_view(run, coordinator.state, LiveRun(), "d", coordinator.now)
    assert view.cost is not None
    assert 0.17 < view.cost.spent <= 0.2
    with pytest.raises(BadBudget, match="does not pay for 1 member any longer"):
        admission.check_remaining_budget(run.spec, run.budget, view.cost.spent, coordinator.state.provisioning.pools)
    coordinator.on("r", run_events.BudgetSet(5.0))
    coordinator.on("r", run_events.RunResumed(1, 2))
    assert coordinator.state.provisioning.demands == (MachineDemand("r", ("spot",), 2, 1, budget=5.0),)


def test_replay_gives_the_same_costs() -> None:
    coordinator, again = Coordinator(), CoordinatorState()
    roles = {"evaluator": RoleSpec(on=("lab",)), "trainer": RoleSpec(cpus=4)}
    coordinator.create("r", replace(SPEC, budget=0.4, roles=roles, members=(1, 3)), evaluator=True)
    coordinator.deliver()
    coordinator.pay(600.0)
    for entry in coordinator.entries:
        apply(again, entry.run, journal.decode_event(entry, run_events.KINDS), entry.at)
    assert again == coordinator.state
    assert again.provisioning.account.of_run("r").spent > 0.1


# --- admission


def test_labels_select_pools_and_exclude_agents_without_a_pool() -> None:
    spec = admission.admit(replace(SPEC, on=(), where={"gpu": "a100"}), POOLS)
    assert spec.on == ("spot",)
    coordinator = Coordinator()
    coordinator.create("r", spec)
    coordinator.on("", fe.AgentConnected("friend", 4, "h"))
    assert coordinator.members("r") == []
    coordinator.deliver()
    assert coordinator.members("r") == ["spot-1/0", "spot-2/0"]


def test_labels_of_a_role_select_its_own_pools() -> None:
    roles = {"evaluator": RoleSpec(where={"gpu": "none"})}
    assert admission.admit(replace(SPEC, roles=roles), POOLS).roles["evaluator"].on == ("lab",)


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"on": ("moon",)}, BadPool),
        ({"roles": {"evaluator": RoleSpec(on=("moon",))}}, BadPool),
        ({"where": {"gpu": "h100"}}, BadLabels),
        ({"compat": "ps", "roles": {"server": RoleSpec(on=("lab",))}}, BadRole),
        ({"roles": {"trainer": RoleSpec(on=("lab",))}}, BadRole),
        ({"budget": 0.01}, BadBudget),
        ({"budget": 5.0, "on": ("lab",)}, BadBudget),
        ({"budget": 5.0, "on": ()}, BadBudget),
    ],
)
def test_unsatisfiable_run_is_refused(changes: dict[str, object], kind: type[Exception]) -> None:
    with pytest.raises(kind):
        admission.admit(replace(SPEC, **changes), POOLS)


def test_role_larger_than_the_slots_of_its_pool_is_refused() -> None:
    small = {"spot": PoolInfo("spot", "slurm", limit=4, slots=2, sized=True, cpus=4)}
    with pytest.raises(SlotTooSmall):
        admission.admit(replace(SPEC, roles={"trainer": RoleSpec(cpus=4)}), small)


# --- the queue


def test_queue_is_ordered_by_priority_and_says_what_a_run_waits_for() -> None:
    coordinator = Coordinator()
    coordinator.create("first", replace(SPEC, members=(2, 4)))
    coordinator.deliver()
    coordinator.create("second", SPEC)
    coordinator.create("urgent", replace(SPEC, priority=5))
    assert queue.queued_runs(coordinator.state) == ["urgent", "second"]
    queued = queue.queue_position(coordinator.state.runs["second"], coordinator.state, coordinator.now)
    assert queued == queue.QueuedRun(2, "1 slot; held by first (4)")
    assert queue.queue_position(coordinator.state.runs["first"], coordinator.state, coordinator.now) is None


def test_queued_run_says_when_its_machines_were_requested_and_why_they_wait() -> None:
    coordinator = Coordinator()
    coordinator.create("r", replace(SPEC, members=(2, 2)))
    seen = tuple(
        pe.ListedAllocation(name, name, False, "other jobs come before it")
        for name in coordinator.state.provisioning.allocations
    )
    coordinator.on("", pe.PoolListed("spot", seen))
    coordinator.now += 30.0
    queued = queue.queue_position(coordinator.state.runs["r"], coordinator.state, coordinator.now)
    assert queued is not None
    assert queued.waits_for == (
        "2 slots; 2 of spot requested 30 s ago (other jobs come before it); no machine is connected"
    )
    view = api_views.run_view(coordinator.state.runs["r"], coordinator.state, LiveRun(), "d", coordinator.now)
    assert (view.queued, view.waits_for) == (1, queued.waits_for)
