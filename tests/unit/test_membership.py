"""Single promises of membership; their combinations are tested in tests/property/test_membership_machine.py."""

from __future__ import annotations

from dataclasses import replace

from shoal.core.membership import events as ev
from shoal.core.membership.decide import KEPT_CLAIMS, LastHeartbeat, MembershipSettings, MembershipState, decide, due
from shoal.core.membership.leases import CoordinatorReachability, silence_limit_s
from shoal.core.world import Address, World

RULES = MembershipSettings(min_members=1, max_members=2, regroup_s=0.5)


def after(
    state: MembershipState, *events: ev.Event, now: float = 100.0
) -> tuple[MembershipState, list[ev.Instruction]]:
    asked: list[ev.Instruction] = []
    for event in events:
        state, more = decide(state, event, now)
        asked = list(more)
    return state, asked


def hello(name: str) -> ev.MemberConnected:
    return ev.MemberConnected(name, "1", Address("h", 1))


def test_a_member_with_another_model_is_refused_and_not_counted_as_lost() -> None:
    state = world_of("a")
    state, asked = after(state, hello("b"), ev.MemberReady("b", "y", None))
    assert [type(i) for i in asked if isinstance(i, ev.RejectMember)] == [ev.RejectMember]
    assert state.losses == 0
    assert list(state.members) == ["a"]


def test_before_the_first_step_the_model_that_most_members_have_is_the_runs() -> None:
    rules = MembershipSettings(min_members=2, max_members=3)
    state = MembershipState(rules)
    for name, model in (("odd", "y"), ("a", "x"), ("b", "x")):
        state, asked = after(state, hello(name), ev.MemberReady(name, model, None))
    assert [i.member for i in asked if isinstance(i, ev.RejectMember)] == ["odd"]
    state, _ = after(state, ev.TimerFired("regroup"), now=101.0)
    assert [seat.member for seat in state.world.seats] == ["a", "b"]


def test_a_member_that_comes_when_all_is_done_is_told_so() -> None:
    state = replace(MembershipState(RULES), finished=True, step=9)
    _, asked = after(state, hello("late"))
    assert ev.AnnounceFinished(("late",), 9) in asked


def test_a_gathering_that_led_nowhere_does_not_fire_for_ever() -> None:
    state, _ = after(MembershipState(RULES), hello("a"), ev.MemberReady("a", "x", None))
    state, _ = after(state, ev.MemberDisconnected("a"))
    fired = due(state, {}, 100.6)
    assert ev.TimerFired("regroup") in fired
    state, _ = after(state, ev.TimerFired("regroup"), now=100.6)
    assert ev.TimerFired("regroup") not in due(state, {}, 100.7)


def world_of(*names: str, rules: MembershipSettings = RULES) -> MembershipState:
    """A run whose world has these members, all at step 0."""
    rules = replace(rules, max_members=max(len(names), rules.max_members), regroup_s=0.0)
    state = MembershipState(rules)
    for name in names:
        state, _ = after(state, hello(name), ev.MemberReady(name, "x", None))
    state, _ = after(state, ev.TimerFired("regroup"))
    while state.world is None or state.world.size < len(names):
        assert state.proposal is not None
        state, _ = after(state, ev.WorldEntered(state.proposal.seats[0].member, state.proposal.number, 0))
    return state


def told(asked: list[ev.Instruction], kind: type) -> list[ev.Instruction]:
    return [instruction for instruction in asked if isinstance(instruction, kind)]


def test_a_notice_proposes_a_world_without_the_leaver_and_breaks_none() -> None:
    _, asked = after(world_of("a", "b"), ev.NoticeReceived("b", 120.0, "spot"))
    [proposed] = told(asked, ev.ProposeWorld)
    assert [seat.member for seat in proposed.world.seats] == ["a"]
    assert "b leaves (spot)" in proposed.reason
    assert set(proposed.to) == {"a", "b"}
    assert not told(asked, ev.DissolveWorld)


