"""A run that cannot start with its pools fails with the problem of each; every other run waits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shoal.core.provisioning import decide as provisioning
from shoal.core.provisioning import events as se
from shoal.core.provisioning import feasibility
from shoal.core.provisioning.decide import ProvisioningState
from shoal.core.provisioning.events import MachineDemand, PoolInfo

SPOT = PoolInfo("spot", "slurm", limit=8)
LAB = PoolInfo("lab", "ssh", limit=2)


class Harness:
    """Provisioning with one run that has not started."""

    def __init__(self, *pools: PoolInfo, min_slots: int = 1, most: int = 2, started: bool = False) -> None:
        self.state, self.now = ProvisioningState(), 100.0
        self.handle(se.PoolsConfigured(pools))
        self.demand = MachineDemand(
            "run", tuple(pool.name for pool in pools), most, min_slots, started=started, start_timeout_s=60.0
        )
        self.handle(se.DemandChanged((self.demand,)))

    def handle(self, event: se.Event, after_s: float = 0.0) -> None:
        self.now += after_s
        self.state, _ = provisioning.decide(self.state, event, self.now)

    def problems(self, after_s: float = 0.0) -> tuple[se.PoolProblem, ...] | None:
        """Return the problems of the pools if the run fails now."""
        self.now += after_s
        for event in provisioning.expired_timers(self.state, self.now):
            self.state, instructions = provisioning.decide(self.state, event, self.now)
            for instruction in instructions:
                if isinstance(instruction, se.FailInfeasibleRun):
                    assert instruction.run == "run"
                    return instruction.problems
        return None

    def reject(self, *allocations: str, final: bool = True) -> None:
        for name in allocations:
            pool = se.pool_of(name)
            self.handle(se.AllocationRejected(pool, name, "no such partition", "[pool]", "correct it", final))


def test_final_rejection_fails_the_run() -> None:
    harness = Harness(SPOT, most=1)
    assert harness.problems() is None
    harness.reject("spot-1")
    assert harness.problems() == (se.PoolProblem("spot", "no such partition", "[pool]", "correct it"),)


def test_run_waits_while_another_pool_can_provide_enough() -> None:
    harness = Harness(SPOT, LAB, min_slots=2)
    harness.reject("spot-1", "spot-2")
    assert harness.problems(after_s=3600.0) is None
    harness = Harness(SPOT, LAB, min_slots=3)
    harness.reject("spot-1", "spot-2")
    problems = harness.problems()
    assert problems is not None
    assert [problem.pool for problem in problems] == ["spot", "lab"]
    assert "it provides at most 2 slots, but the run needs at least 3" in problems[1].why


def test_machines_delivered_before_the_rejection_count() -> None:
    harness = Harness(SPOT, min_slots=1)
    harness.handle(se.AllocationSubmitted("spot", "spot-1", "job"))
    harness.reject("spot-2")
    assert harness.problems() is None
    harness.handle(se.PoolListed("spot", (), (("spot-1", "it was cancelled"),)))
    assert harness.problems() is not None


def test_unreachable_pool_is_retried_for_the_start_timeout() -> None:
    harness = Harness(LAB)
    harness.handle(se.PoolUnreachable("lab", "h1 does not answer", "ssh h1", "switch it on"))
    harness.reject("lab-1", "lab-2", final=False)
    assert harness.problems(after_s=59.0) is None
    (problem,) = harness.problems(after_s=2.0) or ()
    assert problem.why.startswith("every request failed for 60 s: ")
    assert harness.problems() is not None


def test_pool_that_is_reachable_again_gets_the_whole_timeout() -> None:
    harness = Harness(LAB)
    harness.handle(se.PoolUnreachable("lab", "h1 does not answer"))
    harness.reject("lab-1", "lab-2", final=False)
    harness.handle(se.PoolListed("lab", ()), after_s=50.0)
    harness.handle(se.AllocationSubmitted("lab", sorted(harness.state.allocations)[0], "h"), after_s=1.0)
    assert harness.problems(after_s=3600.0) is None, "it waits in the queue of the pool"


def test_finally_unreachable_engine_fails_the_run() -> None:
    harness = Harness(SPOT)
    harness.handle(se.PoolUnreachable("spot", "squeue is not on this machine", do="install it", final=True))
    harness.reject("spot-1", "spot-2")
    assert harness.problems() is not None


def test_three_failed_starts_in_a_row_fail_the_run() -> None:
    harness = Harness(SPOT, most=1)
    for _ in range(3):
        assert harness.problems(after_s=700.0) is None
        (name,) = harness.state.allocations
        harness.handle(se.AllocationSubmitted("spot", name, "job"))
        harness.handle(se.PoolListed("spot", (), ((name, "exit code 127"),)))
    harness.now += 700.0
    harness.handle(se.ProvisioningTimerExpired("pool", pool="spot"))
    assert len(harness.state.allocations) == 1, "it is requested again, but not counted on"
    (problem,) = harness.problems() or ()
    assert "3 machines in a row" in problem.why
    assert "exit code 127" in problem.why


def test_connected_agent_resets_failed_starts() -> None:
    harness = Harness(SPOT, most=1)
    for _ in range(2):
        harness.problems(after_s=700.0)
        (name,) = harness.state.allocations
        harness.handle(se.AllocationSubmitted("spot", name, "job"))
        harness.handle(se.PoolListed("spot", (), ((name, "exit code 127"),)))
    harness.problems(after_s=700.0)
    (name,) = harness.state.allocations
    harness.handle(se.AllocationSubmitted("spot", name, "job"))
    harness.handle(se.AgentArrived(name))
    assert harness.state.health["spot"].failed_starts == 0


@pytest.mark.parametrize("pool", [PoolInfo("spot", "slurm", limit=0), PoolInfo("spot", "slurm", limit=1)])
def test_too_small_pool_fails_the_run_at_once(pool: PoolInfo) -> None:
    harness = Harness(pool, min_slots=2)
    (problem,) = harness.problems() or ()
    assert "limit" in problem.why + problem.do


def test_new_run_retries_a_pool_that_rejected_an_earlier_one() -> None:
    harness = Harness(SPOT, most=1)
    harness.reject("spot-1")
    assert harness.problems() is not None
    harness.handle(se.DemandChanged(()))
    harness.demand = replace(harness.demand, run="later")
    harness.handle(se.DemandChanged((harness.demand,)))
    assert not feasibility.start_problems(harness.state, harness.demand, harness.now)
    assert list(harness.state.allocations) == ["spot-2"], "it is requested at once"
    harness.reject("spot-2")
    assert feasibility.start_problems(harness.state, harness.demand, harness.now)


def test_wait_description_names_pools_and_reasons() -> None:
    harness = Harness(SPOT, LAB, most=9)
    harness.handle(se.AllocationSubmitted("spot", "spot-1", "job"))
    harness.handle(se.PoolListed("spot", (se.ListedAllocation("spot-1", "job", False, "no node is free (Resources)"),)))
    assert feasibility.describe_wait(harness.state, ("spot", "lab")) == (
        "waiting for machines: 8 of pool spot (no node is free (Resources)); 1 of pool lab"
    )
    harness.reject("lab-9", final=False)
    assert feasibility.describe_wait(harness.state, ("lab",)) == (
        "waiting for machines: pool lab, to be retried (no such partition)"
    )


def test_started_run_never_fails_for_lack_of_machines() -> None:
    harness = Harness(SPOT, started=True)
    harness.reject("spot-1", "spot-2")
    assert harness.problems(after_s=86400.0) is None
