"""What runs need of machines, role by role, until their last process has ended; and what a budget does to them."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from shoal.coordinator import live_state as present
from shoal.core.fleet import events as fe
from shoal.core.membership import events as ev
from shoal.core.provisioning import budget
from shoal.core.provisioning import decide as provisioning
from shoal.core.provisioning import events as se
from shoal.core.provisioning.events import MachineDemand, PoolInfo
from shoal.core.runs import admission, queue
from shoal.core.runs import events as runs_events
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
        self.runs, self.now = CoordinatorState(), 1000.0
        self.entries: list[journal.JournalEntry] = []
        self.on("", fe.CoordinatorStarted("s"))
        self.on("", se.PoolsConfigured(tuple(POOLS.values())))

    def on(self, run: str, event: object, after_s: float = 1.0) -> list[object]:
        self.now += after_s
        self.entries.append(journal.entry_of(len(self.entries) + 1, self.now, run, event))
        return [one for _, one in self.runs.apply(run, event, self.now)]

    def create(self, name: str, spec: RunSpec, **settings: object) -> None:
        self.on(name, runs_events.RunCreated(spec, {**msgspec.to_builtins(RunSettings()), **settings}))

    def deliver(self) -> None:
        """Every machine that was asked for comes, and every process on it is ready to train."""
        for hire in [h for h in self.runs.supply.allocations.values() if h.status == provisioning.REQUESTED]:
            self.on("", se.AllocationSubmitted(hire.pool, hire.name, hire.name))
            size = self.runs.size_of(hire.name)
            self.on("", fe.AgentConnected(hire.name, hire.slots, "h", pool=hire.pool, size=size))
        for p in list(self.runs.fleet.processes.values()):
            self.on(p.run, fe.ProcessStarted(p.run, p.member, p.incarnation, 7, False))
            self.on(p.run, ev.MemberConnected(p.member, p.incarnation, Address("h", 1)))
            if "evaluator" not in p.member:
                self.on(p.run, ev.MemberReady(p.member, "model", None))

    def pay(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now += budget.CHECK_INTERVAL_S
            state = self.runs.supply
            for event in (
                *provisioning.expired_timers(state, self.now),
                *provisioning.expired_budget_timer(state, self.now),
            ):
                self.on("", event, after_s=0.0)

    def members(self, run: str) -> list[str]:
        return sorted(p.member for p in self.runs.fleet.of_run(run))


def test_each_role_needs_machines_of_its_own_pools() -> None:
    found = Coordinator()
    roles = {"evaluator": RoleSpec(on=("lab",)), "trainer": RoleSpec(cpus=4, memory_bytes=7)}
    found.create("r", replace(SPEC, roles=roles), evaluator=True)
    assert found.runs.supply.demands == (
        MachineDemand("r", ("lab",), 1, 1),
        MachineDemand("r", ("spot",), 2, 1, cpus=4, memory_bytes=7, started=False),
    )
    assert {hire.pool: (hire.cpus, hire.memory_bytes) for hire in found.runs.supply.allocations.values()} == {
        "lab": (0, 0),
        "spot": (4, 7),
    }
    found.deliver()
    assert found.members("r") == ["lab-1/evaluator-0", "spot-2/0", "spot-3/0"]


def test_servers_without_pools_of_their_own_are_counted_with_the_trainers() -> None:
    found = Coordinator()
    found.create("r", SPEC, sync="async", servers=2)
    assert found.runs.supply.demands == (MachineDemand("r", ("spot",), 4, 3, started=False),)
    found.create("apart", replace(SPEC, roles={"server": RoleSpec(on=("lab",))}), sync="async")
    assert found.runs.supply.demands[1:] == tuple(
        MachineDemand("apart", pools, 2, least, started=False) for pools, least in ((("lab",), 2), (("spot",), 1))
    )


def test_a_run_that_is_told_to_stop_keeps_its_machines_until_its_processes_have_ended() -> None:
    found = Coordinator()
    found.create("r", SPEC)
    found.deliver()
    found.on("r", runs_events.UserStopRequested("enough", True, 30.0))
    assert found.runs.supply.demands == (MachineDemand("r", (), 0, in_use=("spot-1", "spot-2")),)
    one, two = found.runs.fleet.of_run("r")
    found.on("r", fe.ProcessExited("r", one.member, one.incarnation, "done"))
    assert found.runs.supply.demands == (MachineDemand("r", (), 0, in_use=(two.agent,)),)
    found.on("r", fe.ProcessExited("r", two.member, two.incarnation, "done"))
    assert found.runs.supply.demands == ()


def test_an_evaluator_keeps_its_machine_while_it_scores_the_end_of_the_training() -> None:
    found = Coordinator()
    roles = {"evaluator": RoleSpec(on=("lab",))}
    found.create("r", replace(SPEC, members=(1, 1), roles=roles), evaluator=True)
    found.deliver()
    trainer = next(p for p in found.runs.fleet.of_run("r") if p.agent.startswith("spot"))
    found.on("r", ev.MemberDone(trainer.member, 10))
    found.on("r", fe.ProcessExited("r", trainer.member, trainer.incarnation, "done"))
    assert found.runs.supply.demands == (
        MachineDemand("r", ("lab",), 1, 1),
        MachineDemand("r", (), 0, in_use=("lab-1",)),
    )


def test_a_run_whose_money_is_gone_stops_with_a_checkpoint_and_can_be_resumed_for_more() -> None:
    found = Coordinator()
    found.create("r", replace(SPEC, budget=0.2))
    found.deliver()
    assert len(found.members("r")) == 1, "two would be too dear to last"
    found.pay(700.0)
    run = found.runs.runs["r"]
    assert run.membership.stopping is not None
    assert (run.membership.stopping.exit_code, run.membership.stopping.checkpoint) == (BUDGET_REACHED, True)
    (p,) = found.runs.fleet.of_run("r")
    found.on("r", fe.ProcessExited("r", p.member, p.incarnation, "asked", exit_code=BUDGET_REACHED))
    assert (run.status, run.exit_code) == ("resumable", BUDGET_REACHED)
    assert "0.02 remain of the budget of 0.20" in run.reason
    view = present.run_view(run, found.runs, present.LiveRun(), "d", found.now)
    assert view.cost is not None
    assert 0.17 < view.cost.spent <= 0.2
    with pytest.raises(BadBudget, match="does not pay 1 members any longer"):
        admission.check_left(run.spec, run.budget, view.cost.spent, found.runs.supply.pools)
    found.on("r", runs_events.BudgetSet(5.0))
    found.on("r", runs_events.RunResumed(1, 2))
    assert found.runs.supply.demands == (MachineDemand("r", ("spot",), 2, 1, budget=5.0),)


def test_what_was_spent_is_the_same_after_the_journal_was_read_again() -> None:
    found, again = Coordinator(), CoordinatorState()
    roles = {"evaluator": RoleSpec(on=("lab",)), "trainer": RoleSpec(cpus=4)}
    found.create("r", replace(SPEC, budget=0.4, roles=roles, members=(1, 3)), evaluator=True)
    found.deliver()
    found.pay(600.0)
    for entry in found.entries:
        again.apply(entry.run, journal.event_of(entry, runs_events.KINDS), entry.at)
    assert again == found.runs
    assert again.supply.account.of_run("r").spent > 0.1


# --- what is accepted


def test_labels_mean_pools_and_machines_that_came_by_themselves_will_not_do() -> None:
    spec = admission.settle(replace(SPEC, on=(), where={"gpu": "a100"}), POOLS)
    assert spec.on == ("spot",)
    found = Coordinator()
    found.create("r", spec)
    found.on("", fe.AgentConnected("friend", 4, "h"))
    assert found.members("r") == []
    found.deliver()
    assert found.members("r") == ["spot-1/0", "spot-2/0"]


def test_the_labels_of_a_role_choose_its_own_pools() -> None:
    roles = {"evaluator": RoleSpec(where={"gpu": "none"})}
    assert admission.settle(replace(SPEC, roles=roles), POOLS).roles["evaluator"].on == ("lab",)


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
def test_what_cannot_be_had_is_refused(changes: dict[str, object], kind: type[Exception]) -> None:
    with pytest.raises(kind):
        admission.settle(replace(SPEC, **changes), POOLS)


def test_a_role_that_is_larger_than_the_places_of_its_pool_is_refused() -> None:
    small = {"spot": PoolInfo("spot", "slurm", limit=4, slots=2, sized=True, cpus=4)}
    with pytest.raises(SlotTooSmall):
        admission.settle(replace(SPEC, roles={"trainer": RoleSpec(cpus=4)}), small)


# --- the queue


def test_runs_that_wait_are_in_line_by_priority_and_say_what_they_wait_for() -> None:
    found = Coordinator()
    found.create("first", replace(SPEC, members=(2, 4)))
    found.deliver()
    found.create("second", SPEC)
    found.create("urgent", replace(SPEC, priority=5))
    assert queue.queue_of(found.runs) == ["urgent", "second"]
    told = queue.waiting_of(found.runs.runs["second"], found.runs, found.now)
    assert told == queue.QueuedRun(2, "a place; held by first (4)")
    assert queue.waiting_of(found.runs.runs["first"], found.runs, found.now) is None


def test_a_run_whose_machines_were_asked_for_says_since_when_and_why_they_are_not_there() -> None:
    found = Coordinator()
    found.create("r", replace(SPEC, members=(2, 2)))
    seen = tuple(
        se.ListedAllocation(name, name, False, "other jobs come before it") for name in found.runs.supply.allocations
    )
    found.on("", se.PoolListed("spot", seen))
    found.now += 30.0
    told = queue.waiting_of(found.runs.runs["r"], found.runs, found.now)
    assert told is not None
    assert told.what == ("2 places; 2 of spot asked for 30 s ago (other jobs come before it); no machine is there")
    view = present.run_view(found.runs.runs["r"], found.runs, present.LiveRun(), "d", found.now)
    assert (view.queued, view.waits_for) == (1, told.what)
