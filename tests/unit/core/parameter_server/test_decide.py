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
    """A state, and what was instructions last."""

    def __init__(self, servers: int = 2, trainers: tuple[int, int] = (1, 4)) -> None:
        self.state = MembershipState(MembershipSettings(*trainers, servers=servers, regroup_s=0.0))
        self.instructions: tuple[ev.Instruction, ...] = ()
        self.now = 1000.0

    def on(self, *events: ev.Event) -> Run:
        for event in events:
            self.state, self.instructions = sv.decide(self.state, event, self.now)
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

    def of_kind(self, kind: type) -> list[Any]:
        return [one for one in self.instructions if isinstance(one, kind)]


def started() -> Run:
    return Run().come("s0").come("s1").come("t0").come("t1").copy_all()


def test_state_is_placed_once_there_are_a_server_and_a_trainer() -> None:
    run = Run().come("t0")
    assert run.state.placement is None
    assert run.state.reason == "waiting for a server to become ready"
    assert Run().come("s0").come("s1").state.reason == "0 of at least 1 trainer are present"


def test_first_placement_is_fresh_and_sent_to_all_members() -> None:
    run = Run().come("s0").come("s1").come("t0")
    assert run.placement.fresh
    assert {name for one in run.of_kind(ev.PublishPlacement) for name in one.to} == {"s0", "s1", "t0"}


def test_placement_is_sent_to_a_later_trainer_alone() -> None:
    run = started().come("t2")
    (one,) = run.of_kind(ev.PublishPlacement)
    assert one.to == ("t2",)
    assert one.placement == run.placement


def test_lost_trainer_is_announced_without_a_new_placement() -> None:
    run = started()
    number = run.placement.number
    run.on(ev.MemberLost("t1", "killed"))
    assert run.placement.number == number
    (gone,) = run.of_kind(ev.AnnounceTrainerLost)
    assert (gone.member, gone.to) == ("t1", ("s0", "s1"))


def test_new_primary_of_the_ledger_is_told_of_lost_trainers() -> None:
    """A machine stands still with a trainer and the ledger's server on it: the trainer's connections stay open."""
    run = started()
    lead = run.placement.assignments[0].primary
    run.on(ev.MemberLost("t1", "silent"), ev.MemberLost(lead, "silent"))
    assert run.of_kind(ev.AnnounceTrainerLost)[0].to == (run.placement.assignments[0].primary,)
    assert [type(one) for one in run.instructions][-2:] == [ev.PublishPlacement, ev.AnnounceTrainerLost], (
        "it must know that it has the ledger"
    )
    run = started().on(ev.MemberLost("t1", "silent")).come("t1", "2").on(ev.MemberLost(lead, "silent"))
    assert not run.of_kind(ev.AnnounceTrainerLost), "it is back"
    run = started().on(ev.MemberLost("t1", "silent"))
    run.now += 60.0
    assert not run.on(ev.MemberLost(lead, "silent")).of_kind(ev.AnnounceTrainerLost), "that was heard long ago"


def test_reconnected_server_is_told_of_lost_trainers() -> None:
    run = started()
    lead = run.placement.assignments[0].primary
    run.on(
        ev.MemberDisconnected(lead), ev.MemberLost("t1", "silent"), ev.MemberConnected(lead, "1", HERE, role="server")
    )
    assert [(one.to, one.member) for one in run.of_kind(ev.AnnounceTrainerLost)] == [((lead,), "t1")]
    other = "s1" if lead == "s0" else "s0"
    assert not run.on(ev.MemberDisconnected(other), ev.MemberConnected(other, "1", HERE, role="server")).of_kind(
        ev.AnnounceTrainerLost
    )


def test_lost_server_is_replaced_by_its_backups() -> None:
    run = started().on(ev.MemberLost("s0", "killed"))
    assert {h.primary for h in run.placement.assignments} == {"s1"}
    assert "s0 is gone" in run.state.reason


def test_copy_to_a_dead_learner_is_ignored() -> None:
    run = Run().come("s0").come("s1").come("t0")
    late = ev.PartCopied("s0", 0, "s1", run.placement.assignments[0].since)
    run.on(ev.MemberLost("s1", "killed"))
    assert run.state.placement is None, "a part whose only holder is lost is lost"
    run = Run(servers=1).come("s0").come("t0").come("s1")
    late = ev.PartCopied("s0", 0, "s1", run.placement.assignments[0].since)
    run.on(ev.MemberLost("s1", "killed")).come("s1", "2").on(late)
    assert run.placement.assignments[0].backup == ""


