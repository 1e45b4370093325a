"""Single promises of membership; their combinations are tested in tests/property/test_membership_machine.py."""

from __future__ import annotations

from dataclasses import replace

from shoal.core.membership import events as ev
from shoal.core.membership.decide import KEPT_CLAIMS, LastHeartbeat, MembershipSettings, MembershipState, decide, due
from shoal.core.membership.leases import CoordinatorReachability, silence_limit_s
from shoal.core.world import Address, World

SETTINGS = MembershipSettings(min_members=1, max_members=2, regroup_s=0.5)


def after(
    state: MembershipState, *events: ev.Event, now: float = 100.0
) -> tuple[MembershipState, list[ev.Instruction]]:
    instructions: list[ev.Instruction] = []
    for event in events:
        state, more = decide(state, event, now)
        instructions = list(more)
    return state, instructions


def hello(name: str) -> ev.MemberConnected:
    return ev.MemberConnected(name, "1", Address("h", 1))


def test_member_with_another_model_is_rejected_and_not_counted_as_lost() -> None:
    state = world_of("a")
    state, instructions = after(state, hello("b"), ev.MemberReady("b", "y", None))
    assert [type(i) for i in instructions if isinstance(i, ev.RejectMember)] == [ev.RejectMember]
    assert state.losses == 0
    assert list(state.members) == ["a"]


def test_member_with_other_samples_is_told_which_one_differs() -> None:
    state = replace(world_of("a"), fingerprint="parameters=w;data=sample 4 aa, sample 9 bb")
    ready = ev.MemberReady("b", "parameters=w;data=sample 4 aa, sample 9 cc", None)
    _, instructions = after(state, hello("b"), ready)
    (rejection,) = (i for i in instructions if isinstance(i, ev.RejectMember))
    assert rejection.what == "the data of b differs from the data of this run"
    assert rejection.why == "data: sample 9 bb in the run, sample 9 cc on b"
    assert "seed" in rejection.do


def test_notes_say_what_they_are_about() -> None:
    """`shoal why` recognises them by their kind, not by their text."""
    state = world_of("a", "b")
    kinds = []
    for event in (
        ev.ScaleRequested(1, 3),
        ev.NoticeReceived("b", 60.0, "spot"),
        ev.MemberLeft("b", None),
        ev.MemberLost("a", "lease expired", silent=True),
        ev.CoordinatorRestarted(),
    ):
        state, instructions = after(state, event)
        kinds += [i.kind for i in instructions if isinstance(i, ev.MembershipNote) and i.kind]
    assert kinds == ["RunScaled", "MemberLeaving", "MemberLeft", "MemberHung", "CoordinatorRestarted"]


def test_model_of_most_members_becomes_that_of_the_run() -> None:
    settings = MembershipSettings(min_members=2, max_members=3)
    state = MembershipState(settings)
    for name, model in (("odd", "y"), ("a", "x"), ("b", "x")):
        state, instructions = after(state, hello(name), ev.MemberReady(name, model, None))
    assert [i.member for i in instructions if isinstance(i, ev.RejectMember)] == ["odd"]
    state, _ = after(state, ev.TimerFired("regroup"), now=101.0)
    assert [seat.member for seat in state.world.seats] == ["a", "b"]


def test_member_that_connects_after_the_end_is_told_so() -> None:
    state = replace(MembershipState(SETTINGS), finished=True, step=9)
    _, instructions = after(state, hello("late"))
    assert ev.AnnounceFinished(("late",), 9) in instructions


def test_regroup_timer_does_not_fire_again_after_all_members_disconnected() -> None:
    state, _ = after(MembershipState(SETTINGS), hello("a"), ev.MemberReady("a", "x", None))
    state, _ = after(state, ev.MemberDisconnected("a"))
    fired = due(state, {}, 100.6)
    assert ev.TimerFired("regroup") in fired
    state, _ = after(state, ev.TimerFired("regroup"), now=100.6)
    assert ev.TimerFired("regroup") not in due(state, {}, 100.7)


def world_of(*names: str, settings: MembershipSettings = SETTINGS) -> MembershipState:
    """A run whose world has these members, all at step 0."""
    settings = replace(settings, max_members=max(len(names), settings.max_members), regroup_s=0.0)
    state = MembershipState(settings)
    for name in names:
        state, _ = after(state, hello(name), ev.MemberReady(name, "x", None))
    state, _ = after(state, ev.TimerFired("regroup"))
    while state.world is None or state.world.size < len(names):
        assert state.proposal is not None
        state, _ = after(state, ev.WorldEntered(state.proposal.seats[0].member, state.proposal.number, 0))
    return state


def of_kind(instructions: list[ev.Instruction], kind: type) -> list[ev.Instruction]:
    return [instruction for instruction in instructions if isinstance(instruction, kind)]