def test_a_leaver_that_goes_before_anybody_else_has_reported_breaks_no_world() -> None:
    state, _ = after(world_of("a", "b"), ev.NoticeReceived("b", 120.0, "spot"))
    state, asked = after(state, ev.MemberLeft("b", 7, state.proposal.number))
    assert not told(asked, ev.DissolveWorld)
    assert state.world is not None
    assert [seat.member for seat in state.world.seats] == ["a"]
    assert state.losses == 0


def test_a_proposal_is_not_replaced_while_its_members_may_be_crossing() -> None:
    state, _ = after(world_of("a", "b"), ev.NoticeReceived("b", 120.0, "spot"))
    first = state.proposal
    state, asked = after(state, hello("c"), ev.MemberReady("c", "x", None))
    assert state.proposal == first
    state, asked = after(state, ev.WorldEntered("a", first.number, 7))
    assert not told(asked, ev.DissolveWorld)
    [proposed] = told(asked, ev.ProposeWorld)
    assert [seat.member for seat in proposed.world.seats] == ["a", "c"], "c is let in after the world that is live now"


def test_who_is_lost_in_the_last_step_is_not_waited_for_and_nothing_is_trained_again() -> None:
    state, asked = after(world_of("a", "b"), ev.MemberDone("a", 9))
    assert not state.finished, "b is still in the last step"
    state, asked = after(state, ev.MemberLost("b", "its process ended"))
    assert state.finished
    _, asked = after(state, ev.MemberConnected("b", "2", Address("h", 1)))
    assert ev.AnnounceFinished(("b",), 9) in asked


def test_who_was_in_the_last_step_and_holds_its_state_does_it_again() -> None:
    state = world_of("a", "b")
    state, asked = after(state, ev.WorldBroken("b", state.world.number, 8, ("a",)), ev.MemberDone("a", 9))
    assert not state.finished
    [formed] = told(asked, ev.FormWorld)
    assert [seat.member for seat in formed.world.seats] == ["b"]
    state, _ = after(state, ev.MemberDone("b", 9))
    assert state.finished


def test_the_end_does_not_wait_for_one_that_has_to_go_and_did_not_get_so_far() -> None:
    """It used to be waited for; when whoever was done had gone, newcomers were to get the state from nobody."""
    state, _ = after(world_of("a", "b", "c"), ev.NoticeReceived("b", 30.0, "spot"))
    number = state.world.number
    state, _ = after(state, ev.WorldBroken("b", number, 5, ("a",)), ev.MemberLost("a", "its process ended"))
    state, asked = after(state, ev.WorldBroken("c", number, 5, ("a",)))
    [formed] = told(asked, ev.FormWorld)
    assert [seat.member for seat in formed.world.seats] == ["c"]
    state, asked = after(state, ev.MemberDone("c", 9))
    assert state.finished
    assert ev.AnnounceFinished(("b",), 9) in asked


def test_one_that_has_to_go_is_not_kept_for_the_rest_of_the_last_step() -> None:
    state, _ = after(world_of("a", "b"), ev.NoticeReceived("b", 30.0, "spot"))
    state, _ = after(state, ev.WorldBroken("b", state.world.number, 8, ("a",)), ev.MemberDone("a", 9))
    assert state.finished
    assert state.stopping is None


def test_the_rest_of_the_last_step_is_done_by_however_few_are_left() -> None:
    state = world_of("a", "b", "c", rules=replace(RULES, min_members=2))
    number = state.world.number
    state, _ = after(state, ev.WorldBroken("b", number, 8, ("a",)), ev.MemberDone("a", 9))
    state, asked = after(state, ev.MemberLost("c", "its process ended"))
    [formed] = told(asked, ev.FormWorld)
    assert [seat.member for seat in formed.world.seats] == ["b"]


