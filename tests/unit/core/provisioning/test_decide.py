"""Requests and releases of machines: missing slots are requested, surplus is released, nothing is forgotten."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shoal.core.provisioning import decide as provisioning
from shoal.core.provisioning import events as se
from shoal.core.provisioning.assignment import assign
from shoal.core.provisioning.decide import RELEASING, REQUESTED, RUNNING, SUBMITTED, ProvisioningState
from shoal.core.provisioning.events import ListedAllocation, MachineDemand, PoolInfo

SPOT = PoolInfo("spot", "slurm", limit=8, price_per_h=1.0, on_demand_per_h=3.0, max_wait_s=60.0)
LAB = PoolInfo("lab", "ssh", limit=3, slots=2, price_per_h=2.0, max_wait_s=60.0)


class Harness:
    """Provisioning under test, with a clock of its own."""

    def __init__(self, *pools: PoolInfo) -> None:
        self.state, self.now = ProvisioningState(), 0.0
        self.instructions: list[se.Instruction] = []
        self.handle(se.PoolsConfigured(pools or (SPOT, LAB)))

    def handle(self, event: se.Event, after_s: float = 0.0) -> list[se.Instruction]:
        self.now += after_s
        self.state, instructions = provisioning.decide(self.state, event, self.now)
        self.instructions = list(instructions)
        return self.instructions

    def wait(self, seconds: float) -> list[se.Instruction]:
        self.now += seconds
        instructions: list[se.Instruction] = []
        for event in provisioning.expired_timers(self.state, self.now):
            instructions += self.handle(event)
        return instructions

    def demand(self, slots: int, *pools: str, run: str = "run", after_s: float = 0.0) -> list[se.Instruction]:
        return self.handle(
            se.DemandChanged((MachineDemand(run, pools or ("spot", "lab"), slots),) if slots else ()), after_s
        )

    def deliver(self, *allocations: str) -> None:
        for name in allocations:
            pool = self.state.allocations[name].pool
            self.handle(se.AllocationSubmitted(pool, name, f"job of {name}"))
            self.handle(se.AgentArrived(name))

    def status(self) -> dict[str, str]:
        return {name: allocation.status for name, allocation in self.state.allocations.items()}


def of(kind: type, instructions: list[Any]) -> list[str]:
    return [instruction.allocation for instruction in instructions if isinstance(instruction, kind)]


def test_pools_are_used_in_order_up_to_their_limits() -> None:
    harness = Harness(PoolInfo("spot", "slurm", limit=2), LAB)
    instructions = harness.demand(5)
    assert [
        (instruction.pool, instruction.slots)
        for instruction in instructions
        if isinstance(instruction, se.SubmitAllocation)
    ] == [
        ("spot", 1),
        ("spot", 1),
        ("lab", 2),
        ("lab", 2),
    ]
    assert harness.demand(5) == [], "requested machines are counted on"


def test_slow_pool_is_bridged_by_the_next_and_preferred_once_it_delivers() -> None:
    harness = Harness()
    harness.demand(2)
    for name in ("spot-1", "spot-2"):
        harness.handle(se.AllocationSubmitted("spot", name, name))
    instructions = harness.wait(61)
    assert [instruction.pool for instruction in instructions if isinstance(instruction, se.SubmitAllocation)] == ["lab"]
    harness.deliver("lab-3")
    harness.handle(se.AgentArrived("spot-1"))
    harness.handle(se.AgentArrived("spot-2"))
    assert of(se.CancelAllocation, harness.wait(6)) == ["lab-3"], "the machine of the later pool is released"


def test_running_machine_is_kept_until_preferred_machines_run() -> None:
    harness = Harness(PoolInfo("spot", "slurm", limit=2, max_wait_s=60.0), LAB)
    harness.demand(1, "lab")
    harness.deliver("lab-1")
    harness.demand(2, "spot")
    harness.demand(2, "spot", "lab")
    assert of(se.CancelAllocation, harness.wait(30)) == []
    harness.deliver("spot-2", "spot-3")
    assert of(se.CancelAllocation, harness.wait(0) + harness.wait(6)) == ["lab-1"]


def test_lost_machine_is_replaced_at_once() -> None:
    harness = Harness()
    harness.demand(1)
    harness.deliver("spot-1")
    instructions = harness.handle(se.AgentLost("spot-1", "it did not come back"), after_s=100.0)
    assert of(se.CancelAllocation, instructions) == ["spot-1"], "its machine is ended too"
    assert of(se.SubmitAllocation, instructions) == ["spot-2"]


def test_machine_with_notice_is_replaced_before_it_leaves() -> None:
    harness = Harness()
    harness.demand(1)
    harness.deliver("spot-1")
    instructions = harness.handle(se.AgentLeaving("spot-1", "preempted in 30 s"))
    assert of(se.SubmitAllocation, instructions) == ["spot-2"]
    assert of(se.CancelAllocation, instructions + harness.wait(10)) == [], "it leaves on its own"
    harness.handle(se.PoolListed("spot", (ListedAllocation("spot-2", "job", running=True),)))
    assert list(harness.state.allocations) == ["spot-2"]
    assert harness.state.health.get("spot", provisioning.PoolHealth()).failures == 0, (
        "a preemption is no failure of the pool"
    )


def test_requeued_machine_keeps_its_allocation() -> None:
    harness = Harness(SPOT)
    harness.demand(1, "spot")
    harness.deliver("spot-1")
    harness.handle(se.PoolListed("spot", (ListedAllocation("spot-1", "job of spot-1", running=True),)))
    waiting = se.PoolListed("spot", (ListedAllocation("spot-1", "job of spot-1", running=False, why="requeued"),))
    assert provisioning.is_new_information(harness.state, waiting)
    instructions = harness.handle(waiting, after_s=100.0) + harness.handle(
        se.AgentLost("spot-1", "silent"), after_s=5.0
    )
    assert of(se.SubmitAllocation, instructions) == of(se.CancelAllocation, instructions) == []
    assert harness.status() == {"spot-1": SUBMITTED}
    assert harness.state.account.of_run("run").machine_s == pytest.approx(100.0), "waiting in a queue costs nothing"
    assert harness.state.account.of_run("run").lost == 1, "a requeued machine counts as lost"
    harness.handle(se.AgentArrived("spot-1"))
    assert harness.status() == {"spot-1": RUNNING}


def test_machine_missing_from_the_listing_is_replaced_at_once() -> None:
    harness = Harness()
    harness.demand(1)
    harness.deliver("spot-1")
    instructions = harness.handle(se.PoolListed("spot", (), (("spot-1", "node failure"),)), after_s=100.0)
    assert of(se.SubmitAllocation, instructions) == ["spot-2"]
    assert "node failure" in str(instructions)


def test_pool_whose_machines_end_early_backs_off_exponentially() -> None:
    harness = Harness(SPOT)
    harness.demand(1, "spot")
    for number, backoff_s in enumerate((5.0, 10.0, 20.0), start=1):
        harness.deliver(f"spot-{number}")
        harness.handle(se.PoolListed("spot", (), ((f"spot-{number}", "exit code 1"),)), after_s=1.0)
        assert not harness.state.allocations
        assert not harness.wait(backoff_s - 0.1)
        assert of(se.SubmitAllocation, harness.wait(0.2)) == [f"spot-{number + 1}"]


def test_rejections_double_the_backoff_until_a_quiet_hour_resets_it() -> None:
    harness = Harness(SPOT)
    harness.demand(1, "spot")
    backoffs = []
    for _ in range(3):
        (name,) = harness.state.allocations
        harness.handle(se.AllocationRejected("spot", name, "quota of zero"))
        backoffs.append(harness.state.health["spot"].retry_at - harness.now)
        harness.wait(backoffs[-1] + 0.1)
    assert backoffs == pytest.approx([5.0, 10.0, 20.0])
    harness.deliver(*harness.state.allocations)
    harness.handle(se.AgentLost("spot-4", "lost"), after_s=3600.0)
    harness.handle(se.AllocationRejected("spot", "spot-5", "quota of zero"))
    assert harness.state.health["spot"].retry_at - harness.now == pytest.approx(5.0)


def test_rejecting_pool_does_not_delay_the_next_pool() -> None:
    harness = Harness()
    harness.demand(1)
    instructions = harness.handle(se.AllocationRejected("spot", "spot-1", "unknown partition"))
    assert [instruction.pool for instruction in instructions if isinstance(instruction, se.SubmitAllocation)] == ["lab"]
    assert "unknown partition" in str(instructions)


def test_unreachable_pool_keeps_its_machines_and_others_serve_the_rest() -> None:
    harness = Harness()
    harness.demand(1)
    harness.deliver("spot-1")
    harness.handle(se.PoolUnreachable("spot", "the controller is down"))
    assert harness.status() == {"spot-1": RUNNING}
    instructions = harness.demand(2)
    assert [instruction.pool for instruction in instructions if isinstance(instruction, se.SubmitAllocation)] == ["lab"]
    harness.handle(se.PoolListed("spot", (ListedAllocation("spot-1", "job of spot-1", running=True),)))
    instructions = harness.demand(5)
    assert [instruction.pool for instruction in instructions if isinstance(instruction, se.SubmitAllocation)] == [
        "spot",
        "spot",
    ], "it is reachable again"


def test_unused_machines_are_released_after_the_surplus_time() -> None:
    harness = Harness()
    harness.demand(3, "spot")
    harness.deliver("spot-1", "spot-2", "spot-3")
    assert harness.demand(1, "spot") == []
    assert harness.demand(3, "spot", after_s=1.0) == [], "all are needed again a moment later"
    harness.demand(1, "spot", after_s=1.0)
    assert of(se.CancelAllocation, harness.wait(6)) == ["spot-2", "spot-3"]
    harness.handle(se.AllocationEnded("spot-2"))
    assert harness.status() == {"spot-1": RUNNING, "spot-3": RELEASING}


def test_unconfirmed_cancellation_is_repeated() -> None:
    harness = Harness()
    harness.demand(1, "spot")
    harness.deliver("spot-1")
    harness.demand(0)
    harness.wait(6)
    assert of(se.CancelAllocation, harness.wait(31)) == ["spot-1"]
    assert harness.status() == {"spot-1": RELEASING}


def test_allocation_released_during_submission_is_cancelled_by_its_handle() -> None:
    harness = Harness()
    harness.demand(1, "spot")
    harness.demand(0)
    harness.wait(6)
    assert harness.status() == {"spot-1": RELEASING}
    instructions = harness.handle(se.AllocationSubmitted("spot", "spot-1", "job 7"))
    assert [instruction.handle for instruction in instructions if isinstance(instruction, se.CancelAllocation)] == [
        "job 7"
    ]


def test_released_allocation_without_handle_is_cancelled_when_listed() -> None:
    harness = Harness()
    harness.demand(1, "spot")
    harness.demand(0)
    harness.wait(6)
    instructions = harness.handle(se.PoolListed("spot", (ListedAllocation("spot-1", "job 7", running=True),)))
    assert [instruction.handle for instruction in instructions if isinstance(instruction, se.CancelAllocation)] == [
        "job 7"
    ]


def test_overdue_allocation_is_released_without_demand() -> None:
    harness = Harness(SPOT)
    harness.demand(1, "spot")
    harness.handle(se.AllocationSubmitted("spot", "spot-1", "job"))
    harness.wait(61)
    assert harness.state.allocations["spot-1"].overdue
    assert of(se.CancelAllocation, harness.demand(0)) == ["spot-1"]


def test_unknown_allocation_is_cancelled() -> None:
    harness = Harness()
    instructions = harness.handle(se.PoolListed("spot", (ListedAllocation("spot-9", "job 9", running=True),)))
    assert of(se.CancelAllocation, instructions) == ["spot-9"]


def test_allocation_started_twice_loses_its_second_job() -> None:
    harness = Harness()
    harness.demand(1, "spot")
    harness.deliver("spot-1")
    both = (
        ListedAllocation("spot-1", "job of spot-1", running=True),
        ListedAllocation("spot-1", "another", running=True),
    )
    instructions = harness.handle(se.PoolListed("spot", both))
    assert [instruction.handle for instruction in instructions if isinstance(instruction, se.CancelAllocation)] == [
        "another"
    ]
    assert harness.status() == {"spot-1": RUNNING}


def test_restarted_coordinator_adopts_listed_allocations_and_resubmits_the_rest() -> None:
    harness = Harness()
    harness.demand(2, "spot")
    listed = ListedAllocation("spot-1", "job 1", running=True)
    instructions = harness.handle(se.PoolListed("spot", (listed,), unsubmitted=("spot-1", "spot-2")))
    assert of(se.SubmitAllocation, instructions) == ["spot-2"]
    assert harness.status() == {"spot-1": SUBMITTED, "spot-2": REQUESTED}


def test_machine_whose_agent_never_connects_is_released() -> None:
    harness = Harness(SPOT)
    harness.demand(1, "spot")
    harness.handle(se.AllocationSubmitted("spot", "spot-1", "job"))
    harness.handle(se.PoolListed("spot", (ListedAllocation("spot-1", "job", running=True),)))
    assert of(se.CancelAllocation, harness.wait(301)) == ["spot-1"]
    assert harness.state.health["spot"].failures == 1


def test_runs_share_machines_in_the_order_of_their_demands() -> None:
    harness = Harness(LAB)
    harness.handle(se.DemandChanged((MachineDemand("a", ("lab",), 3), MachineDemand("b", ("lab",), 2))))
    assert len(harness.state.allocations) == 3
    assert assign(harness.state, harness.state.demands).slots == {
        "lab-1": {"a": 2},
        "lab-2": {"a": 1, "b": 1},
        "lab-3": {"b": 1},
    }


def test_costs_add_up_over_losses() -> None:
    harness = Harness(SPOT)
    harness.demand(1, "spot")
    harness.deliver("spot-1")
    harness.handle(se.AgentLost("spot-1", "preempted"), after_s=1800.0)
    harness.handle(se.AllocationEnded("spot-1"))
    harness.deliver("spot-2")
    harness.demand(0, after_s=1800.0)
    cost = harness.state.account.of_run("run")
    assert cost.spent == pytest.approx(1.0)
    assert cost.saved == pytest.approx(2.0)
    assert cost.machine_s == pytest.approx(3600.0)
    harness.wait(6)
    harness.handle(se.AllocationEnded("spot-2"))
    assert harness.state.account.total.machine_s == pytest.approx(3606.0), "unused machines are charged too"


def test_listing_is_new_information_only_if_it_differs() -> None:
    harness = Harness()
    harness.demand(1, "spot")
    harness.handle(se.AllocationSubmitted("spot", "spot-1", "job"))
    waiting = se.PoolListed("spot", (ListedAllocation("spot-1", "job", running=False),))
    running = se.PoolListed("spot", (ListedAllocation("spot-1", "job", running=True),))
    assert not provisioning.is_new_information(harness.state, waiting)
    assert provisioning.is_new_information(harness.state, running)
    assert provisioning.is_new_information(harness.state, se.PoolListed("spot", ()))
    harness.handle(running)
    assert not provisioning.is_new_information(harness.state, running)


def test_setup_reports_extend_the_wait_for_the_agent() -> None:
    harness = Harness()
    harness.demand(1, "spot")
    harness.handle(se.AllocationSubmitted("spot", "spot-1", "job"))
    harness.handle(se.SetupProgressed("spot-1", "builds its environment"))
    join_s = harness.state.timeouts.join_s
    for _ in range(3):
        assert not of(se.CancelAllocation, harness.wait(0.9 * join_s))
        harness.handle(se.SetupProgressed("spot-1", "builds its environment"))
    assert harness.status() == {"spot-1": SUBMITTED}
    instructions = harness.wait(1.1 * join_s)
    assert of(se.CancelAllocation, instructions) == ["spot-1"], "it sent no report for too long"


def test_long_setup_does_not_delay_other_pools() -> None:
    harness = Harness()
    harness.demand(1, "spot", "lab")
    harness.handle(se.AllocationSubmitted("spot", "spot-1", "job"))
    harness.handle(se.SetupProgressed("spot-1", "builds its environment"))
    instructions = harness.wait(SPOT.max_wait_s + 1)
    assert of(se.SubmitAllocation, instructions) == ["lab-2"]
    assert any(
        "builds its environment" in instruction.text
        for instruction in instructions
        if isinstance(instruction, se.ProvisioningNote)
    )
    harness.deliver("lab-2")
    harness.handle(se.AgentArrived("spot-1"))
    assert of(se.CancelAllocation, harness.wait(harness.state.timeouts.surplus_s + 1)) == ["lab-2"]


def test_failed_setup_releases_the_machine_and_backs_off_its_pool() -> None:
    harness = Harness()
    harness.demand(1, "spot", "lab")
    harness.handle(se.AllocationSubmitted("spot", "spot-1", "job"))
    harness.handle(se.SetupProgressed("spot-1", "builds its environment"))
    instructions = harness.handle(se.SetupFailed("spot-1", "torch cannot be installed"))
    assert of(se.CancelAllocation, instructions) == ["spot-1"]
    assert of(se.SubmitAllocation, instructions) == ["lab-2"]
    assert harness.state.health["spot"].why == "torch cannot be installed"
    assert [instruction.text for instruction in instructions if isinstance(instruction, se.ProvisioningNote)] == [
        "pool spot failed; next request in 5 s: torch cannot be installed"
    ]
    harness.handle(se.PoolListed("spot", (), (("spot-1", "it failed"),)))
    assert harness.state.health["spot"].failures == 1, "one failure is counted once"


def test_setup_report_is_not_overwritten_by_the_engine() -> None:
    harness = Harness()
    harness.demand(1, "spot")
    harness.handle(se.AllocationSubmitted("spot", "spot-1", "job"))
    harness.handle(se.SetupProgressed("spot-1", "builds its environment"))
    listing = se.PoolListed("spot", (ListedAllocation("spot-1", "job", True, "Slurm job 5"),))
    assert not provisioning.is_new_information(harness.state, listing)
    harness.handle(listing)
    assert harness.state.allocations["spot-1"].why == "builds its environment"


def test_setup_report_may_precede_the_submission() -> None:
    harness = Harness()
    harness.demand(1, "spot")
    harness.handle(se.SetupProgressed("spot-1", "builds its environment"))
    assert harness.status() == {"spot-1": SUBMITTED}
    harness.handle(se.AllocationSubmitted("spot", "spot-1", "job"))
    assert harness.state.allocations["spot-1"].handle == "job"
    harness.handle(se.SetupProgressed("other-7", "builds"))
    harness.handle(se.SetupFailed("other-7", "no"))
    assert harness.status() == {"spot-1": SUBMITTED}


def test_run_fails_if_its_environment_cannot_be_set_up_anywhere() -> None:
    harness = Harness()
    demand = MachineDemand("run", ("spot",), 1, 1, started=False)
    harness.handle(se.DemandChanged((demand,)))
    harness.handle(se.AllocationSubmitted("spot", "spot-1", "job"))
    harness.handle(se.SetupFailed("spot-1", "torch cannot be installed", "n1:log", "correct it", final=True))
    (failure,) = [instruction for instruction in harness.wait(0.1) if isinstance(instruction, se.FailInfeasibleRun)]
    assert failure.problems == (se.PoolProblem("spot", "torch cannot be installed", "n1:log", "correct it"),)


def test_single_failed_setup_does_not_fail_the_run() -> None:
    harness = Harness()
    harness.handle(se.DemandChanged((MachineDemand("run", ("spot",), 1, 1, started=False),)))
    harness.handle(se.AllocationSubmitted("spot", "spot-1", "job"))
    harness.handle(se.SetupFailed("spot-1", "its disk is full"))
    assert not [instruction for instruction in harness.wait(0.1) if isinstance(instruction, se.FailInfeasibleRun)]


def test_lowered_limit_releases_the_youngest_and_uses_other_pools() -> None:
    harness = Harness(SPOT, LAB)
    names = of(se.SubmitAllocation, harness.demand(4))
    for name in names[:3]:
        harness.now += 1.0
        harness.deliver(name)
    instructions = harness.handle(se.PoolsConfigured((replace(SPOT, limit=2), LAB)), after_s=1.0)
    assert of(se.CancelAllocation, instructions) == names[2:], "one running and one pending"
    assert {instruction.pool for instruction in instructions if isinstance(instruction, se.SubmitAllocation)} == {"lab"}
    assert [name for name in names if harness.status()[name] == RUNNING] == names[:2]
    assert "limit" in harness.state.allocations[names[2]].why
    harness.handle(se.AllocationEnded(names[2]))
    harness.handle(se.PoolListed("spot", tuple(ListedAllocation(name, f"job of {name}", True) for name in names[:2])))
    assert not of(se.SubmitAllocation, harness.wait(60.0)), "nothing more is requested from it"


def test_machines_of_a_retired_pool_are_used_until_no_run_needs_them() -> None:
    harness = Harness(SPOT, LAB)
    names = of(se.SubmitAllocation, harness.demand(3, "spot"))
    harness.deliver(*names)
    retired = (replace(SPOT, limit=0, retired=True), LAB)
    assert harness.handle(se.PoolsConfigured(retired), after_s=1.0) == []
    assert not of(se.CancelAllocation, harness.wait(600.0))
    assert not of(se.SubmitAllocation, harness.demand(5, "spot")), "nothing more is requested from it"
    harness.demand(0)
    assert of(se.CancelAllocation, harness.wait(600.0)) == names


def test_raised_or_equal_limit_releases_nothing() -> None:
    harness = Harness(SPOT, LAB)
    harness.deliver(*of(se.SubmitAllocation, harness.demand(3)))
    for limit in (8, 3, 4):
        assert not of(se.CancelAllocation, harness.handle(se.PoolsConfigured((replace(SPOT, limit=limit), LAB))))