def test_lost_part_restores_the_checkpoint() -> None:
    run = started().on(ev.MemberLost("s0", "killed"), ev.MemberLost("s1", "killed")).come("s0", "2")
    (instructions,) = run.of_kind(ev.RestoreCheckpoint)
    life = run.state.generation
    run.on(ev.MemberReady("s0", "model", 40, restored=True))
    assert run.placement.generation == life + 1
    assert not run.placement.fresh
    assert run.state.step == 40
    assert instructions.member == "s0"


def test_restarted_server_gets_new_copies() -> None:
    run = started().on(ev.MemberLost("s0", "silent")).come("s0")
    assert all(h.learner == "s0" and not h.backup for h in run.placement.assignments)


def test_backup_that_its_primary_cannot_reach_is_dropped() -> None:
    run = started()
    holding = run.placement.assignments[0]
    run.on(ev.ServerUnreachable(holding.primary, holding.backup, run.placement.number, "no route"))
    after = run.placement.assignments[0]
    assert (after.backup, after.learner) == ("", holding.backup)
    assert after.since > holding.since


def test_unreachable_disconnected_server_is_lost_before_its_lease_expires() -> None:
    run = started().on(ev.MemberDisconnected("s0"), ev.ServerUnreachable("t0", "s0", 1, "reset"))
    assert "s0" not in run.state.members


def test_leaving_server_hands_off_before_it_is_released() -> None:
    run = started().on(ev.NoticeReceived("s0", 30.0, "spot"))
    for part, holding in enumerate(run.placement.assignments):
        if holding.handing_off:
            run.on(ev.PartReleased("s0", part, run.placement.number))
    assert run.placement.seat_of("s0") is None
    assert "s0" in run.of_kind(ev.PublishPlacement)[-1].to, "it must hear that it may go"


def test_trainers_stop_before_the_primary_of_the_ledger_and_other_servers() -> None:
    run = started()
    lead = run.placement.assignments[0].primary
    other = "s1" if lead == "s0" else "s0"
    run.on(ev.StopRequested("enough", True, 75))
    assert [one.to for one in run.of_kind(ev.StopMembers)] == [("t0", "t1")]
    run.on(ev.MemberLeft("t0", 5), ev.MemberLeft("t1", 5))
    assert [(stop.to, stop.checkpoint) for stop in run.of_kind(ev.StopMembers)] == [((lead,), True)]
    run.on(ev.MemberLeft(lead, None))
    assert [(stop.to, stop.checkpoint) for stop in run.of_kind(ev.StopMembers)] == [((other,), False)]


def test_run_finishes_with_its_last_trainer() -> None:
    run = started().on(ev.MemberDone("t0", 10))
    assert not run.state.finished
    run.on(ev.MemberDone("t1", 10))
    assert run.state.finished
    assert set(run.of_kind(ev.AnnounceFinished)[0].to) == {"s0", "s1"}


def test_trainer_that_dies_at_the_end_is_not_waited_for() -> None:
    assert started().on(ev.MemberDone("t0", 10), ev.MemberLost("t1", "killed")).state.finished


@pytest.mark.parametrize("again", [False, True])
def test_early_exit_of_a_trainer_does_not_end_the_run(again: bool) -> None:
    early = (
        ev.MemberConnected("t0", "1", HERE, step=3, done=True, early=True)
        if again
        else ev.MemberDone("t0", 3, early=True)
    )
    run = started().on(early, ev.MemberLost("t1", "killed"))
    assert not run.state.finished
    run.come("t1", "2")
    assert "t1" in run.of_kind(ev.PublishPlacement)[0].to
    assert run.on(ev.MemberDone("t1", 10)).state.step == 10
    assert run.state.finished


def test_run_with_an_early_exit_stops_without_finishing() -> None:
    run = started().on(ev.MemberDone("t0", 3, early=True), ev.StopRequested("enough", True, 75), ev.MemberLeft("t1", 5))
    assert not run.state.finished
    assert [one.checkpoint for one in run.of_kind(ev.StopMembers)] == [True]