def test_others_go_on_without_one_whose_script_left_the_loop_even_if_they_are_lost_and_started_again() -> None:
    state = world_of("a", "b")
    state, _ = after(state, ev.MemberDone("a", 5, early=True), ev.MemberLost("b", "its process ended"))
    assert not state.finished
    state, asked = after(state, ev.MemberConnected("b", "2", Address("h", 1)), ev.MemberReady("b", "x", None))
    assert [i.member for i in told(asked, ev.RestoreCheckpoint)] == ["b"]


def test_the_last_one_whose_script_leaves_the_loop_ends_the_run() -> None:
    state, _ = after(world_of("a", "b"), ev.MemberDone("a", 5, early=True), ev.MemberDone("b", 5, early=True))
    assert state.finished


def done_hello(name: str, world: int | None, *, early: bool = False) -> ev.MemberConnected:
    return ev.MemberConnected(name, "1", Address("h", 1), world, 9, done=True, early=early)


def test_who_did_the_last_step_while_the_coordinator_was_away_ends_the_run_whatever_becomes_of_the_others() -> None:
    """The end was trained again from a checkpoint, or all of it, if there was none."""
    state, _ = after(world_of("a", "b"), ev.CoordinatorRestarted())
    state, _ = after(state, done_hello("a", state.world.number), ev.MemberLost("b", "its process ended: done"))
    assert state.finished


def test_who_is_done_stays_so_if_it_is_heard_later_that_others_crossed_into_its_last_world() -> None:
    state = world_of("a", "b", rules=replace(RULES, max_members=3))
    state, _ = after(state, hello("c"), ev.MemberReady("c", "x", None))
    last = state.proposal.number
    state, _ = after(state, ev.CoordinatorRestarted(), done_hello("a", last), ev.WorldEntered("b", last, 8))
    assert not state.finished
    state, _ = after(state, ev.MemberDone("b", 9), ev.MemberDone("c", 9))
    assert state.finished


def test_others_go_on_without_one_whose_script_left_the_loop_while_the_coordinator_was_away() -> None:
    state, _ = after(world_of("a", "b"), ev.CoordinatorRestarted())
    state, _ = after(state, done_hello("a", state.world.number, early=True), ev.MemberLost("b", "its process ended"))
    assert not state.finished


def test_who_is_done_and_was_taken_for_lost_is_in_no_world_any_more() -> None:
    """It was waited for to hand its state over, and its main thread had left the loop."""
    state = world_of("a", "b")
    state, _ = after(state, ev.MemberLost("a", "lease expired"), ev.WorldBroken("b", state.world.number, 8, ("a",)))
    assert [seat.member for seat in state.world.seats] == ["b"]
    state, asked = after(state, done_hello("a", None), ev.MemberReady("a", "x", 9))
    assert not told(asked, ev.ProposeWorld)
    state, _ = after(state, ev.MemberDone("b", 9))
    assert state.finished


def test_if_all_are_done_and_were_taken_for_lost_the_run_ends() -> None:
    state, _ = after(world_of("a", "b"), ev.MemberLost("a", "lease expired"), ev.MemberLost("b", "lease expired"))
    state, asked = after(state, hello("c"), ev.MemberReady("c", "x", None))
    state, asked = after(state, done_hello("a", None))
    assert state.finished
    assert ev.AnnounceFinished(("c",), 9) in asked


def test_a_world_whose_members_have_all_left_the_loop_and_are_gone_is_none() -> None:
    """Newcomers were to get the state from nobody, while one that waited outside had it."""
    state = world_of("a")
    state, _ = after(state, hello("b"), ev.MemberReady("b", "x", 3), ev.MemberDone("a", 5, early=True))
    state = replace(state, done_at=None, finished=False, world=world_of("a").world)
    state, asked = after(state, ev.MemberLost("a", "lease expired"))
    [formed] = told(asked, ev.FormWorld)
    assert [seat.member for seat in formed.world.seats] == ["b"]