def test_notice_proposes_a_world_without_the_leaving_member() -> None:
    _, instructions = after(world_of("a", "b"), ev.NoticeReceived("b", 120.0, "spot"))
    [proposed] = of_kind(instructions, ev.ProposeWorld)
    assert [seat.member for seat in proposed.world.seats] == ["a"]
    assert "b leaves (spot)" in proposed.reason
    assert set(proposed.to) == {"a", "b"}
    assert not of_kind(instructions, ev.DissolveWorld)


def test_member_that_leaves_before_others_report_the_new_world_breaks_none() -> None:
    state, _ = after(world_of("a", "b"), ev.NoticeReceived("b", 120.0, "spot"))
    state, instructions = after(state, ev.MemberLeft("b", 7, state.proposal.number))
    assert not of_kind(instructions, ev.DissolveWorld)
    assert state.world is not None
    assert [seat.member for seat in state.world.seats] == ["a"]
    assert state.losses == 0


def test_proposal_is_not_replaced_while_its_members_may_be_crossing() -> None:
    state, _ = after(world_of("a", "b"), ev.NoticeReceived("b", 120.0, "spot"))
    first = state.proposal
    state, instructions = after(state, hello("c"), ev.MemberReady("c", "x", None))
    assert state.proposal == first
    state, instructions = after(state, ev.WorldEntered("a", first.number, 7))
    assert not of_kind(instructions, ev.DissolveWorld)
    [proposed] = of_kind(instructions, ev.ProposeWorld)
    assert [seat.member for seat in proposed.world.seats] == ["a", "c"], "c is let in after the world that is live now"


def test_member_lost_in_the_last_step_is_not_waited_for() -> None:
    state, instructions = after(world_of("a", "b"), ev.MemberDone("a", 9))
    assert not state.finished, "b is still in the last step"
    state, instructions = after(state, ev.MemberLost("b", "its process ended"))
    assert state.finished
    _, instructions = after(state, ev.MemberConnected("b", "2", Address("h", 1)))
    assert ev.AnnounceFinished(("b",), 9) in instructions


def test_member_that_holds_the_state_repeats_the_last_step() -> None:
    state = world_of("a", "b")
    state, instructions = after(state, ev.WorldBroken("b", state.world.number, 8, ("a",)), ev.MemberDone("a", 9))
    assert not state.finished
    [formed] = of_kind(instructions, ev.FormWorld)
    assert [seat.member for seat in formed.world.seats] == ["b"]
    state, _ = after(state, ev.MemberDone("b", 9))
    assert state.finished


def test_end_does_not_wait_for_a_leaving_member_behind_the_last_step() -> None:
    """It was waited for once; when the done member had left, joiners had no source for the state."""
    state, _ = after(world_of("a", "b", "c"), ev.NoticeReceived("b", 30.0, "spot"))
    number = state.world.number
    state, _ = after(state, ev.WorldBroken("b", number, 5, ("a",)), ev.MemberLost("a", "its process ended"))
    state, instructions = after(state, ev.WorldBroken("c", number, 5, ("a",)))
    [formed] = of_kind(instructions, ev.FormWorld)
    assert [seat.member for seat in formed.world.seats] == ["c"]
    state, instructions = after(state, ev.MemberDone("c", 9))
    assert state.finished
    assert ev.AnnounceFinished(("b",), 9) in instructions


def test_leaving_member_is_not_kept_for_the_last_step() -> None:
    state, _ = after(world_of("a", "b"), ev.NoticeReceived("b", 30.0, "spot"))
    state, _ = after(state, ev.WorldBroken("b", state.world.number, 8, ("a",)), ev.MemberDone("a", 9))
    assert state.finished
    assert state.stopping is None


def test_last_step_is_finished_by_fewer_than_the_minimum() -> None:
    state = world_of("a", "b", "c", settings=replace(SETTINGS, min_members=2))
    number = state.world.number
    state, _ = after(state, ev.WorldBroken("b", number, 8, ("a",)), ev.MemberDone("a", 9))
    state, instructions = after(state, ev.MemberLost("c", "its process ended"))
    [formed] = of_kind(instructions, ev.FormWorld)
    assert [seat.member for seat in formed.world.seats] == ["b"]


def test_script_that_leaves_its_loop_ends_the_training_for_all_at_that_step() -> None:
    state, instructions = after(world_of("a", "b"), ev.MemberDone("a", 5, early=True))
    reason = "the script of a left its training loop"
    assert of_kind(instructions, ev.EndTraining) == [ev.EndTraining(("b",), 5, reason)]
    assert not state.finished, "b has to reach step 5 too"
    state, _ = after(state, ev.MemberDone("b", 5, early=True))
    assert state.finished
    assert state.reason == "finished at step 5: the script of a left its loop"