def test_run_finishes_when_all_trainers_exited_early() -> None:
    assert started().on(ev.MemberDone("t0", 3, early=True), ev.MemberDone("t1", 4, early=True)).state.finished


def test_done_trainer_that_reconnects_does_not_begin_again() -> None:
    again = (ev.MemberConnected("t0", "1", HERE, step=10, done=True), ev.MemberReady("t0", "model", 10))
    run = started().on(ev.MemberDone("t0", 10), *again)
    assert run.state.members["t0"].status == DONE
    run.on(ev.MemberLost("t0", "lease expired"), *again)
    assert run.state.members["t0"].status == DONE


def test_spare_trainer_that_missed_the_end_is_told_again() -> None:
    run = Run(trainers=(1, 1)).come("s0").come("s1").come("t0").come("t1").copy_all()
    run.on(ev.MemberDone("t0", 10), ev.CoordinatorRestarted(), ev.MemberConnected("t1", "1", HERE))
    assert run.of_kind(ev.AnnounceFinished) == [ev.AnnounceFinished(("t1",), 10)]


def test_reconnected_member_is_sent_the_placement() -> None:
    run = started().on(ev.CoordinatorRestarted(), ev.MemberConnected("t0", "1", HERE))
    assert run.of_kind(ev.PublishPlacement)[0].to == ("t0",)


@pytest.mark.parametrize("text", ["stale", "stale:-1", "stale:x", "bulk", "", "async:3", "step:1"])
def test_unknown_sync_mode_is_rejected(text: str) -> None:
    with pytest.raises(BadSync):
        sync_mode.parse(text)


def test_sync_modes_are_parsed() -> None:
    assert sync_mode.parse("stale:0") == sync_mode.SyncMode("stale:0", True, 0)
    assert sync_mode.parse("async").bound is None
    assert not sync_mode.parse("step").served


def test_backup_replaces_a_server_that_dies_during_a_stop() -> None:
    run = started()
    lead = run.placement.assignments[0].primary
    other = "s1" if lead == "s0" else "s0"
    run.on(ev.StopRequested("enough", True, 75), ev.MemberLost(lead, "killed"))
    assert {h.primary for h in run.placement.assignments} == {other}
    assert set(run.of_kind(ev.PublishPlacement)[0].to) == {other, "t0", "t1"}, "a trainer could not end its ticket"
    run.on(ev.MemberLeft("t0", 5), ev.MemberLeft("t1", 5))
    assert [(stop.to, stop.checkpoint) for stop in run.of_kind(ev.StopMembers)] == [((other,), True)]


def test_backup_writes_the_last_checkpoint_if_the_primary_dies() -> None:
    run = started().on(ev.StopRequested("enough", True, 75), ev.MemberLeft("t0", 5), ev.MemberLeft("t1", 5))
    ((lead,),) = [one.to for one in run.of_kind(ev.StopMembers)]
    run.on(ev.MemberLost(lead, "killed"))
    assert [(stop.to, stop.checkpoint) for stop in run.of_kind(ev.StopMembers)] == [
        ((run.placement.servers[0].member,), True)
    ]


@pytest.mark.parametrize("stop_first", [True, False])
def test_trainers_stop_even_if_the_state_is_lost(stop_first: bool) -> None:
    run = Run(servers=1).come("s0").come("t0").come("t1")
    stop, lost = ev.StopRequested("enough", True, 75), ev.MemberLost("s0", "killed")
    run.on(*((stop, lost) if stop_first else (lost, stop)))
    stops = [(stop.to, stop.checkpoint) for stop in run.of_kind(ev.StopMembers)]
    assert stops[-2:] == [(("t0",), False), (("t1",), False)]
    run.on(ev.MemberConnected("t0", "1", HERE))
    assert [(stop.to, stop.checkpoint) for stop in run.of_kind(ev.StopMembers)] == [(("t0",), False)]
    assert not run.come("s0", "2").instructions, "the state is not restored"