def test_who_missed_the_world_that_was_formed_when_its_last_one_broke_is_told_again() -> None:
    """If nobody else was in it, both waited for ever."""
    state = world_of("a", "b")
    old = state.world.number
    state, _ = after(state, ev.MemberLost("b", "its process ended"), ev.WorldBroken("a", old, 5, ("b",)))
    assert state.world.number > old
    state, asked = after(
        state, ev.CoordinatorRestarted(), ev.MemberConnected("a", "1", Address("h", 1), old, 5, broken=True)
    )
    [formed] = told(asked, ev.FormWorld)
    assert formed.world == state.world


def test_who_was_lost_and_did_not_hear_that_it_must_come_anew_is_told_again() -> None:
    """It waited for a world, and was waited for to become ready, for ever."""
    state, _ = after(world_of("a"), ev.MemberLost("a", "lease expired"))
    again = ev.MemberConnected("a", "1", Address("h", 1), 1, 5)
    state, asked = after(state, again)
    assert told(asked, ev.EvictMember)
    _, asked = after(state, ev.MemberDisconnected("a"), replace(again, broken=True))
    assert told(asked, ev.EvictMember)


def crossed_unheard() -> MembershipState:
    """A run whose member a has crossed into world 2 with b, which died there before anybody had told; c is let in."""
    state, _ = after(world_of("a"), hello("b"), ev.MemberReady("b", "x", None))
    assert state.proposal.number == 2
    state, _ = after(state, hello("c"), ev.MemberReady("c", "x", None), ev.MemberLost("b", "its process ended"))
    assert (state.world.number, state.proposal.number) == (1, 3)
    return state


def test_who_crossed_into_a_world_that_was_given_up_is_not_waited_for_in_the_one_that_it_left() -> None:
    """Its line broke before it could tell; it and the run waited for each other for ever."""
    again = ev.MemberConnected("a", "1", Address("h", 1), 2, 6)
    state, asked = after(crossed_unheard(), ev.MemberDisconnected("a"), again)
    assert state.world is None
    assert any("a" in i.to and i.number >= 2 for i in told(asked, ev.DissolveWorld))
    state, asked = after(state, ev.WorldBroken("a", 2, 6))
    assert [i.world.step for i in told(asked, ev.FormWorld)] == [6]


def test_who_lost_touch_in_a_world_that_was_given_up_has_left_the_one_before() -> None:
    _, asked = after(crossed_unheard(), ev.WorldBroken("a", 2, 6, ("b",)))
    assert [i.world.step for i in told(asked, ev.FormWorld)] == [6]


def test_who_was_about_to_join_a_world_that_was_given_up_breaks_none() -> None:
    state, _ = after(crossed_unheard(), ev.WorldBroken("c", 2, None))
    assert state.world is not None


def test_who_missed_that_all_is_done_is_told_again() -> None:
    """A spare waited for ever for a world, and the run for it."""
    state, _ = after(world_of("a"), hello("b"), ev.MemberReady("b", "x", None), ev.MemberDone("a", 9))
    _, asked = after(state, ev.CoordinatorRestarted(), hello("b"))
    assert ev.AnnounceFinished(("b",), 9) in asked


def test_who_missed_that_the_run_stops_is_told_again() -> None:
    state, _ = after(world_of("a"), ev.StopRequested("asked", checkpoint=True, exit_code=75))
    _, asked = after(state, ev.CoordinatorRestarted(), replace(hello("a"), world=state.world.number, step=5))
    assert told(asked, ev.StopMembers) == [ev.StopMembers(("a",), "asked", True, 75)]


HIRED = replace(RULES, replaces_members=True)


