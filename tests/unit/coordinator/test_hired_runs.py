"""Runs whose machines are hired: what they do when there are none."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.coordinator import live_state as present
from shoal.core.fleet import decide as fleet
from shoal.core.fleet import events as fe
from shoal.core.membership import events as ev
from shoal.core.provisioning import decide as provisioning
from shoal.core.provisioning import events as se
from shoal.core.runs import events as runs_events
from shoal.core.runs.state import CoordinatorState
from shoal.core.world import Address
from shoal.wire.api import RunSpec

SPOT = se.PoolInfo("spot", "slurm", 4)
SPEC = RunSpec("t", ("t.py",), "/", (1, 1), on=("spot",))


class Hired:
    """A coordinator with one pool and one run on it."""

    def __init__(self, pool: se.PoolInfo = SPOT) -> None:
        self.runs, self.now = CoordinatorState(), 1.0
        self.asked: list[Any] = []
        self.tell(se.PoolsConfigured((pool,)))
        self.tell(runs_events.RunCreated(SPEC, {}), "r")

    def tell(self, event: Any, run: str = "", after_s: float = 0.1) -> None:
        self.now += after_s
        self.asked = [one for _, one in self.runs.apply(run, event, self.now)]

    def due(self, after_s: float = 0.0) -> list[se.ProvisioningTimerExpired]:
        """The waits for machines that are over."""
        self.now += after_s
        return list(provisioning.expired_timers(self.runs.supply, self.now))

    def train_on(self, hire: str) -> str:
        """A machine comes, and its member trains; the member's name."""
        self.tell(se.AllocationSubmitted("spot", hire, hire))
        self.tell(fe.AgentConnected(hire, 1, "h", pool="spot"))
        (start,) = (one for one in self.asked if isinstance(one, fe.StartProcess))
        self.tell(fe.ProcessStarted("r", start.member, start.incarnation, 7, warm=True), "r")
        self.tell(ev.MemberConnected(start.member, start.incarnation, Address("h", 1)), "r")
        self.tell(ev.MemberReady(start.member, "x", None), "r")
        self.tell(ev.TimerFired("regroup"), "r", after_s=1.0)
        self.incarnation = start.incarnation
        return start.member


def test_a_run_that_cannot_begin_fails_with_the_error_of_its_pool() -> None:
    hired = Hired()
    hired.tell(
        se.AllocationRejected("spot", "spot-1", "no such partition: nix", "[pool.spot]", "sinfo lists them", final=True)
    )
    hired.tell(se.ProvisioningTimerExpired("start", run="r"))
    view = present.run_view(hired.runs.runs["r"], hired.runs, present.LiveRun(), "d", hired.now)
    assert (view.status, view.exit_code) == ("failed", 4)
    assert view.problem is not None
    assert (view.problem.code, view.problem.where) == ("S470", "[pool.spot]")
    assert (view.problem.why, view.problem.do) == ("no such partition: nix", "sinfo lists them")
    assert not hired.runs.supply.demands


def test_a_run_whose_members_were_all_told_to_go_waits_for_other_machines() -> None:
    hired = Hired()
    member = hired.train_on("spot-1")
    hired.tell(fe.AgentNotice("spot-1", 8.0, "preempted"))
    hired.tell(ev.TimerFired("notice"), "r", after_s=3.0)
    assert [one for one in hired.asked if isinstance(one, ev.StopMembers)]
    hired.tell(ev.MemberLeft(member, 5), "r")
    hired.tell(fe.ProcessExited("r", member, hired.incarnation, "preempted", "left after a notice"), "r")
    run = hired.runs.runs["r"]
    assert not run.over
    assert run.state_name == "waiting"
    assert [need.run for need in hired.runs.supply.demands] == ["r"]
    assert not [one for one in hired.asked if isinstance(one, fe.MarkRunEnded)]
    successor = hired.train_on("spot-2")
    assert successor == "spot-2/0"


def test_one_that_somebody_asked_to_stop_meanwhile_does_not_wait() -> None:
    hired = Hired()
    member = hired.train_on("spot-1")
    hired.tell(fe.AgentNotice("spot-1", 8.0, "preempted"))
    hired.tell(ev.TimerFired("notice"), "r", after_s=3.0)
    hired.tell(runs_events.UserStopRequested("by ada", True, 30.0), "r")
    hired.tell(ev.MemberLeft(member, 5), "r")
    hired.tell(fe.ProcessExited("r", member, hired.incarnation, "preempted", "left after a notice"), "r")
    assert hired.runs.runs["r"].status == "stopped"


def test_a_run_that_has_lost_all_its_machines_waits_for_others_however_long() -> None:
    hired = Hired()
    hired.train_on("spot-1")
    hired.tell(fe.AgentDisconnected("spot-1"))
    hired.tell(fe.FleetTimerExpired("agent", agent="spot-1"), after_s=20.0)
    assert not fleet.due(hired.runs.fleet, hired.now + 3600.0)
    assert not hired.runs.runs["r"].over


def test_a_machine_is_not_blamed_for_what_passed_while_the_coordinator_was_away() -> None:
    hired = Hired()
    hired.tell(se.AllocationSubmitted("spot", "spot-1", "job"))
    hired.tell(se.PoolListed("spot", (se.ListedAllocation("spot-1", "job", running=True),)))
    limit_s = hired.runs.supply.timeouts.join_s
    hired.tell(fe.CoordinatorStarted("again"), after_s=2 * limit_s)
    assert not hired.due(), "its agent had nobody to come to"
    assert hired.due(after_s=limit_s - 1.0) == []
    assert hired.due(after_s=2.0) == [se.ProvisioningTimerExpired("join", allocation="spot-1")]


def test_a_run_is_not_given_up_for_what_passed_while_the_coordinator_was_away() -> None:
    hired = Hired()
    hired.tell(se.AllocationRejected("spot", "spot-1", "the controller is down"))
    hired.tell(fe.CoordinatorStarted("again"), after_s=3600.0)
    assert se.ProvisioningTimerExpired("start", run="r") not in hired.due()
    hired.tell(se.AllocationRejected("spot", "spot-2", "the controller is down"), after_s=601.0)
    assert se.ProvisioningTimerExpired("start", run="r") in hired.due(), "the pool had its time after that"


def test_what_was_spent_while_the_coordinator_was_away_counts() -> None:
    hired = Hired(se.PoolInfo("spot", "slurm", 4, price_per_h=3.6))
    hired.train_on("spot-1")
    hired.tell(fe.CoordinatorStarted("again"), after_s=1000.0)
    account = provisioning.account_at(hired.runs.supply, hired.now)
    assert account.of_run("r").spent == pytest.approx(1.0, rel=0.01)


def test_a_machine_that_was_told_to_go_is_shown_until_it_is_gone() -> None:
    hired = Hired()
    hired.train_on("spot-1")
    hired.tell(se.AgentLost("spot-1", "silent"))
    (view,) = present.pool_views(hired.runs, hired.now)
    assert (view.here, view.leaving) == (0, 1), "it is paid for"
    hired.tell(se.AllocationEnded("spot-1"))
    (view,) = present.pool_views(hired.runs, hired.now)
    assert view.leaving == 0