def test_member_behind_the_step_at_which_a_script_left_repeats_it_with_fewer_than_the_minimum() -> None:
    """It once waited for the minimum for ever: all scripts left at the same step, and the first one broke the ring."""
    state = world_of("a", "b", settings=replace(SETTINGS, min_members=2))
    number = state.world.number
    state, _ = after(state, ev.MemberDone("a", 5, early=True))
    state, instructions = after(state, ev.WorldBroken("b", number, 4, ("a",)))
    [formed] = of_kind(instructions, ev.FormWorld)
    assert [seat.member for seat in formed.world.seats] == ["b"]
    state, _ = after(state, ev.MemberDone("b", 5, early=True))
    assert state.finished


def test_script_that_left_its_loop_ends_the_run_if_the_others_are_lost() -> None:
    state, _ = after(world_of("a", "b"), ev.MemberDone("a", 5, early=True), ev.MemberLost("b", "its process ended"))
    assert state.finished
    state, instructions = after(state, ev.MemberConnected("b", "2", Address("h", 1)), ev.MemberReady("b", "x", None))
    assert not of_kind(instructions, ev.RestoreCheckpoint)


def test_joiner_and_those_that_left_their_loop_are_told_that_the_run_has_finished() -> None:
    """Members that left wait for it before they end, so that none breaks the world of one that is behind."""
    state, _ = after(world_of("a", "b"), hello("c"), ev.MemberReady("c", "x", None))
    state, _ = after(state, ev.MemberDone("a", 5, early=True))
    state, instructions = after(state, ev.MemberDone("b", 5, early=True))
    assert of_kind(instructions, ev.AnnounceFinished) == [ev.AnnounceFinished(("a", "b", "c"), 5)]


def test_member_that_missed_the_end_of_the_training_is_told_again() -> None:
    state, _ = after(world_of("a", "b"), ev.MemberDone("a", 5, early=True), ev.MemberDisconnected("b"))
    back = ev.MemberConnected("b", "1", Address("h", 1), state.world.number, 5)
    _, instructions = after(state, back)
    assert [i.to for i in of_kind(instructions, ev.EndTraining)] == [("b",)]


def test_lost_member_whose_process_turns_out_to_have_ended_well_ends_the_training() -> None:
    """Its peers saw the closed connections before the agent reported the exit code."""
    state = world_of("a", "b", settings=replace(SETTINGS, min_members=2))
    state, _ = after(state, ev.MemberDisconnected("a"), ev.WorldBroken("b", state.world.number, 5, ("a",)))
    assert list(state.members) == ["b"]
    state, instructions = after(state, ev.MemberDone("a", 5, early=True))
    assert [i.to for i in of_kind(instructions, ev.EndTraining)] == [("b",)]
    state, _ = after(state, ev.MemberDone("b", 5, early=True))
    assert state.finished


def test_worlds_that_break_before_their_first_step_are_formed_ever_more_rarely() -> None:
    """Once 461 worlds were formed in a second."""
    state, now, formed = world_of("a", "b"), 100.0, 0
    while now < 160.0:
        if state.world is not None:
            formed += 1
            number = state.world.number
            for name in ("a", "b"):
                state, _ = after(state, ev.WorldBroken(name, number, 0, (), "no device"), now=now)
        now += 0.05
        for event in due(state, {name: LastHeartbeat(now) for name in ("a", "b")}, now):
            state, _ = after(state, event, now=now)
    assert 5 < formed < 15


def test_progress_ends_the_pause_between_worlds() -> None:
    state = world_of("a", "b")
    for _ in range(3):
        number = state.world.number
        state, _ = after(state, ev.WorldBroken("a", number, 0), ev.WorldBroken("b", number, 0))
        state, _ = after(state, ev.TimerFired("retry"), now=200.0)
    number = state.world.number
    state, _ = after(state, ev.WorldBroken("a", number, 3), ev.WorldBroken("b", number, 3))
    assert state.world is not None
    assert state.failed_worlds == 0


def test_early_exit_of_the_last_member_ends_the_run() -> None:
    state, _ = after(world_of("a", "b"), ev.MemberDone("a", 5, early=True), ev.MemberDone("b", 5, early=True))
    assert state.finished


def done_hello(name: str, world: int | None, *, early: bool = False) -> ev.MemberConnected:
    return ev.MemberConnected(name, "1", Address("h", 1), world, 9, done=True, early=early)


def test_last_step_done_while_the_coordinator_was_down_ends_the_run() -> None:
    """The end was trained again from a checkpoint, or all of it, if there was none."""
    state, _ = after(world_of("a", "b"), ev.CoordinatorRestarted())
    state, _ = after(state, done_hello("a", state.world.number), ev.MemberLost("b", "its process ended: done"))
    assert state.finished