def test_where_others_are_hired_those_who_were_all_told_to_go_train_on_until_one_takes_over() -> None:
    state, asked = after(world_of("a", "b", rules=HIRED), ev.NoticeReceived("a", 60.0, "spot"))
    assert [seat.member for seat in proposed(asked).seats] == ["b"]
    state, asked = after(state, ev.NoticeReceived("b", 60.0, "spot"))
    assert not [i for i in asked if isinstance(i, ev.StopMembers | ev.DissolveWorld)]
    state, _ = after(state, ev.MemberLeft("a", 3, state.proposal.number))
    assert [seat.member for seat in state.world.seats] == ["b"]
    state, asked = after(state, hello("c"), ev.MemberReady("c", "x", None))
    assert [seat.member for seat in proposed(asked).seats] == ["b", "c"]
    state, asked = after(state, ev.WorldEntered("c", state.proposal.number, 5))
    assert [seat.member for seat in proposed(asked).seats] == ["c"], "who has handed over goes"


def test_a_run_of_one_member_is_handed_over_by_two() -> None:
    only = replace(HIRED, max_members=1)
    state, _ = after(world_of("a", rules=only), ev.NoticeReceived("a", 60.0, "spot"))
    state, asked = after(state, hello("b"), ev.MemberReady("b", "x", None))
    assert [seat.member for seat in proposed(asked).seats] == ["a", "b"]
    state, asked = after(state, ev.WorldEntered("b", state.proposal.number, 5))
    assert [seat.member for seat in proposed(asked).seats] == ["b"]


def test_whoever_can_stay_longest_hands_over() -> None:
    notices = (ev.NoticeReceived("a", 20.0, "spot"), ev.NoticeReceived("b", 60.0, "spot"))
    state, _ = after(replace(world_of("a", "b", rules=HIRED), proposal=None), *notices)
    state, asked = after(replace(state, proposal=None), hello("c"), ev.MemberReady("c", "x", None))
    assert [seat.member for seat in proposed(asked).seats] == ["b", "c"]


def test_if_nobody_comes_to_take_over_there_is_a_checkpoint_while_there_is_time() -> None:
    state, _ = after(world_of("a", rules=HIRED), ev.NoticeReceived("a", 60.0, "spot"))
    beats = {"a": LastHeartbeat(144.0)}
    assert ev.TimerFired("notice") not in due(state, beats, 144.0)
    assert ev.TimerFired("notice") in due(state, beats, 145.0)
    _, asked = after(state, ev.TimerFired("notice"), now=145.0)
    assert [i.checkpoint for i in asked if isinstance(i, ev.StopMembers)] == [True]


def test_a_machine_that_goes_sooner_than_its_member_knew_is_believed() -> None:
    state, _ = after(
        world_of("a", rules=HIRED), ev.NoticeReceived("a", 60.0, "SIGTERM"), ev.NoticeReceived("a", 8.0, "spot")
    )
    assert ev.TimerFired("notice") in due(state, {"a": LastHeartbeat(103.0)}, 103.0)


def proposed(asked: list[ev.Instruction]) -> World:
    return next(i.world for i in asked if isinstance(i, ev.ProposeWorld))


def test_notice_to_everybody_stops_the_run_with_a_checkpoint() -> None:
    _, asked = after(world_of("a"), ev.NoticeReceived("a", 30.0, "spot"))
    [stop] = told(asked, ev.StopMembers)
    assert (stop.checkpoint, stop.exit_code) == (True, 75)


def test_a_joiner_is_prepared_beside_the_live_world_as_a_ghost() -> None:
    state, asked = after(world_of("a"), hello("b"), ev.MemberReady("b", "x", None))
    [proposed] = told(asked, ev.ProposeWorld)
    assert proposed.world.catching_up == (1,)
    assert proposed.world.sources == {1: 0}
    assert state.world is not None
    assert state.world.size == 1, "the live world goes on until its members cross over"


