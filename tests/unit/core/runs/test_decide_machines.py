"""Runs on machines of a pool: how they start, and what happens when the machines go."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.coordinator import api_views
from shoal.coordinator.live_state import LiveRun
from shoal.core.fleet import decide as fleet
from shoal.core.fleet import events as fe
from shoal.core.membership import events as ev
from shoal.core.provisioning import decide as provisioning
from shoal.core.provisioning import events as pe
from shoal.core.runs import events as run_events
from shoal.core.runs.decide import apply
from shoal.core.runs.state import CoordinatorState
from shoal.core.world import Address
from shoal.wire.api import RunSpec

SPOT = pe.PoolInfo("spot", "slurm", 4)
SPEC = RunSpec("t", ("t.py",), "/", (1, 1), on=("spot",))


class RunOnSpot:
    """A coordinator with one pool and one run on it."""

    def __init__(self, pool: pe.PoolInfo = SPOT) -> None:
        self.state, self.now = CoordinatorState(), 1.0
        self.instructions: list[Any] = []
        self.tell(pe.PoolsConfigured((pool,)))
        self.tell(run_events.RunCreated(SPEC, {}), "r")

    def tell(self, event: Any, run: str = "", after_s: float = 0.1) -> None:
        self.now += after_s
        self.instructions = [instruction for _, instruction in apply(self.state, run, event, self.now)]

    def due(self, after_s: float = 0.0) -> list[pe.ProvisioningTimerExpired]:
        """Return the expired timers."""
        self.now += after_s
        return list(provisioning.expired_timers(self.state.provisioning, self.now))

    def train_on(self, allocation: str) -> str:
        """Connect a machine, have its member train and return the member's name."""
        self.tell(pe.AllocationSubmitted("spot", allocation, allocation))
        self.tell(fe.AgentConnected(allocation, 1, "h", pool="spot"))
        (start,) = (i for i in self.instructions if isinstance(i, fe.StartProcess))
        self.tell(fe.ProcessStarted("r", start.member, start.incarnation, 7, warm=True), "r")
        self.tell(ev.MemberConnected(start.member, start.incarnation, Address("h", 1)), "r")
        self.tell(ev.MemberReady(start.member, "x", None), "r")
        self.tell(ev.TimerFired("regroup"), "r", after_s=1.0)
        self.incarnation = start.incarnation
        return start.member


def test_run_that_cannot_start_fails_with_the_error_of_its_pool() -> None:
    spot = RunOnSpot()
    spot.tell(
        pe.AllocationRejected("spot", "spot-1", "no such partition: nix", "[pool.spot]", "sinfo lists them", final=True)
    )
    spot.tell(pe.ProvisioningTimerExpired("start", run="r"))
    view = api_views.run_view(spot.state.runs["r"], spot.state, LiveRun(), "d", spot.now)
    assert (view.status, view.exit_code) == ("failed", 4)
    assert view.problem is not None
    assert (view.problem.code, view.problem.where) == ("S470", "[pool.spot]")
    assert (view.problem.why, view.problem.do) == ("no such partition: nix", "sinfo lists them")
    assert not spot.state.provisioning.demands


def test_run_whose_members_all_had_notice_waits_for_other_machines() -> None:
    spot = RunOnSpot()
    member = spot.train_on("spot-1")
    spot.tell(fe.AgentNotice("spot-1", 8.0, "preempted"))
    spot.tell(ev.TimerFired("notice"), "r", after_s=3.0)
    assert [i for i in spot.instructions if isinstance(i, ev.StopMembers)]
    spot.tell(ev.MemberLeft(member, 5), "r")
    spot.tell(fe.ProcessExited("r", member, spot.incarnation, "preempted", "left after a notice"), "r")
    run = spot.state.runs["r"]
    assert not run.has_ended
    assert run.shown_status == "waiting"
    assert [demand.run for demand in spot.state.provisioning.demands] == ["r"]
    assert not [i for i in spot.instructions if isinstance(i, fe.MarkRunEnded)]
    successor = spot.train_on("spot-2")
    assert successor == "spot-2/0"


def test_run_that_a_user_stopped_does_not_wait_for_other_machines() -> None:
    spot = RunOnSpot()
    member = spot.train_on("spot-1")
    spot.tell(fe.AgentNotice("spot-1", 8.0, "preempted"))
    spot.tell(ev.TimerFired("notice"), "r", after_s=3.0)
    spot.tell(run_events.UserStopRequested("by ada", True, 30.0), "r")
    spot.tell(ev.MemberLeft(member, 5), "r")
    spot.tell(fe.ProcessExited("r", member, spot.incarnation, "preempted", "left after a notice"), "r")
    assert spot.state.runs["r"].status == "stopped"


def test_run_that_lost_all_its_machines_waits_for_others_without_limit() -> None:
    spot = RunOnSpot()
    spot.train_on("spot-1")
    spot.tell(fe.AgentDisconnected("spot-1"))
    spot.tell(fe.FleetTimerExpired("agent", agent="spot-1"), after_s=20.0)
    assert not fleet.due(spot.state.fleet, spot.now + 3600.0)
    assert not spot.state.runs["r"].has_ended


def test_downtime_of_the_coordinator_does_not_count_against_a_machine() -> None:
    spot = RunOnSpot()
    spot.tell(pe.AllocationSubmitted("spot", "spot-1", "job"))
    spot.tell(pe.PoolListed("spot", (pe.ListedAllocation("spot-1", "job", running=True),)))
    limit_s = spot.state.provisioning.timeouts.join_s
    spot.tell(fe.CoordinatorStarted("again"), after_s=2 * limit_s)
    assert not spot.due(), "its agent had no coordinator to connect to"
    assert spot.due(after_s=limit_s - 1.0) == []
    assert spot.due(after_s=2.0) == [pe.ProvisioningTimerExpired("join", allocation="spot-1")]


def test_downtime_of_the_coordinator_does_not_count_against_a_run() -> None:
    spot = RunOnSpot()
    spot.tell(pe.AllocationRejected("spot", "spot-1", "the controller is down"))
    spot.tell(fe.CoordinatorStarted("again"), after_s=3600.0)
    assert pe.ProvisioningTimerExpired("start", run="r") not in spot.due()
    spot.tell(pe.AllocationRejected("spot", "spot-2", "the controller is down"), after_s=601.0)
    assert pe.ProvisioningTimerExpired("start", run="r") in spot.due(), "the pool had its time after that"


def test_machines_cost_while_the_coordinator_is_down() -> None:
    spot = RunOnSpot(pe.PoolInfo("spot", "slurm", 4, price_per_h=3.6))
    spot.train_on("spot-1")
    spot.tell(fe.CoordinatorStarted("again"), after_s=1000.0)
    account = provisioning.account_at(spot.state.provisioning, spot.now)
    assert account.of_run("r").spent == pytest.approx(1.0, rel=0.01)


def test_released_machine_is_shown_until_it_has_ended() -> None:
    spot = RunOnSpot()
    spot.train_on("spot-1")
    spot.tell(pe.AgentLost("spot-1", "silent"))
    (view,) = api_views.pool_views(spot.state.provisioning, spot.now)
    assert (view.running, view.leaving) == (0, 1), "it is paid for"
    spot.tell(pe.AllocationEnded("spot-1"))
    (view,) = api_views.pool_views(spot.state.provisioning, spot.now)
    assert view.leaving == 0