def test_done_member_stays_done_when_its_world_is_reported_entered_later() -> None:
    state = world_of("a", "b", settings=replace(SETTINGS, max_members=3))
    state, _ = after(state, hello("c"), ev.MemberReady("c", "x", None))
    last = state.proposal.number
    state, _ = after(state, ev.CoordinatorRestarted(), done_hello("a", last), ev.WorldEntered("b", last, 8))
    assert not state.finished
    state, _ = after(state, ev.MemberDone("b", 9), ev.MemberDone("c", 9))
    assert state.finished


def test_script_that_left_its_loop_while_the_coordinator_was_down_ends_the_run() -> None:
    state, _ = after(world_of("a", "b"), ev.CoordinatorRestarted())
    state, _ = after(state, done_hello("a", state.world.number, early=True), ev.MemberLost("b", "its process ended"))
    assert state.finished


def test_done_member_that_was_taken_for_lost_gets_no_seat() -> None:
    """It was waited for to hand its state over, and its main thread had left the loop."""
    state = world_of("a", "b")
    state, _ = after(state, ev.MemberLost("a", "lease expired"), ev.WorldBroken("b", state.world.number, 8, ("a",)))
    assert [seat.member for seat in state.world.seats] == ["b"]
    state, instructions = after(state, done_hello("a", None), ev.MemberReady("a", "x", 9))
    assert not of_kind(instructions, ev.ProposeWorld)
    state, _ = after(state, ev.MemberDone("b", 9))
    assert state.finished


def test_run_ends_if_all_done_members_were_taken_for_lost() -> None:
    state, _ = after(world_of("a", "b"), ev.MemberLost("a", "lease expired"), ev.MemberLost("b", "lease expired"))
    state, instructions = after(state, hello("c"), ev.MemberReady("c", "x", None))
    state, instructions = after(state, done_hello("a", None))
    assert state.finished
    assert ev.AnnounceFinished(("c",), 9) in instructions


def test_world_is_dropped_when_all_its_members_exited_early_and_left() -> None:
    """Joiners had no source for the state, although a waiting member held it."""
    state = world_of("a")
    state, _ = after(state, hello("b"), ev.MemberReady("b", "x", 3), ev.MemberDone("a", 5, early=True))
    state = replace(state, done_at=None, finished=False, world=world_of("a").world)
    state, instructions = after(state, ev.MemberLost("a", "lease expired"))
    [formed] = of_kind(instructions, ev.FormWorld)
    assert [seat.member for seat in formed.world.seats] == ["b"]


def test_member_that_missed_a_formed_world_is_told_again() -> None:
    """If it had no other member, both sides waited for ever."""
    state = world_of("a", "b")
    old = state.world.number
    state, _ = after(state, ev.MemberLost("b", "its process ended"), ev.WorldBroken("a", old, 5, ("b",)))
    assert state.world.number > old
    state, instructions = after(
        state, ev.CoordinatorRestarted(), ev.MemberConnected("a", "1", Address("h", 1), old, 5, broken=True)
    )
    [formed] = of_kind(instructions, ev.FormWorld)
    assert formed.world == state.world


def test_evicted_member_that_missed_its_eviction_is_evicted_again() -> None:
    """It waited for a world, and was waited for to become ready, for ever."""
    state, _ = after(world_of("a"), ev.MemberLost("a", "lease expired"))
    again = ev.MemberConnected("a", "1", Address("h", 1), 1, 5)
    state, instructions = after(state, again)
    assert of_kind(instructions, ev.EvictMember)
    _, instructions = after(state, ev.MemberDisconnected("a"), replace(again, broken=True))
    assert of_kind(instructions, ev.EvictMember)


def crossed_unheard() -> MembershipState:
    """A run whose member a has crossed into world 2 with b, which died there before anybody had told; c is let in."""
    state, _ = after(world_of("a"), hello("b"), ev.MemberReady("b", "x", None))
    assert state.proposal.number == 2
    state, _ = after(state, hello("c"), ev.MemberReady("c", "x", None), ev.MemberLost("b", "its process ended"))
    assert (state.world.number, state.proposal.number) == (1, 3)
    return state


def test_member_in_a_dropped_world_is_not_waited_for_in_its_previous_one() -> None:
    """Its line broke before it could tell; it and the run waited for each other for ever."""
    again = ev.MemberConnected("a", "1", Address("h", 1), 2, 6)
    state, instructions = after(crossed_unheard(), ev.MemberDisconnected("a"), again)
    assert state.world is None
    assert any("a" in i.to and i.number >= 2 for i in of_kind(instructions, ev.DissolveWorld))
    state, instructions = after(state, ev.WorldBroken("a", 2, 6))
    assert [i.world.step for i in of_kind(instructions, ev.FormWorld)] == [6]