def test_more_members_than_wanted_are_kept_as_spares_and_step_in() -> None:
    state, asked = after(world_of("a", "b"), hello("spare"), ev.MemberReady("spare", "x", None))
    assert not told(asked, ev.ProposeWorld)
    state, asked = after(state, ev.NoticeReceived("b", 30.0, "spot"))
    [proposed] = told(asked, ev.ProposeWorld)
    assert [seat.member for seat in proposed.world.seats] == ["a", "spare"]


def test_survivors_who_answer_form_the_next_world_at_the_furthest_step() -> None:
    state = world_of("a", "b", "c")
    state, _ = after(state, ev.MemberLost("c", "killed"), ev.WorldBroken("a", 2, 8))
    state, asked = after(state, ev.WorldBroken("b", 2, 7))
    [formed] = told(asked, ev.FormWorld)
    assert formed.world.step == 8
    assert [seat.member for seat in formed.world.seats] == ["a", "b"]
    assert formed.world.sources == {1: 0}, "b is one step behind and takes the state from a"


def test_a_suspect_that_is_also_disconnected_is_not_waited_for() -> None:
    state, _ = after(world_of("a", "b"), ev.MemberDisconnected("b"))
    number = state.world.number
    _, asked = after(state, ev.WorldBroken("a", number, 5, suspects=("b",)))
    [formed] = told(asked, ev.FormWorld)
    assert [seat.member for seat in formed.world.seats] == ["a"]


def test_a_broken_world_waits_for_those_who_may_still_answer() -> None:
    state = world_of("a", "b", "c")
    _, asked = after(state, ev.WorldBroken("a", state.world.number, 5, suspects=("b",)))
    assert not told(asked, ev.FormWorld)
    assert any("waiting for b, c to answer" in said.text for said in told(asked, ev.MembershipNote))


def test_a_run_that_has_started_never_starts_afresh_but_asks_for_its_checkpoint() -> None:
    state, _ = after(world_of("a"), ev.MemberLost("a", "killed"), hello("new"))
    state, asked = after(state, ev.MemberReady("new", "x", None))
    [restore] = told(asked, ev.RestoreCheckpoint)
    assert restore.member == "new"
    _, asked = after(state, ev.MemberReady("new", "x", 40, restored=True))
    [formed] = told(asked, ev.FormWorld)
    assert formed.world.step == 40


def test_what_could_be_restored_is_the_newest_checkpoint_there_is() -> None:
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
    beats = {"a": LastHeartbeat(109.9), "b": LastHeartbeat(105.0)}
    lost = [event for event in due(state, beats, 110.0) if isinstance(event, ev.MemberLost)]
    assert [event.member for event in lost] == ["b"]
    assert "lease expired after 5.0 s of silence" in lost[0].reason


def lost(state, beats, now: float, hearing: CoordinatorReachability) -> list[str]:
    return [event.member for event in due(state, beats, now, hearing) if isinstance(event, ev.MemberLost)]


def test_the_silence_of_all_is_the_coordinators_own_and_who_comes_back_has_a_fresh_lease() -> None:
    state, hearing = world_of("a", "b"), CoordinatorReachability(104.9, silence_limit_s=2.0)
    beats = {"a": LastHeartbeat(104.9), "b": LastHeartbeat(104.5)}
    assert lost(state, beats, 106.0, hearing) == []
    assert lost(state, beats, 107.6, hearing) == [], "cut off for longer than a lease"
    for at in (114.0, 115.0, 116.0, 117.0, 118.0):
        hearing, beats["a"] = hearing.received(at), LastHeartbeat(at)
        assert lost(state, beats, at, hearing) == [], "the others are on their way"
    assert lost(state, beats, 118.1, hearing) == ["b"], "it was lost meanwhile"


def test_somebody_who_is_heard_shows_that_a_silent_one_is_lost_when_its_lease_is_over() -> None:
    state, hearing = world_of("a", "b"), CoordinatorReachability(100.0, silence_limit_s=silence_limit_s(0.75, 3.0))
    for beat in range(1, 5):
        at = 100.0 + 0.75 * beat
        hearing = hearing.received(at)
        assert lost(state, {"a": LastHeartbeat(at), "b": LastHeartbeat(100.0)}, at, hearing) == []
    assert lost(state, {"a": LastHeartbeat(at), "b": LastHeartbeat(100.0)}, 103.1, hearing) == ["b"]