@pytest.mark.parametrize("before", [True, False])
def test_servers_with_notice_are_stopped_in_turn(before: bool) -> None:
    run = started()
    lead = run.placement.assignments[0].primary
    other = "s1" if lead == "s0" else "s0"
    notices = (ev.NoticeReceived("s0", 600.0, "spot"), ev.NoticeReceived("s1", 600.0, "spot"))
    run.on(*(notices if before else ()), ev.StopRequested("enough", True, 75), *(() if before else notices))
    run.on(ev.MemberConnected(lead, "1", HERE, role="server"))
    assert not run.of_kind(ev.StopMembers), "trainers still need it"
    run.on(ev.MemberLeft("t0", 5), ev.MemberLeft("t1", 5))
    assert [(stop.to, stop.checkpoint) for stop in run.of_kind(ev.StopMembers)] == [((lead,), True)]
    run.on(ev.MemberLeft(lead, None))
    assert [(stop.to, stop.checkpoint) for stop in run.of_kind(ev.StopMembers)] == [((other,), False)]


def test_loss_of_a_server_does_not_stop_a_run_whose_trainer_leaves() -> None:
    run = Run(servers=1).come("s0").come("t0").on(ev.NoticeReceived("t0", 30.0, "spot"), ev.MemberLost("s0", "killed"))
    assert run.state.stopping is None
    assert run.come("s0", "2").of_kind(ev.RestoreCheckpoint)


def test_trainer_that_reconnects_during_a_stop_does_not_wait_for_the_checkpoint() -> None:
    run = Run(servers=1).come("s0").come("t0").on(ev.StopRequested("enough", True, 75), ev.MemberLost("t0", "silent"))
    run.on(ev.MemberConnected("t0", "1", HERE))
    assert [(stop.to, stop.checkpoint) for stop in run.of_kind(ev.StopMembers)] == [(("t0",), True)]
    run.on(ev.MemberLeft("s0", 5))
    assert run.state.placement is None
    assert [(stop.to, stop.checkpoint) for stop in run.of_kind(ev.StopMembers)] == [(("t0",), False)]
    run.on(ev.MemberConnected("t1", "1", HERE))
    assert [(stop.to, stop.checkpoint) for stop in run.of_kind(ev.StopMembers)] == [(("t1",), False)]


def test_hung_trainer_is_detected_by_trainers_that_wait_for_it() -> None:
    run = Run().come("s0").come("t0").come("t1")
    heartbeats = {
        "s0": LastHeartbeat(1000.0, phase="serving", phase_age_s=900.0),
        "t0": LastHeartbeat(
            1000.0, phase="waiting: too far ahead", phase_age_s=301.0, usual_step_s=0.2, waits_for=("t1",)
        ),
        "t1": LastHeartbeat(1000.0, phase="compute", phase_age_s=302.0, usual_step_s=0.2),
    }
    [event] = mb.due(run.state, heartbeats, 1000.5)
    assert isinstance(event, ev.MemberLost)
    assert (event.member, event.hung) == ("t1", True)
    for name, change in (
        ("t0", {"waits_for": ()}),
        ("t0", {"phase_age_s": 299.0}),
        ("t1", {"phase_age_s": 299.0}),
        ("t1", {"waits_for": ("t2",)}),
        ("t1", {"usual_step_s": 20.0}),
    ):
        assert not mb.due(run.state, {**heartbeats, name: replace(heartbeats[name], **change)}, 1000.5), (name, change)


def test_every_event_of_a_member_is_handled() -> None:
    """A kind without a handler is journaled and then fails, each time that it is replayed too."""
    kinds = set(ev.Event.__args__)  # type: ignore[attr-defined]
    assert kinds == set(sv._HANDLERS) == set(mb._HANDLERS)


def test_adjustment_of_a_trainer_is_recorded_and_told() -> None:
    state = MembershipState(MembershipSettings(servers=1))
    event = ev.AdjustmentReported("lab/0", 3, "memory", {"micro": 2}, "lab/0 computes in micro-batches of 8")
    state, instructions = sv.decide(state, event, 5.0)
    assert list(state.adjustments.values()) == [event]
    assert isinstance(instructions[0], ev.MembershipNote)
    assert sv.decide(state, event, 6.0)[1] == ()


def test_trainer_that_never_built_its_model_cannot_end_the_run() -> None:
    run = Run()
    run.state = replace(run.state, placement=Placement(1, 1, (), ()))
    run.on(ev.MemberConnected("odd", "1", HERE))
    before = run.state
    for event in (ev.MemberDone("odd", 1 << 50), ev.CheckpointWritten("odd", 1 << 50, "/nowhere")):
        after, _ = sv.decide(before, event, run.now)
        assert (after.done_at, after.step, after.checkpoint_step) == (None, before.step, None)