def test_broken_exchange_in_a_dropped_world_means_the_previous_one_was_left() -> None:
    _, instructions = after(crossed_unheard(), ev.WorldBroken("a", 2, 6, ("b",)))
    assert [i.world.step for i in of_kind(instructions, ev.FormWorld)] == [6]


def test_joiner_of_a_dropped_world_breaks_none() -> None:
    state, _ = after(crossed_unheard(), ev.WorldBroken("c", 2, None))
    assert state.world is not None


def test_member_that_missed_the_end_is_told_again() -> None:
    """A spare waited for ever for a world, and the run for it."""
    state, _ = after(world_of("a"), hello("b"), ev.MemberReady("b", "x", None), ev.MemberDone("a", 9))
    _, instructions = after(state, ev.CoordinatorRestarted(), hello("b"))
    assert ev.AnnounceFinished(("b",), 9) in instructions


def test_member_that_missed_the_stop_is_told_again() -> None:
    state, _ = after(world_of("a"), ev.StopRequested("asked", checkpoint=True, exit_code=75))
    _, instructions = after(state, ev.CoordinatorRestarted(), replace(hello("a"), world=state.world.number, step=5))
    assert of_kind(instructions, ev.StopMembers) == [ev.StopMembers(("a",), "asked", True, 75)]


REPLACED = replace(SETTINGS, replaces_members=True)


def test_members_with_notice_train_until_a_replacement_joins() -> None:
    state, instructions = after(world_of("a", "b", settings=REPLACED), ev.NoticeReceived("a", 60.0, "spot"))
    assert [seat.member for seat in proposed(instructions).seats] == ["b"]
    state, instructions = after(state, ev.NoticeReceived("b", 60.0, "spot"))
    assert not [i for i in instructions if isinstance(i, ev.StopMembers | ev.DissolveWorld)]
    state, _ = after(state, ev.MemberLeft("a", 3, state.proposal.number))
    assert [seat.member for seat in state.world.seats] == ["b"]
    state, instructions = after(state, hello("c"), ev.MemberReady("c", "x", None))
    assert [seat.member for seat in proposed(instructions).seats] == ["b", "c"]
    state, instructions = after(state, ev.WorldEntered("c", state.proposal.number, 5))
    assert [seat.member for seat in proposed(instructions).seats] == ["c"], "who has handed over goes"


def test_run_of_one_member_has_two_during_a_replacement() -> None:
    only = replace(REPLACED, max_members=1)
    state, _ = after(world_of("a", settings=only), ev.NoticeReceived("a", 60.0, "spot"))
    state, instructions = after(state, hello("b"), ev.MemberReady("b", "x", None))
    assert [seat.member for seat in proposed(instructions).seats] == ["a", "b"]
    state, instructions = after(state, ev.WorldEntered("b", state.proposal.number, 5))
    assert [seat.member for seat in proposed(instructions).seats] == ["b"]


def test_member_that_can_stay_longest_sends_the_state() -> None:
    notices = (ev.NoticeReceived("a", 20.0, "spot"), ev.NoticeReceived("b", 60.0, "spot"))
    state, _ = after(replace(world_of("a", "b", settings=REPLACED), proposal=None), *notices)
    state, instructions = after(replace(state, proposal=None), hello("c"), ev.MemberReady("c", "x", None))
    assert [seat.member for seat in proposed(instructions).seats] == ["b", "c"]


def test_run_stops_with_a_checkpoint_in_time_if_no_replacement_joins() -> None:
    state, _ = after(world_of("a", settings=REPLACED), ev.NoticeReceived("a", 60.0, "spot"))
    heartbeats = {"a": LastHeartbeat(144.0)}
    assert ev.TimerFired("notice") not in due(state, heartbeats, 144.0)
    assert ev.TimerFired("notice") in due(state, heartbeats, 145.0)
    _, instructions = after(state, ev.TimerFired("notice"), now=145.0)
    assert [i.checkpoint for i in instructions if isinstance(i, ev.StopMembers)] == [True]


def test_second_notice_can_shorten_the_first() -> None:
    state, _ = after(
        world_of("a", settings=REPLACED), ev.NoticeReceived("a", 60.0, "SIGTERM"), ev.NoticeReceived("a", 8.0, "spot")
    )
    assert ev.TimerFired("notice") in due(state, {"a": LastHeartbeat(103.0)}, 103.0)


def proposed(instructions: list[ev.Instruction]) -> World:
    return next(i.world for i in instructions if isinstance(i, ev.ProposeWorld))