def test_who_hung_up_is_not_taken_for_cut_off() -> None:
    state, hearing = world_of("a", "b"), CoordinatorReachability(104.0, silence_limit_s=2.0)
    state, _ = after(state, ev.MemberDisconnected("b"), now=104.0)
    assert lost(state, {"a": LastHeartbeat(104.0), "b": LastHeartbeat(104.0)}, 107.1, hearing) == ["b"]


def test_all_are_lost_if_nobody_is_heard_for_long() -> None:
    state, hearing = world_of("a", "b"), CoordinatorReachability(104.0, silence_limit_s=2.0)
    beats = {"a": LastHeartbeat(104.0), "b": LastHeartbeat(104.0)}
    assert lost(state, beats, 118.9, hearing) == []
    assert lost(state, beats, 119.1, hearing) == ["a", "b"]


def test_beats_that_are_rare_are_no_silence_of_all() -> None:
    state, hearing = (
        world_of("a", "b"),
        CoordinatorReachability(104.0, silence_limit_s=silence_limit_s(2.0, 3.0)).received(106.0),
    )
    assert lost(state, {"a": LastHeartbeat(106.0), "b": LastHeartbeat(103.0)}, 106.1, hearing) == ["b"]


def test_a_restarted_coordinator_grants_every_lease_anew() -> None:
    state, _ = after(world_of("a", "b"), ev.CoordinatorRestarted(), now=500.0)
    assert not due(state, {}, 502.9)
    assert len(due(state, {}, 503.1)) == 2


def test_many_have_longer_to_find_a_restarted_coordinator_again() -> None:
    state, _ = after(world_of(*(f"m{number}" for number in range(100))), ev.CoordinatorRestarted(), now=500.0)
    assert not due(state, {}, 503.9)
    assert len(due(state, {}, 504.1)) == 100


def test_of_very_many_only_a_few_are_named() -> None:
    state = world_of(*(f"m{number}" for number in range(100)))
    _, asked = after(state, ev.MemberLost("m0", "killed"))
    assert [said.text for said in told(asked, ev.MembershipNote)][-1] == (
        "waiting for m1, m2, m3, m4, m5, m6, m7, m8 and 91 others to answer"
    )


def test_a_member_stuck_in_its_own_code_is_found_by_those_who_wait_for_it() -> None:
    state = world_of("a", "b", rules=replace(RULES, hang_timeout_s=60.0))
    beats = {
        "a": LastHeartbeat(1000.0, phase="exchange", phase_age_s=61.0, usual_step_s=0.2),
        "b": LastHeartbeat(1000.0, phase="compute", phase_age_s=62.0, usual_step_s=0.2),
    }
    [event] = due(state, beats, 1000.5)
    assert isinstance(event, ev.MemberLost)
    assert (event.member, event.hung) == ("b", True)
    slow = {name: replace(beat, usual_step_s=10.0) for name, beat in beats.items()}
    assert not due(state, slow, 1000.5), "a step that usually takes 10 s is given longer"


def test_too_few_members_wait_and_say_how_many_are_missing() -> None:
    rules = MembershipSettings(min_members=3, max_members=4, regroup_s=0.0)
    state, _ = after(MembershipState(rules), hello("a"), ev.MemberReady("a", "x", None))
    assert state.reason == "1 of at least 3 members are present"


