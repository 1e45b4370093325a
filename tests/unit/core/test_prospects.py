"""A run that cannot begin with its pools as they are is given up, with what is wrong with each; all others wait."""

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


class World:
    """A supply with one run that has not begun."""

    def __init__(self, *pools: PoolInfo, min_slots: int = 1, most: int = 2, started: bool = False) -> None:
        self.state, self.now = ProvisioningState(), 100.0
        self.tell(se.PoolsConfigured(pools))
        self.need = MachineDemand(
            "run", tuple(pool.name for pool in pools), most, min_slots, started=started, start_timeout_s=60.0
        )
        self.tell(se.DemandChanged((self.need,)))

    def tell(self, event: se.Event, after_s: float = 0.0) -> None:
        self.now += after_s
        self.state, _ = provisioning.decide(self.state, event, self.now)

    def given_up(self, after_s: float = 0.0) -> tuple[se.PoolProblem, ...] | None:
        """What is wrong with the pools, if the run is given up now."""
        self.now += after_s
        for event in provisioning.expired_timers(self.state, self.now):
            self.state, asked = provisioning.decide(self.state, event, self.now)
            for one in asked:
                if isinstance(one, se.FailInfeasibleRun):
                    assert one.run == "run"
                    return one.problems
        return None

    def refuse(self, *allocations: str, final: bool = True) -> None:
        for hire in allocations:
            pool = se.pool_of(hire)
            self.tell(se.AllocationRejected(pool, hire, "no such partition", "[pool]", "correct it", final))


def test_a_pool_that_refuses_for_good_is_not_waited_for() -> None:
    world = World(SPOT, most=1)
    assert world.given_up() is None
    world.refuse("spot-1")
    assert world.given_up() == (se.PoolProblem("spot", "no such partition", "[pool]", "correct it"),)


def test_as_long_as_another_pool_may_give_enough_the_run_waits() -> None:
    world = World(SPOT, LAB, min_slots=2)
    world.refuse("spot-1", "spot-2")
    assert world.given_up(after_s=3600.0) is None
    world = World(SPOT, LAB, min_slots=3)
    world.refuse("spot-1", "spot-2")
    troubles = world.given_up()
    assert troubles is not None
    assert [one.pool for one in troubles] == ["spot", "lab"]
    assert "it gives 2 places at most, and the run cannot begin with less than 3" in troubles[1].why


def test_what_a_pool_has_given_before_it_refused_counts() -> None:
    world = World(SPOT, min_slots=1)
    world.tell(se.AllocationSubmitted("spot", "spot-1", "job"))
    world.refuse("spot-2")
    assert world.given_up() is None
    world.tell(se.PoolListed("spot", (), (("spot-1", "it was cancelled"),)))
    assert world.given_up() is not None


def test_a_pool_that_cannot_be_reached_is_waited_for_as_long_as_the_run_says() -> None:
    world = World(LAB)
    world.tell(se.PoolUnreachable("lab", "h1 does not answer", "ssh h1", "switch it on"))
    world.refuse("lab-1", "lab-2", final=False)
    assert world.given_up(after_s=59.0) is None
    (trouble,) = world.given_up(after_s=2.0) or ()
    assert trouble.why.startswith("it was asked again and again for 60 s: ")
    assert world.given_up() is not None


def test_one_that_can_be_reached_again_has_all_the_time_again() -> None:
    world = World(LAB)
    world.tell(se.PoolUnreachable("lab", "h1 does not answer"))
    world.refuse("lab-1", "lab-2", final=False)
    world.tell(se.PoolListed("lab", ()), after_s=50.0)
    world.tell(se.AllocationSubmitted("lab", sorted(world.state.allocations)[0], "h"), after_s=1.0)
    assert world.given_up(after_s=3600.0) is None, "it waits in the queue of the pool"


def test_an_engine_that_cannot_even_be_asked_is_not_waited_for() -> None:
    world = World(SPOT)
    world.tell(se.PoolUnreachable("spot", "squeue is not on this machine", do="install it", final=True))
    world.refuse("spot-1", "spot-2")
    assert world.given_up() is not None


def test_machines_that_are_gone_before_they_are_of_use_are_tried_three_times() -> None:
    world = World(SPOT, most=1)
    for turn in (1, 2, 3):
        assert world.given_up(after_s=700.0) is None
        (hire,) = world.state.allocations
        world.tell(se.AllocationSubmitted("spot", hire, "job"))
        world.tell(se.PoolListed("spot", (), ((hire, "exit code 127"),)))
        del turn
    world.now += 700.0
    world.tell(se.ProvisioningTimerExpired("pool", pool="spot"))
    assert len(world.state.allocations) == 1, "it is asked again, and not counted on"
    (trouble,) = world.given_up() or ()
    assert "3 machines in a row" in trouble.why
    assert "exit code 127" in trouble.why


def test_an_agent_that_comes_makes_good_for_those_that_did_not() -> None:
    world = World(SPOT, most=1)
    for _ in range(2):
        world.given_up(after_s=700.0)
        (hire,) = world.state.allocations
        world.tell(se.AllocationSubmitted("spot", hire, "job"))
        world.tell(se.PoolListed("spot", (), ((hire, "exit code 127"),)))
    world.given_up(after_s=700.0)
    (hire,) = world.state.allocations
    world.tell(se.AllocationSubmitted("spot", hire, "job"))
    world.tell(se.AgentArrived(hire))
    assert world.state.health["spot"].failed_starts == 0


@pytest.mark.parametrize("pool", [PoolInfo("spot", "slurm", limit=0), PoolInfo("spot", "slurm", limit=1)])
def test_a_pool_that_may_give_too_little_is_known_at_once(pool: PoolInfo) -> None:
    world = World(pool, min_slots=2)
    (trouble,) = world.given_up() or ()
    assert "limit" in trouble.why + trouble.do


def test_another_run_asks_anew_what_was_refused_to_one_before() -> None:
    world = World(SPOT, most=1)
    world.refuse("spot-1")
    assert world.given_up() is not None
    world.tell(se.DemandChanged(()))
    world.need = replace(world.need, run="later")
    world.tell(se.DemandChanged((world.need,)))
    assert not feasibility.start_problems(world.state, world.need, world.now)
    assert list(world.state.allocations) == ["spot-2"], "it is asked at once"
    world.refuse("spot-2")
    assert feasibility.start_problems(world.state, world.need, world.now)


def test_whom_a_run_waits_for_is_told_with_what_they_say() -> None:
    world = World(SPOT, LAB, most=9)
    world.tell(se.AllocationSubmitted("spot", "spot-1", "job"))
    world.tell(se.PoolListed("spot", (se.ListedAllocation("spot-1", "job", False, "no node is free (Resources)"),)))
    assert feasibility.describe_wait(world.state, ("spot", "lab")) == (
        "waiting for machines: 8 of pool spot (no node is free (Resources)); 1 of pool lab"
    )
    world.refuse("lab-9", final=False)
    assert feasibility.describe_wait(world.state, ("lab",)) == (
        "waiting for machines: pool lab, which is asked again (no such partition)"
    )


def test_a_run_that_has_begun_is_never_given_up() -> None:
    world = World(SPOT, started=True)
    world.refuse("spot-1", "spot-2")
    assert world.given_up(after_s=86400.0) is None