def test_notice_to_all_members_stops_the_run_with_a_checkpoint() -> None:
    _, instructions = after(world_of("a"), ev.NoticeReceived("a", 30.0, "spot"))
    [stop] = of_kind(instructions, ev.StopMembers)
    assert (stop.checkpoint, stop.exit_code) == (True, 75)


def test_joiner_is_prepared_beside_the_live_world_as_catching_up() -> None:
    state, instructions = after(world_of("a"), hello("b"), ev.MemberReady("b", "x", None))
    [proposed] = of_kind(instructions, ev.ProposeWorld)
    assert proposed.world.catching_up == (1,)
    assert proposed.world.sources == {1: 0}
    assert state.world is not None
    assert state.world.size == 1, "the live world goes on until its members cross over"


def test_members_beyond_the_maximum_are_spares_that_replace_lost_ones() -> None:
    state, instructions = after(world_of("a", "b"), hello("spare"), ev.MemberReady("spare", "x", None))
    assert not of_kind(instructions, ev.ProposeWorld)
    state, instructions = after(state, ev.NoticeReceived("b", 30.0, "spot"))
    [proposed] = of_kind(instructions, ev.ProposeWorld)
    assert [seat.member for seat in proposed.world.seats] == ["a", "spare"]


def test_survivors_form_the_next_world_at_the_newest_step() -> None:
    state = world_of("a", "b", "c")
    state, _ = after(state, ev.MemberLost("c", "killed"), ev.WorldBroken("a", 2, 8))
    state, instructions = after(state, ev.WorldBroken("b", 2, 7))
    [formed] = of_kind(instructions, ev.FormWorld)
    assert formed.world.step == 8
    assert [seat.member for seat in formed.world.seats] == ["a", "b"]
    assert formed.world.sources == {1: 0}, "b is one step behind and takes the state from a"


def test_suspect_that_is_disconnected_is_not_waited_for() -> None:
    state, _ = after(world_of("a", "b"), ev.MemberDisconnected("b"))
    number = state.world.number
    _, instructions = after(state, ev.WorldBroken("a", number, 5, suspects=("b",)))
    [formed] = of_kind(instructions, ev.FormWorld)
    assert [seat.member for seat in formed.world.seats] == ["a"]


def test_broken_world_waits_for_members_that_may_still_answer() -> None:
    state = world_of("a", "b", "c")
    _, instructions = after(state, ev.WorldBroken("a", state.world.number, 5, suspects=("b",)))
    assert not of_kind(instructions, ev.FormWorld)
    assert any("waiting for b, c to answer" in said.text for said in of_kind(instructions, ev.MembershipNote))


def test_started_run_without_state_restores_its_checkpoint() -> None:
    state, _ = after(world_of("a"), ev.MemberLost("a", "killed"), hello("new"))
    state, instructions = after(state, ev.MemberReady("new", "x", None))
    [restore] = of_kind(instructions, ev.RestoreCheckpoint)
    assert restore.member == "new"
    _, instructions = after(state, ev.MemberReady("new", "x", 40, restored=True))
    [formed] = of_kind(instructions, ev.FormWorld)
    assert formed.world.step == 40


def test_restored_checkpoint_becomes_the_newest_known() -> None:
    """Newer ones were damaged, or are gone: they are no longer shown, nor preferred to what is written from now on."""
    written = [ev.CheckpointWritten("a", step, f"c/{step}") for step in (40, 50)]
    state, _ = after(world_of("a"), *written, ev.MemberLost("a", "killed"), hello("b"), ev.MemberReady("b", "x", None))
    for step in (50, 40, None):
        restored, _ = after(state, ev.MemberReady("b", "x", step, restored=True))
        assert restored.checkpoint_step == step
        assert restored.checkpoint_path == ("c/50" if step == 50 else "")
    state, _ = after(state, ev.MemberReady("b", "x", 40, restored=True), ev.CheckpointWritten("b", 45, "c/45"))
    assert (state.checkpoint_step, state.checkpoint_path) == (45, "c/45")


def test_silence_beyond_the_lease_is_a_loss_and_a_slow_poll_is_not() -> None:
    state = world_of("a", "b")
    heartbeats = {"a": LastHeartbeat(109.9), "b": LastHeartbeat(105.0)}
    lost = [event for event in due(state, heartbeats, 110.0) if isinstance(event, ev.MemberLost)]
    assert [event.member for event in lost] == ["b"]
    assert "lease expired after 5.0 s of silence" in lost[0].reason


def lost(state, heartbeats, now: float, hearing: CoordinatorReachability) -> list[str]:
    return [event.member for event in due(state, heartbeats, now, hearing) if isinstance(event, ev.MemberLost)]


