"""Hiring machines from pools: what is missing is asked for, what is too much is let go, and nothing is forgotten."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shoal.core.provisioning import decide as provisioning
from shoal.core.provisioning import events as se
from shoal.core.provisioning.decide import RELEASING, REQUESTED, RUNNING, SUBMITTED, ProvisioningState
from shoal.core.provisioning.events import ListedAllocation, MachineDemand, PoolInfo

SPOT = PoolInfo("spot", "slurm", limit=8, price_per_h=1.0, on_demand_per_h=3.0, max_wait_s=60.0)
LAB = PoolInfo("lab", "ssh", limit=3, slots=2, price_per_h=2.0, max_wait_s=60.0)


class World:
    """A supply under test, at a time of its own."""

    def __init__(self, *pools: PoolInfo) -> None:
        self.state, self.now = ProvisioningState(), 0.0
        self.asked: list[se.Instruction] = []
        self.tell(se.PoolsConfigured(pools or (SPOT, LAB)))

    def tell(self, event: se.Event, after_s: float = 0.0) -> list[se.Instruction]:
        self.now += after_s
        self.state, asked = provisioning.decide(self.state, event, self.now)
        self.asked = list(asked)
        return self.asked

    def wait(self, seconds: float) -> list[se.Instruction]:
        self.now += seconds
        asked: list[se.Instruction] = []
        for event in provisioning.expired_timers(self.state, self.now):
            asked += self.tell(event)
        return asked

    def need(self, slots: int, *pools: str, run: str = "run", after_s: float = 0.0) -> list[se.Instruction]:
        return self.tell(
            se.DemandChanged((MachineDemand(run, pools or ("spot", "lab"), slots),) if slots else ()), after_s
        )

    def deliver(self, *allocations: str) -> None:
        for hire in allocations:
            pool = self.state.allocations[hire].pool
            self.tell(se.AllocationSubmitted(pool, hire, f"job of {hire}"))
            self.tell(se.AgentArrived(hire))

    def status(self) -> dict[str, str]:
        return {name: hire.status for name, hire in self.state.allocations.items()}


def of(kind: type, asked: list[Any]) -> list[str]:
    return [one.allocation for one in asked if isinstance(one, kind)]


def test_a_run_takes_from_its_pools_in_their_order_up_to_their_limits() -> None:
    world = World(PoolInfo("spot", "slurm", limit=2), LAB)
    asked = world.need(5)
    assert [(one.pool, one.slots) for one in asked if isinstance(one, se.SubmitAllocation)] == [
        ("spot", 1),
        ("spot", 1),
        ("lab", 2),
        ("lab", 2),
    ]
    assert world.need(5) == [], "what was asked for is counted on"


def test_a_pool_that_does_not_deliver_holds_nobody_up_and_what_comes_late_is_preferred() -> None:
    world = World()
    world.need(2)
    for hire in ("spot-1", "spot-2"):
        world.tell(se.AllocationSubmitted("spot", hire, hire))
    asked = world.wait(61)
    assert [one.pool for one in asked if isinstance(one, se.SubmitAllocation)] == ["lab"]
    world.deliver("lab-3")
    world.tell(se.AgentArrived("spot-1"))
    world.tell(se.AgentArrived("spot-2"))
    assert of(se.CancelAllocation, world.wait(6)) == ["lab-3"], "the later pool's is let go"


def test_a_machine_that_is_here_is_kept_until_those_that_are_preferred_are_here_too() -> None:
    world = World(PoolInfo("spot", "slurm", limit=2, max_wait_s=60.0), LAB)
    world.need(1, "lab")
    world.deliver("lab-1")
    world.need(2, "spot")
    world.need(2, "spot", "lab")
    assert of(se.CancelAllocation, world.wait(30)) == []
    world.deliver("spot-2", "spot-3")
    assert of(se.CancelAllocation, world.wait(0) + world.wait(6)) == ["lab-1"]


def test_a_machine_that_is_lost_is_replaced_at_once() -> None:
    world = World()
    world.need(1)
    world.deliver("spot-1")
    asked = world.tell(se.AgentLost("spot-1", "it did not come back"), after_s=100.0)
    assert of(se.CancelAllocation, asked) == ["spot-1"], "whatever is left of it is ended"
    assert of(se.SubmitAllocation, asked) == ["spot-2"]


def test_a_machine_with_a_notice_is_replaced_while_it_hands_over() -> None:
    world = World()
    world.need(1)
    world.deliver("spot-1")
    asked = world.tell(se.AgentLeaving("spot-1", "preempted in 30 s"))
    assert of(se.SubmitAllocation, asked) == ["spot-2"]
    assert of(se.CancelAllocation, asked + world.wait(10)) == [], "it goes by itself"
    world.tell(se.PoolListed("spot", (ListedAllocation("spot-2", "job", running=True),)))
    assert list(world.state.allocations) == ["spot-2"]
    assert world.state.health.get("spot", provisioning.PoolHealth()).failures == 0, "that is nobody's fault"


def test_a_machine_that_is_put_back_into_the_queue_is_waited_for_under_its_name() -> None:
    world = World(SPOT)
    world.need(1, "spot")
    world.deliver("spot-1")
    world.tell(se.PoolListed("spot", (ListedAllocation("spot-1", "job of spot-1", running=True),)))
    waiting = se.PoolListed("spot", (ListedAllocation("spot-1", "job of spot-1", running=False, why="requeued"),))
    assert provisioning.is_new_information(world.state, waiting)
    asked = world.tell(waiting, after_s=100.0) + world.tell(se.AgentLost("spot-1", "silent"), after_s=5.0)
    assert of(se.SubmitAllocation, asked) == of(se.CancelAllocation, asked) == []
    assert world.status() == {"spot-1": SUBMITTED}
    assert world.state.account.of_run("run").machine_s == pytest.approx(100.0), "nobody pays for a queue"
    assert world.state.account.of_run("run").lost == 1, "its machine is lost like that of one that does not come back"
    world.tell(se.AgentArrived("spot-1"))
    assert world.status() == {"spot-1": RUNNING}


def test_a_machine_that_the_engine_lost_is_replaced_at_once() -> None:
    world = World()
    world.need(1)
    world.deliver("spot-1")
    asked = world.tell(se.PoolListed("spot", (), (("spot-1", "node failure"),)), after_s=100.0)
    assert of(se.SubmitAllocation, asked) == ["spot-2"]
    assert "node failure" in str(asked)


def test_a_pool_whose_machines_die_young_is_left_alone_for_longer_and_longer() -> None:
    world = World(SPOT)
    world.need(1, "spot")
    for number, backoff_s in enumerate((5.0, 10.0, 20.0), start=1):
        world.deliver(f"spot-{number}")
        world.tell(se.PoolListed("spot", (), ((f"spot-{number}", "exit code 1"),)), after_s=1.0)
        assert not world.state.allocations
        assert not world.wait(backoff_s - 0.1)
        assert of(se.SubmitAllocation, world.wait(0.2)) == [f"spot-{number + 1}"]


def test_refusals_double_the_pause_and_all_is_forgiven_after_a_while() -> None:
    world = World(SPOT)
    world.need(1, "spot")
    pauses = []
    for _ in range(3):
        (hire,) = world.state.allocations
        world.tell(se.AllocationRejected("spot", hire, "quota of zero"))
        pauses.append(world.state.health["spot"].retry_at - world.now)
        world.wait(pauses[-1] + 0.1)
    assert pauses == pytest.approx([5.0, 10.0, 20.0])
    world.deliver(*world.state.allocations)
    world.tell(se.AgentLost("spot-4", "lost"), after_s=3600.0)
    world.tell(se.AllocationRejected("spot", "spot-5", "quota of zero"))
    assert world.state.health["spot"].retry_at - world.now == pytest.approx(5.0)


def test_a_pool_that_refuses_does_not_hold_up_the_next() -> None:
    world = World()
    world.need(1)
    asked = world.tell(se.AllocationRejected("spot", "spot-1", "unknown partition"))
    assert [one.pool for one in asked if isinstance(one, se.SubmitAllocation)] == ["lab"]
    assert "unknown partition" in str(asked)


def test_a_pool_that_cannot_be_reached_keeps_what_it_has_and_others_are_asked_for_the_rest() -> None:
    world = World()
    world.need(1)
    world.deliver("spot-1")
    world.tell(se.PoolUnreachable("spot", "the controller is down"))
    assert world.status() == {"spot-1": RUNNING}
    asked = world.need(2)
    assert [one.pool for one in asked if isinstance(one, se.SubmitAllocation)] == ["lab"]
    world.tell(se.PoolListed("spot", (ListedAllocation("spot-1", "job of spot-1", running=True),)))
    asked = world.need(5)
    assert [one.pool for one in asked if isinstance(one, se.SubmitAllocation)] == ["spot", "spot"], (
        "it can be reached again"
    )


def test_what_is_not_needed_any_more_is_let_go_after_a_moment() -> None:
    world = World()
    world.need(3, "spot")
    world.deliver("spot-1", "spot-2", "spot-3")
    assert world.need(1, "spot") == []
    assert world.need(3, "spot", after_s=1.0) == [], "a moment later all are needed again"
    world.need(1, "spot", after_s=1.0)
    assert of(se.CancelAllocation, world.wait(6)) == ["spot-2", "spot-3"]
    world.tell(se.AllocationEnded("spot-2"))
    assert world.status() == {"spot-1": RUNNING, "spot-3": RELEASING}


def test_what_should_go_and_does_not_is_told_again() -> None:
    world = World()
    world.need(1, "spot")
    world.deliver("spot-1")
    world.need(0)
    world.wait(6)
    assert of(se.CancelAllocation, world.wait(31)) == ["spot-1"]
    assert world.status() == {"spot-1": RELEASING}


def test_what_was_let_go_while_it_was_being_submitted_is_ended_when_it_comes() -> None:
    world = World()
    world.need(1, "spot")
    world.need(0)
    world.wait(6)
    assert world.status() == {"spot-1": RELEASING}
    asked = world.tell(se.AllocationSubmitted("spot", "spot-1", "job 7"))
    assert [one.handle for one in asked if isinstance(one, se.CancelAllocation)] == ["job 7"]


def test_what_was_let_go_before_its_handle_was_known_is_ended_where_it_is_seen() -> None:
    world = World()
    world.need(1, "spot")
    world.need(0)
    world.wait(6)
    asked = world.tell(se.PoolListed("spot", (ListedAllocation("spot-1", "job 7", running=True),)))
    assert [one.handle for one in asked if isinstance(one, se.CancelAllocation)] == ["job 7"]


def test_one_that_is_overdue_is_let_go_when_nobody_wants_it_any_more() -> None:
    world = World(SPOT)
    world.need(1, "spot")
    world.tell(se.AllocationSubmitted("spot", "spot-1", "job"))
    world.wait(61)
    assert world.state.allocations["spot-1"].overdue
    assert of(se.CancelAllocation, world.need(0)) == ["spot-1"]


def test_a_hire_that_nobody_asked_for_is_ended() -> None:
    world = World()
    asked = world.tell(se.PoolListed("spot", (ListedAllocation("spot-9", "job 9", running=True),)))
    assert of(se.CancelAllocation, asked) == ["spot-9"]


def test_what_was_started_twice_is_ended_once() -> None:
    world = World()
    world.need(1, "spot")
    world.deliver("spot-1")
    both = (
        ListedAllocation("spot-1", "job of spot-1", running=True),
        ListedAllocation("spot-1", "another", running=True),
    )
    asked = world.tell(se.PoolListed("spot", both))
    assert [one.handle for one in asked if isinstance(one, se.CancelAllocation)] == ["another"]
    assert world.status() == {"spot-1": RUNNING}


def test_a_coordinator_that_comes_back_adopts_what_it_had_asked_for_and_asks_again_for_the_rest() -> None:
    world = World()
    world.need(2, "spot")
    seen = ListedAllocation("spot-1", "job 1", running=True)
    asked = world.tell(se.PoolListed("spot", (seen,), unsubmitted=("spot-1", "spot-2")))
    assert of(se.SubmitAllocation, asked) == ["spot-2"]
    assert world.status() == {"spot-1": SUBMITTED, "spot-2": REQUESTED}


def test_a_machine_that_runs_but_sends_no_agent_is_let_go() -> None:
    world = World(SPOT)
    world.need(1, "spot")
    world.tell(se.AllocationSubmitted("spot", "spot-1", "job"))
    world.tell(se.PoolListed("spot", (ListedAllocation("spot-1", "job", running=True),)))
    assert of(se.CancelAllocation, world.wait(301)) == ["spot-1"]
    assert world.state.health["spot"].failures == 1


def test_several_runs_share_the_machines_of_a_pool_first_come_first_served() -> None:
    world = World(LAB)
    world.tell(se.DemandChanged((MachineDemand("a", ("lab",), 3), MachineDemand("b", ("lab",), 2))))
    assert len(world.state.allocations) == 3
    assert provisioning.users(world.state) == {"lab-1": {"a": 2}, "lab-2": {"a": 1, "b": 1}, "lab-3": {"b": 1}}


def test_costs_are_counted_for_each_run_over_all_losses() -> None:
    world = World(SPOT)
    world.need(1, "spot")
    world.deliver("spot-1")
    world.tell(se.AgentLost("spot-1", "preempted"), after_s=1800.0)
    world.tell(se.AllocationEnded("spot-1"))
    world.deliver("spot-2")
    world.need(0, after_s=1800.0)
    cost = world.state.account.of_run("run")
    assert cost.spent == pytest.approx(1.0)
    assert cost.saved == pytest.approx(2.0)
    assert cost.machine_s == pytest.approx(3600.0)
    world.wait(6)
    world.tell(se.AllocationEnded("spot-2"))
    assert world.state.account.total.machine_s == pytest.approx(3606.0), "what nobody needed is paid for too"


def test_news_are_what_differs_from_what_is_known() -> None:
    world = World()
    world.need(1, "spot")
    world.tell(se.AllocationSubmitted("spot", "spot-1", "job"))
    waiting = se.PoolListed("spot", (ListedAllocation("spot-1", "job", running=False),))
    running = se.PoolListed("spot", (ListedAllocation("spot-1", "job", running=True),))
    assert not provisioning.is_new_information(world.state, waiting)
    assert provisioning.is_new_information(world.state, running)
    assert provisioning.is_new_information(world.state, se.PoolListed("spot", ()))
    world.tell(running)
    assert not provisioning.is_new_information(world.state, running)


def test_a_machine_that_says_that_it_is_made_ready_is_waited_for() -> None:
    world = World()
    world.need(1, "spot")
    world.tell(se.AllocationSubmitted("spot", "spot-1", "job"))
    world.tell(se.SetupProgressed("spot-1", "builds its environment"))
    join_s = world.state.timeouts.join_s
    for _ in range(3):
        assert not of(se.CancelAllocation, world.wait(0.9 * join_s))
        world.tell(se.SetupProgressed("spot-1", "builds its environment"))
    assert world.status() == {"spot-1": SUBMITTED}
    asked = world.wait(1.1 * join_s)
    assert of(se.CancelAllocation, asked) == ["spot-1"], "then it was silent for too long"


def test_what_is_made_ready_for_long_does_not_hold_the_others_up() -> None:
    world = World()
    world.need(1, "spot", "lab")
    world.tell(se.AllocationSubmitted("spot", "spot-1", "job"))
    world.tell(se.SetupProgressed("spot-1", "builds its environment"))
    asked = world.wait(SPOT.max_wait_s + 1)
    assert of(se.SubmitAllocation, asked) == ["lab-2"]
    assert any("builds its environment" in one.text for one in asked if isinstance(one, se.ProvisioningNote))
    world.deliver("lab-2")
    world.tell(se.AgentArrived("spot-1"))
    assert of(se.CancelAllocation, world.wait(world.state.timeouts.surplus_s + 1)) == ["lab-2"]


def test_a_machine_that_cannot_be_made_ready_is_let_go_and_its_pool_left_alone() -> None:
    world = World()
    world.need(1, "spot", "lab")
    world.tell(se.AllocationSubmitted("spot", "spot-1", "job"))
    world.tell(se.SetupProgressed("spot-1", "builds its environment"))
    asked = world.tell(se.SetupFailed("spot-1", "torch cannot be installed"))
    assert of(se.CancelAllocation, asked) == ["spot-1"]
    assert of(se.SubmitAllocation, asked) == ["lab-2"]
    assert world.state.health["spot"].why == "torch cannot be installed"
    assert [one.text for one in asked if isinstance(one, se.ProvisioningNote)] == [
        "pool spot is asked again in 5 s: torch cannot be installed"
    ]
    world.tell(se.PoolListed("spot", (), (("spot-1", "it failed"),)))
    assert world.state.health["spot"].failures == 1, "it is one failure, however often it is told"


def test_what_a_machine_says_of_itself_is_not_overwritten_by_its_engine() -> None:
    world = World()
    world.need(1, "spot")
    world.tell(se.AllocationSubmitted("spot", "spot-1", "job"))
    world.tell(se.SetupProgressed("spot-1", "builds its environment"))
    seen = se.PoolListed("spot", (ListedAllocation("spot-1", "job", True, "Slurm job 5"),))
    assert not provisioning.is_new_information(world.state, seen)
    world.tell(seen)
    assert world.state.allocations["spot-1"].why == "builds its environment"


def test_a_machine_can_speak_before_its_engine_does() -> None:
    world = World()
    world.need(1, "spot")
    world.tell(se.SetupProgressed("spot-1", "builds its environment"))
    assert world.status() == {"spot-1": SUBMITTED}
    world.tell(se.AllocationSubmitted("spot", "spot-1", "job"))
    assert world.state.allocations["spot-1"].handle == "job"
    world.tell(se.SetupProgressed("nobody-7", "builds"))
    world.tell(se.SetupFailed("nobody-7", "no"))
    assert world.status() == {"spot-1": SUBMITTED}


def test_a_run_whose_environment_cannot_be_made_anywhere_is_given_up() -> None:
    world = World()
    need = MachineDemand("run", ("spot",), 1, 1, started=False)
    world.tell(se.DemandChanged((need,)))
    world.tell(se.AllocationSubmitted("spot", "spot-1", "job"))
    world.tell(se.SetupFailed("spot-1", "torch cannot be installed", "n1:log", "correct it", final=True))
    (given_up,) = [one for one in world.wait(0.1) if isinstance(one, se.FailInfeasibleRun)]
    assert given_up.problems == (se.PoolProblem("spot", "torch cannot be installed", "n1:log", "correct it"),)


def test_one_machine_that_cannot_be_made_ready_does_not_end_a_run() -> None:
    world = World()
    world.tell(se.DemandChanged((MachineDemand("run", ("spot",), 1, 1, started=False),)))
    world.tell(se.AllocationSubmitted("spot", "spot-1", "job"))
    world.tell(se.SetupFailed("spot-1", "its disk is full"))
    assert not [one for one in world.wait(0.1) if isinstance(one, se.FailInfeasibleRun)]


def test_a_limit_that_was_lowered_gives_back_what_is_above_it_the_youngest_first_and_asks_other_pools() -> None:
    world = World(SPOT, LAB)
    asked = of(se.SubmitAllocation, world.need(4))
    for hire in asked[:3]:
        world.now += 1.0
        world.deliver(hire)
    given_back = world.tell(se.PoolsConfigured((replace(SPOT, limit=2), LAB)), after_s=1.0)
    assert of(se.CancelAllocation, given_back) == asked[2:], "one that is here, and one that is not yet"
    assert {one.pool for one in given_back if isinstance(one, se.SubmitAllocation)} == {"lab"}
    assert [hire for hire in asked if world.status()[hire] == RUNNING] == asked[:2]
    assert "limit" in world.state.allocations[asked[2]].why
    world.tell(se.AllocationEnded(asked[2]))
    world.tell(se.PoolListed("spot", tuple(ListedAllocation(hire, f"job of {hire}", True) for hire in asked[:2])))
    assert not of(se.SubmitAllocation, world.wait(60.0)), "nothing more is asked of it"


def test_a_limit_that_is_raised_or_stays_costs_nobody_a_machine() -> None:
    world = World(SPOT, LAB)
    world.deliver(*of(se.SubmitAllocation, world.need(3)))
    for limit in (8, 3, 4):
        assert not of(se.CancelAllocation, world.tell(se.PoolsConfigured((replace(SPOT, limit=limit), LAB))))