def test_a_claim_passes_to_the_next_when_its_holder_is_lost() -> None:
    state, asked = after(world_of("a", "b"), ev.ClaimRequested("a", "model.pt"))
    assert told(asked, ev.GrantClaim) == [ev.GrantClaim("a", "model.pt")]
    state, asked = after(state, ev.ClaimRequested("b", "model.pt"))
    assert not told(asked, ev.GrantClaim)
    state, asked = after(state, ev.MemberLost("a", "killed"))
    assert ev.GrantClaim("b", "model.pt") in asked
    _, asked = after(state, ev.ClaimCompleted("b", "model.pt"), ev.ClaimRequested("c", "model.pt"))
    assert told(asked, ev.AnnounceClaimCompleted) == [ev.AnnounceClaimCompleted(("c",), "model.pt")]


def test_claims_that_were_fulfilled_long_ago_are_forgotten() -> None:
    state, _ = after(world_of("a", "b"), ev.ClaimRequested("a", "model.pt at step 0"))
    for step in range(1, KEPT_CLAIMS + 9):
        name = f"model.pt at step {step}"
        state, _ = after(state, ev.ClaimRequested("a", name), ev.ClaimCompleted("a", name))
    assert len(state.claims) == KEPT_CLAIMS + 1, "the one that is not completed is kept"
    _, asked = after(state, ev.ClaimRequested("b", name))
    assert told(asked, ev.AnnounceClaimCompleted) == [ev.AnnounceClaimCompleted(("b",), name)]


def test_a_claim_passes_to_the_next_when_its_holder_falls_silent_after_the_end() -> None:
    state, _ = after(world_of("a", "b"), ev.MemberDone("a", 9), ev.MemberDone("b", 9))
    assert state.finished
    state, _ = after(state, ev.ClaimRequested("a", "model.pt"), ev.ClaimRequested("b", "model.pt"))
    beats = {"b": LastHeartbeat(200.0)}
    [lost] = due(state, beats, 200.0)
    assert isinstance(lost, ev.MemberLost)
    state, asked = after(state, lost, now=200.0)
    assert ev.GrantClaim("b", "model.pt") in asked
    assert due(state, {}, 300.0) == (), "nobody waits for anybody"


def test_a_peer_that_nobody_can_reach_sits_out_instead_of_breaking_every_world() -> None:
    state = world_of("a", "b", "c")
    for _ in range(2):
        number = state.world.number
        state, _ = after(state, ev.WorldBroken("a", number, 0, suspects=("c",)))
        state, _ = after(state, ev.WorldBroken("b", number, 0), ev.WorldBroken("c", number, 0))
    assert [seat.member for seat in state.world.seats] == ["a", "b"]
    assert state.members["c"].quarantined_until > 100.0


def test_a_proposal_that_nobody_has_crossed_into_is_told_again_until_they_have() -> None:
    state = world_of("a")
    state, asked = after(state, hello("b"), ev.MemberReady("b", "x", None))
    proposal = next(i for i in asked if isinstance(i, ev.ProposeWorld))
    beats = {name: LastHeartbeat(110.0) for name in ("a", "b")}
    assert ev.TimerFired("proposal") not in due(state, beats, 101.0)
    assert ev.TimerFired("proposal") in due(state, beats, 110.0)
    state, asked = after(state, ev.TimerFired("proposal"), now=110.0)
    assert [(i.world, set(i.to)) for i in asked] == [(proposal.world, {"a", "b"})]
    assert ev.TimerFired("proposal") not in due(state, beats, 110.1)
    state, _ = after(state, ev.WorldEntered("a", proposal.world.number, 3), now=120.0)
    assert ev.TimerFired("proposal") not in due(state, beats, 130.0)


def test_a_member_that_missed_its_expulsion_is_told_again() -> None:
    state, _ = after(world_of("a", "b"), ev.MemberLost("b", "lease expired"))
    again = replace(hello("b"), world=1, step=4)
    state, asked = after(state, again)
    assert any(isinstance(i, ev.EvictMember) for i in asked)
    state, asked = after(state, ev.CoordinatorRestarted(), again)
    assert any(isinstance(i, ev.EvictMember) for i in asked)