def test_silence_of_all_members_is_the_coordinators_own() -> None:
    state, hearing = world_of("a", "b"), CoordinatorReachability(104.9, silence_limit_s=2.0)
    heartbeats = {"a": LastHeartbeat(104.9), "b": LastHeartbeat(104.5)}
    assert lost(state, heartbeats, 106.0, hearing) == []
    assert lost(state, heartbeats, 107.6, hearing) == [], "cut off for longer than a lease"
    for at in (114.0, 115.0, 116.0, 117.0, 118.0):
        hearing, heartbeats["a"] = hearing.received(at), LastHeartbeat(at)
        assert lost(state, heartbeats, at, hearing) == [], "the others are on their way"
    assert lost(state, heartbeats, 118.1, hearing) == ["b"], "it was lost meanwhile"


def test_silent_member_is_lost_if_another_is_heard() -> None:
    state, hearing = world_of("a", "b"), CoordinatorReachability(100.0, silence_limit_s=silence_limit_s(0.75, 3.0))
    for heartbeat in range(1, 5):
        at = 100.0 + 0.75 * heartbeat
        hearing = hearing.received(at)
        assert lost(state, {"a": LastHeartbeat(at), "b": LastHeartbeat(100.0)}, at, hearing) == []
    assert lost(state, {"a": LastHeartbeat(at), "b": LastHeartbeat(100.0)}, 103.1, hearing) == ["b"]


def test_disconnected_member_is_not_excused_by_silence() -> None:
    state, hearing = world_of("a", "b"), CoordinatorReachability(104.0, silence_limit_s=2.0)
    state, _ = after(state, ev.MemberDisconnected("b"), now=104.0)
    assert lost(state, {"a": LastHeartbeat(104.0), "b": LastHeartbeat(104.0)}, 107.1, hearing) == ["b"]


def test_all_members_are_lost_after_a_long_silence() -> None:
    state, hearing = world_of("a", "b"), CoordinatorReachability(104.0, silence_limit_s=2.0)
    heartbeats = {"a": LastHeartbeat(104.0), "b": LastHeartbeat(104.0)}
    assert lost(state, heartbeats, 118.9, hearing) == []
    assert lost(state, heartbeats, 119.1, hearing) == ["a", "b"]


def test_rare_heartbeats_are_not_taken_for_silence_of_all() -> None:
    state, hearing = (
        world_of("a", "b"),
        CoordinatorReachability(104.0, silence_limit_s=silence_limit_s(2.0, 3.0)).received(106.0),
    )
    assert lost(state, {"a": LastHeartbeat(106.0), "b": LastHeartbeat(103.0)}, 106.1, hearing) == ["b"]


def test_restarted_coordinator_renews_every_lease() -> None:
    state, _ = after(world_of("a", "b"), ev.CoordinatorRestarted(), now=500.0)
    assert not due(state, {}, 502.9)
    assert len(due(state, {}, 503.1)) == 2


def test_many_members_have_longer_to_reconnect() -> None:
    state, _ = after(world_of(*(f"m{number}" for number in range(100))), ev.CoordinatorRestarted(), now=500.0)
    assert not due(state, {}, 503.9)
    assert len(due(state, {}, 504.1)) == 100


def test_only_a_few_of_very_many_members_are_named() -> None:
    state = world_of(*(f"m{number}" for number in range(100)))
    _, instructions = after(state, ev.MemberLost("m0", "killed"))
    assert [said.text for said in of_kind(instructions, ev.MembershipNote)][-1] == (
        "waiting for m1, m2, m3, m4, m5, m6, m7, m8 and 91 others to answer"
    )


def test_hung_member_is_detected_by_members_that_wait_for_it() -> None:
    state = world_of("a", "b", settings=replace(SETTINGS, hang_timeout_s=60.0))
    heartbeats = {
        "a": LastHeartbeat(1000.0, phase="exchange", phase_age_s=61.0, usual_step_s=0.2),
        "b": LastHeartbeat(1000.0, phase="compute", phase_age_s=62.0, usual_step_s=0.2),
    }
    [event] = due(state, heartbeats, 1000.5)
    assert isinstance(event, ev.MemberLost)
    assert (event.member, event.hung) == ("b", True)
    slow = {name: replace(heartbeat, usual_step_s=10.0) for name, heartbeat in heartbeats.items()}
    assert not due(state, slow, 1000.5), "a step that usually takes 10 s is given longer"


def test_too_few_members_wait_with_a_reason() -> None:
    settings = MembershipSettings(min_members=3, max_members=4, regroup_s=0.0)
    state, _ = after(MembershipState(settings), hello("a"), ev.MemberReady("a", "x", None))
    assert state.reason == "1 of at least 3 members is present"


