"""Who holds the state of a run with servers, decided without a network."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shoal.core import sync_mode
from shoal.core.membership import decide as mb
from shoal.core.membership import events as ev
from shoal.core.membership.state import DONE, LastHeartbeat, MembershipSettings, MembershipState
from shoal.core.parameter_server import decide as sv
from shoal.core.placement import Placement
from shoal.core.world import Address
from shoal.errors import BadSync

HERE = Address("h", 1)


class Run:
    """A state, and what was asked last."""

    def __init__(self, servers: int = 2, trainers: tuple[int, int] = (1, 4)) -> None:
        self.state = MembershipState(MembershipSettings(*trainers, servers=servers, regroup_s=0.0))
        self.asked: tuple[ev.Instruction, ...] = ()
        self.now = 1000.0

    def on(self, *events: ev.Event) -> Run:
        for event in events:
            self.state, self.asked = sv.decide(self.state, event, self.now)
        return self

    def come(self, name: str, incarnation: str = "1") -> Run:
        role = "server" if name.startswith("s") else "trainer"
        return self.on(ev.MemberConnected(name, incarnation, HERE, role=role), ev.MemberReady(name, "model", None))

    def copy_all(self) -> Run:
        for part, holding in enumerate(self.placement.assignments):
            if holding.learner:
                self.on(ev.PartCopied(holding.primary, part, holding.learner, holding.since))
        return self

    @property
    def placement(self) -> Placement:
        assert self.state.placement is not None
        return self.state.placement

    def told(self, kind: type) -> list[Any]:
        return [one for one in self.asked if isinstance(one, kind)]


def started() -> Run:
    return Run().come("s0").come("s1").come("t0").come("t1").copy_all()


def test_nothing_is_placed_before_there_is_a_server_and_a_trainer() -> None:
    run = Run().come("t0")
    assert run.state.placement is None
    assert run.state.reason == "waiting for a server to become ready"
    assert Run().come("s0").come("s1").state.reason == "0 of at least 1 trainers are present"


def test_the_first_placement_is_fresh_and_everybody_hears_of_it() -> None:
    run = Run().come("s0").come("s1").come("t0")
    assert run.placement.fresh
    assert {name for one in run.told(ev.PublishPlacement) for name in one.to} == {"s0", "s1", "t0"}


def test_a_trainer_that_comes_later_is_told_and_nobody_else_is_bothered() -> None:
    run = started().come("t2")
    (one,) = run.told(ev.PublishPlacement)
    assert one.to == ("t2",)
    assert one.placement == run.placement


def test_a_lost_trainer_changes_no_placement_and_the_servers_forget_it() -> None:
    run = started()
    number = run.placement.number
    run.on(ev.MemberLost("t1", "killed"))
    assert run.placement.number == number
    (gone,) = run.told(ev.AnnounceTrainerLost)
    assert (gone.member, gone.to) == ("t1", ("s0", "s1"))


def test_whoever_keeps_the_ledger_next_hears_who_is_gone() -> None:
    """A machine stands still with a trainer and the ledger's server on it: the trainer's connections stay open."""
    run = started()
    lead = run.placement.assignments[0].primary
    run.on(ev.MemberLost("t1", "silent"), ev.MemberLost(lead, "silent"))
    assert run.told(ev.AnnounceTrainerLost)[0].to == (run.placement.assignments[0].primary,)
    assert [type(one) for one in run.asked][-2:] == [ev.PublishPlacement, ev.AnnounceTrainerLost], (
        "it must know that it has the ledger"
    )
    run = started().on(ev.MemberLost("t1", "silent")).come("t1", "2").on(ev.MemberLost(lead, "silent"))
    assert not run.told(ev.AnnounceTrainerLost), "it is back"
    run = started().on(ev.MemberLost("t1", "silent"))
    run.now += 60.0
    assert not run.on(ev.MemberLost(lead, "silent")).told(ev.AnnounceTrainerLost), "that was heard long ago"


def test_a_server_that_was_away_when_a_trainer_was_lost_hears_of_it() -> None:
    run = started()
    lead = run.placement.assignments[0].primary
    run.on(
        ev.MemberDisconnected(lead), ev.MemberLost("t1", "silent"), ev.MemberConnected(lead, "1", HERE, role="server")
    )
    assert [(one.to, one.member) for one in run.told(ev.AnnounceTrainerLost)] == [((lead,), "t1")]
    other = "s1" if lead == "s0" else "s0"
    assert not run.on(ev.MemberDisconnected(other), ev.MemberConnected(other, "1", HERE, role="server")).told(
        ev.AnnounceTrainerLost
    )


def test_a_lost_server_is_replaced_by_its_backups() -> None:
    run = started().on(ev.MemberLost("s0", "killed"))
    assert {h.primary for h in run.placement.assignments} == {"s1"}
    assert "s0 is gone" in run.state.reason


def test_news_of_a_learner_that_has_died_since_makes_nobody_a_backup() -> None:
    run = Run().come("s0").come("s1").come("t0")
    late = ev.PartCopied("s0", 0, "s1", run.placement.assignments[0].since)
    run.on(ev.MemberLost("s1", "killed"))
    assert run.state.placement is None, "a part whose only holder is lost is lost"
    run = Run(servers=1).come("s0").come("t0").come("s1")
    late = ev.PartCopied("s0", 0, "s1", run.placement.assignments[0].since)
    run.on(ev.MemberLost("s1", "killed")).come("s1", "2").on(late)
    assert run.placement.assignments[0].backup == ""


def test_a_lost_part_takes_the_run_back_to_its_checkpoint() -> None:
    run = started().on(ev.MemberLost("s0", "killed"), ev.MemberLost("s1", "killed")).come("s0", "2")
    (asked,) = run.told(ev.RestoreCheckpoint)
    life = run.state.generation
    run.on(ev.MemberReady("s0", "model", 40, restored=True))
    assert run.placement.generation == life + 1
    assert not run.placement.fresh
    assert run.state.step == 40
    assert asked.member == "s0"


def test_a_server_that_comes_back_under_its_name_gets_everything_anew() -> None:
    run = started().on(ev.MemberLost("s0", "silent")).come("s0")
    assert all(h.learner == "s0" and not h.backup for h in run.placement.assignments)


def test_a_backup_that_its_primary_cannot_reach_is_dropped() -> None:
    run = started()
    holding = run.placement.assignments[0]
    run.on(ev.ServerUnreachable(holding.primary, holding.backup, run.placement.number, "no route"))
    after = run.placement.assignments[0]
    assert (after.backup, after.learner) == ("", holding.backup)
    assert after.since > holding.since


def test_a_server_that_nobody_reaches_is_lost_without_waiting_for_its_lease() -> None:
    run = started().on(ev.MemberDisconnected("s0"), ev.ServerUnreachable("t0", "s0", 1, "reset"))
    assert "s0" not in run.state.members


def test_a_leaving_server_hands_over_and_is_then_let_go() -> None:
    run = started().on(ev.NoticeReceived("s0", 30.0, "spot"))
    for part, holding in enumerate(run.placement.assignments):
        if holding.handing_off:
            run.on(ev.PartReleased("s0", part, run.placement.number))
    assert run.placement.seat_of("s0") is None
    assert "s0" in run.told(ev.PublishPlacement)[-1].to, "it must hear that it may go"


def test_trainers_stop_first_then_the_ledgers_server_then_the_others() -> None:
    run = started()
    lead = run.placement.assignments[0].primary
    other = "s1" if lead == "s0" else "s0"
    run.on(ev.StopRequested("enough", True, 75))
    assert [one.to for one in run.told(ev.StopMembers)] == [("t0", "t1")]
    run.on(ev.MemberLeft("t0", 5), ev.MemberLeft("t1", 5))
    assert [(one.to, one.checkpoint) for one in run.told(ev.StopMembers)] == [((lead,), True)]
    run.on(ev.MemberLeft(lead, None))
    assert [(one.to, one.checkpoint) for one in run.told(ev.StopMembers)] == [((other,), False)]


def test_the_run_is_finished_when_the_last_trainer_is_done() -> None:
    run = started().on(ev.MemberDone("t0", 10))
    assert not run.state.finished
    run.on(ev.MemberDone("t1", 10))
    assert run.state.finished
    assert set(run.told(ev.AnnounceFinished)[0].to) == {"s0", "s1"}


def test_a_trainer_that_dies_at_the_very_end_is_not_waited_for() -> None:
    assert started().on(ev.MemberDone("t0", 10), ev.MemberLost("t1", "killed")).state.finished


@pytest.mark.parametrize("again", [False, True])
def test_a_trainer_that_left_its_loop_ends_nothing_for_the_others(again: bool) -> None:
    early = (
        ev.MemberConnected("t0", "1", HERE, step=3, done=True, early=True)
        if again
        else ev.MemberDone("t0", 3, early=True)
    )
    run = started().on(early, ev.MemberLost("t1", "killed"))
    assert not run.state.finished
    run.come("t1", "2")
    assert "t1" in run.told(ev.PublishPlacement)[0].to
    assert run.on(ev.MemberDone("t1", 10)).state.step == 10
    assert run.state.finished


def test_a_run_is_stopped_and_not_finished_when_one_had_left_its_loop() -> None:
    run = started().on(ev.MemberDone("t0", 3, early=True), ev.StopRequested("enough", True, 75), ev.MemberLeft("t1", 5))
    assert not run.state.finished
    assert [one.checkpoint for one in run.told(ev.StopMembers)] == [True]


def test_a_run_is_finished_when_all_have_left_their_loops() -> None:
    assert started().on(ev.MemberDone("t0", 3, early=True), ev.MemberDone("t1", 4, early=True)).state.finished


def test_a_trainer_that_is_done_and_finds_the_coordinator_again_does_not_begin_anew() -> None:
    again = (ev.MemberConnected("t0", "1", HERE, step=10, done=True), ev.MemberReady("t0", "model", 10))
    run = started().on(ev.MemberDone("t0", 10), *again)
    assert run.state.members["t0"].status == DONE
    run.on(ev.MemberLost("t0", "lease expired"), *again)
    assert run.state.members["t0"].status == DONE


def test_a_spare_trainer_that_missed_that_all_is_done_is_told_again() -> None:
    run = Run(trainers=(1, 1)).come("s0").come("s1").come("t0").come("t1").copy_all()
    run.on(ev.MemberDone("t0", 10), ev.CoordinatorRestarted(), ev.MemberConnected("t1", "1", HERE))
    assert run.told(ev.AnnounceFinished) == [ev.AnnounceFinished(("t1",), 10)]


def test_a_member_that_finds_the_coordinator_again_hears_of_the_placement() -> None:
    run = started().on(ev.CoordinatorRestarted(), ev.MemberConnected("t0", "1", HERE))
    assert run.told(ev.PublishPlacement)[0].to == ("t0",)


@pytest.mark.parametrize("text", ["stale", "stale:-1", "stale:x", "bulk", "", "async:3", "step:1"])
def test_a_mode_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(BadSync):
        sync_mode.parse(text)


def test_modes_are_read() -> None:
    assert sync_mode.parse("stale:0") == sync_mode.SyncMode("stale:0", True, 0)
    assert sync_mode.parse("async").bound is None
    assert not sync_mode.parse("step").served


def test_a_server_that_dies_while_all_stop_is_stood_in_for() -> None:
    run = started()
    lead = run.placement.assignments[0].primary
    other = "s1" if lead == "s0" else "s0"
    run.on(ev.StopRequested("enough", True, 75), ev.MemberLost(lead, "killed"))
    assert {h.primary for h in run.placement.assignments} == {other}
    assert set(run.told(ev.PublishPlacement)[0].to) == {other, "t0", "t1"}, "a trainer could not end its ticket"
    run.on(ev.MemberLeft("t0", 5), ev.MemberLeft("t1", 5))
    assert [(one.to, one.checkpoint) for one in run.told(ev.StopMembers)] == [((other,), True)]


def test_a_server_that_dies_before_it_has_written_the_last_checkpoint_leaves_that_to_another() -> None:
    run = started().on(ev.StopRequested("enough", True, 75), ev.MemberLeft("t0", 5), ev.MemberLeft("t1", 5))
    ((lead,),) = [one.to for one in run.told(ev.StopMembers)]
    run.on(ev.MemberLost(lead, "killed"))
    assert [(one.to, one.checkpoint) for one in run.told(ev.StopMembers)] == [
        ((run.placement.servers[0].member,), True)
    ]


@pytest.mark.parametrize("stop_first", [True, False])
def test_trainers_are_not_kept_from_stopping_by_a_state_that_is_lost(stop_first: bool) -> None:
    run = Run(servers=1).come("s0").come("t0").come("t1")
    stop, lost = ev.StopRequested("enough", True, 75), ev.MemberLost("s0", "killed")
    run.on(*((stop, lost) if stop_first else (lost, stop)))
    assert [(one.to, one.checkpoint) for one in run.told(ev.StopMembers)][-2:] == [(("t0",), False), (("t1",), False)]
    run.on(ev.MemberConnected("t0", "1", HERE))
    assert [(one.to, one.checkpoint) for one in run.told(ev.StopMembers)] == [(("t0",), False)]
    assert not run.come("s0", "2").asked, "nobody brings the state back"


@pytest.mark.parametrize("before", [True, False])
def test_servers_under_notice_are_told_to_stop_when_it_is_their_turn(before: bool) -> None:
    run = started()
    lead = run.placement.assignments[0].primary
    other = "s1" if lead == "s0" else "s0"
    notices = (ev.NoticeReceived("s0", 600.0, "spot"), ev.NoticeReceived("s1", 600.0, "spot"))
    run.on(*(notices if before else ()), ev.StopRequested("enough", True, 75), *(() if before else notices))
    run.on(ev.MemberConnected(lead, "1", HERE, role="server"))
    assert not run.told(ev.StopMembers), "trainers still need it"
    run.on(ev.MemberLeft("t0", 5), ev.MemberLeft("t1", 5))
    assert [(one.to, one.checkpoint) for one in run.told(ev.StopMembers)] == [((lead,), True)]
    run.on(ev.MemberLeft(lead, None))
    assert [(one.to, one.checkpoint) for one in run.told(ev.StopMembers)] == [((other,), False)]


def test_a_run_whose_trainer_leaves_is_not_stopped_because_its_server_dies() -> None:
    run = Run(servers=1).come("s0").come("t0").on(ev.NoticeReceived("t0", 30.0, "spot"), ev.MemberLost("s0", "killed"))
    assert run.state.stopping is None
    assert run.come("s0", "2").told(ev.RestoreCheckpoint)


def test_a_trainer_that_is_back_when_all_stop_does_not_wait_for_who_has_left_the_checkpoint() -> None:
    run = Run(servers=1).come("s0").come("t0").on(ev.StopRequested("enough", True, 75), ev.MemberLost("t0", "silent"))
    run.on(ev.MemberConnected("t0", "1", HERE))
    assert [(one.to, one.checkpoint) for one in run.told(ev.StopMembers)] == [(("t0",), True)]
    run.on(ev.MemberLeft("s0", 5))
    assert run.state.placement is None
    assert [(one.to, one.checkpoint) for one in run.told(ev.StopMembers)] == [(("t0",), False)]
    run.on(ev.MemberConnected("t1", "1", HERE))
    assert [(one.to, one.checkpoint) for one in run.told(ev.StopMembers)] == [(("t1",), False)]


def test_a_trainer_stuck_with_its_ticket_is_found_by_those_who_wait_for_it() -> None:
    run = Run().come("s0").come("t0").come("t1")
    beats = {
        "s0": LastHeartbeat(1000.0, phase="serving", phase_age_s=900.0),
        "t0": LastHeartbeat(
            1000.0, phase="waiting: too far ahead", phase_age_s=301.0, usual_step_s=0.2, waits_for=("t1",)
        ),
        "t1": LastHeartbeat(1000.0, phase="compute", phase_age_s=302.0, usual_step_s=0.2),
    }
    [event] = mb.due(run.state, beats, 1000.5)
    assert isinstance(event, ev.MemberLost)
    assert (event.member, event.hung) == ("t1", True)
    for name, change in (
        ("t0", {"waits_for": ()}),
        ("t0", {"phase_age_s": 299.0}),
        ("t1", {"phase_age_s": 299.0}),
        ("t1", {"waits_for": ("t2",)}),
        ("t1", {"usual_step_s": 20.0}),
    ):
        assert not mb.due(run.state, {**beats, name: replace(beats[name], **change)}, 1000.5), (name, change)