def test_claim_of_a_lost_member_passes_to_the_next() -> None:
    state, instructions = after(world_of("a", "b"), ev.ClaimRequested("a", "model.pt"))
    assert of_kind(instructions, ev.GrantClaim) == [ev.GrantClaim("a", "model.pt")]
    state, instructions = after(state, ev.ClaimRequested("b", "model.pt"))
    assert not of_kind(instructions, ev.GrantClaim)
    state, instructions = after(state, ev.MemberLost("a", "killed"))
    assert ev.GrantClaim("b", "model.pt") in instructions
    _, instructions = after(state, ev.ClaimCompleted("b", "model.pt"), ev.ClaimRequested("c", "model.pt"))
    assert of_kind(instructions, ev.AnnounceClaimCompleted) == [ev.AnnounceClaimCompleted(("c",), "model.pt")]


def test_claims_completed_long_ago_are_forgotten() -> None:
    state, _ = after(world_of("a", "b"), ev.ClaimRequested("a", "model.pt at step 0"))
    for step in range(1, KEPT_CLAIMS + 9):
        name = f"model.pt at step {step}"
        state, _ = after(state, ev.ClaimRequested("a", name), ev.ClaimCompleted("a", name))
    assert len(state.claims) == KEPT_CLAIMS + 1, "the one that is not completed is kept"
    _, instructions = after(state, ev.ClaimRequested("b", name))
    assert of_kind(instructions, ev.AnnounceClaimCompleted) == [ev.AnnounceClaimCompleted(("b",), name)]


def test_claim_of_a_member_that_falls_silent_after_the_end_passes_on() -> None:
    state, _ = after(world_of("a", "b"), ev.MemberDone("a", 9), ev.MemberDone("b", 9))
    assert state.finished
    state, _ = after(state, ev.ClaimRequested("a", "model.pt"), ev.ClaimRequested("b", "model.pt"))
    heartbeats = {"b": LastHeartbeat(200.0)}
    [lost] = due(state, heartbeats, 200.0)
    assert isinstance(lost, ev.MemberLost)
    state, instructions = after(state, lost, now=200.0)
    assert ev.GrantClaim("b", "model.pt") in instructions
    assert due(state, {}, 300.0) == (), "no claim is waited for"


def test_unreachable_member_is_quarantined() -> None:
    state = world_of("a", "b", "c")
    for _ in range(2):
        number = state.world.number
        state, _ = after(state, ev.WorldBroken("a", number, 0, suspects=("c",)))
        state, _ = after(state, ev.WorldBroken("b", number, 0), ev.WorldBroken("c", number, 0))
    assert [seat.member for seat in state.world.seats] == ["a", "b"]
    assert state.members["c"].quarantined_until > 100.0


def test_proposal_is_repeated_until_it_is_entered() -> None:
    state = world_of("a")
    state, instructions = after(state, hello("b"), ev.MemberReady("b", "x", None))
    proposal = next(i for i in instructions if isinstance(i, ev.ProposeWorld))
    heartbeats = {name: LastHeartbeat(110.0) for name in ("a", "b")}
    assert ev.TimerFired("proposal") not in due(state, heartbeats, 101.0)
    assert ev.TimerFired("proposal") in due(state, heartbeats, 110.0)
    state, instructions = after(state, ev.TimerFired("proposal"), now=110.0)
    assert [(i.world, set(i.to)) for i in instructions] == [(proposal.world, {"a", "b"})]
    assert ev.TimerFired("proposal") not in due(state, heartbeats, 110.1)
    state, _ = after(state, ev.WorldEntered("a", proposal.world.number, 3), now=120.0)
    assert ev.TimerFired("proposal") not in due(state, heartbeats, 130.0)


def test_member_that_missed_its_eviction_is_evicted_again() -> None:
    state, _ = after(world_of("a", "b"), ev.MemberLost("b", "lease expired"))
    again = replace(hello("b"), world=1, step=4)
    state, instructions = after(state, again)
    assert any(isinstance(i, ev.EvictMember) for i in instructions)
    state, instructions = after(state, ev.CoordinatorRestarted(), again)
    assert any(isinstance(i, ev.EvictMember) for i in instructions)


def test_member_that_never_built_its_model_cannot_disturb_the_training_of_others() -> None:
    state, _ = after(world_of("a"), hello("b"))
    for event in (
        ev.MemberDone("b", 1 << 50, early=True),
        ev.MemberDone("b", 1 << 50),
        ev.CheckpointWritten("b", 1 << 50, "/nowhere"),
        ev.AdjustmentReported("b", 1 << 50, "batch", {"batch": 1}, "because"),
        ev.WorldEntered("b", 1 << 50, 1),
        ev.WorldBroken("b", 1 << 50, 1, ("a",)),
        ev.WorldPrepareFailed("b", 1 << 50, ("a",), "because"),
    ):
        assert after(state, event)[0] == state
