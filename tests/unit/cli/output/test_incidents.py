"""The digest of a story."""

from __future__ import annotations

from tests.unit.views import story_line

from shoal.cli.output import incidents


def test_loss_has_its_cause_and_what_the_new_world_cost() -> None:
    story = [
        story_line(1, "RunCreated", "run created"),
        story_line(2, "FormWorld", "world 1 started", world=1, step=0),
        story_line(3, "CheckpointWritten", "wrote the checkpoint", step=5),
        story_line(4, "WorldBroken", "local/0 lost world 1 at step 9", world=1, step=9, member="local/0"),
        story_line(5, "MemberLost", "local/1 is lost: it closed its connection", member="local/1"),
        story_line(6, "FormWorld", "world 2 started", world=2, step=8),
        story_line(7, "ProcessExited", "process of local/1 ended by signal 9", member="local/1", reason="killed"),
    ]
    start, loss = incidents.digest(story, last_step=20)
    assert start.kind == "start"
    assert loss.kind == "loss"
    assert (
        loss.text
        == "local/1 is lost: it closed its connection (killed); training stood still for 2.0 s, 1 step is repeated"
    )


def test_hang_is_told_apart_from_a_loss() -> None:
    stuck = story_line(1, "MemberHung", "local/1 is lost: lease expired after 3.2 s of silence", member="local/1")
    assert incidents.kind_of(stuck) == "hang"
    assert incidents.kind_of(story_line(1, "AgentLost", "agent a is lost: it did not reconnect")) == "loss"


def test_exit_is_a_loss_only_if_it_was_not_planned() -> None:
    ended = story_line(1, "ProcessExited", "process of local/1 ended with exit code 0", member="local/1")
    crashed = story_line(1, "ProcessExited", "process of local/1 ended with exit code 1", member="local/1")
    assert incidents.digest([ended]) == []
    assert [incident.kind for incident in incidents.digest([crashed])] == ["loss"]


def test_break_without_a_loss_is_an_incident() -> None:
    story = [
        story_line(1, "FormWorld", "world 1 started", world=1, step=0),
        story_line(2, "DissolveWorld", "world 1 ended", world=1, reason="connection reset"),
        story_line(3, "FormWorld", "world 2 started", world=2, step=4),
    ]
    (broken,) = incidents.digest(story)
    assert broken.kind == "break"
    assert broken.text.startswith("world 1 ended (connection reset); training stood still for 1.0 s")


def test_repeated_incidents_become_one_with_a_count() -> None:
    changes = [story_line(n, "SharesDecided", f"shares from step {n} on", step=n) for n in range(10)]
    join = story_line(20, "WorldEntered", "world 2 with 3 members from step 30")
    first, joined, last = incidents.digest([*changes, join, story_line(30, "SharesDecided", "equal")])
    assert (first.count, first.line.step, first.first_at) == (10, 9, 100.0)
    assert first.text == "shares from step 9 on; 10 times in 9.0 s"
    assert joined.kind == "join"
    assert last.count == 1


def test_losses_of_different_members_are_not_grouped() -> None:
    lost = [story_line(n, "MemberLost", f"local/{n} is lost: killed", member=f"local/{n}") for n in range(2)]
    assert [incident.count for incident in incidents.digest(lost)] == [1, 1]


def test_join_gives_the_reason_of_its_proposal() -> None:
    story = [
        story_line(1, "ProposeWorld", "prepared world 2", world=2, reason="local/2 wants to join"),
        story_line(2, "WorldEntered", "world 2 with 3 members from step 30", world=2),
    ]
    assert incidents.digest(story)[0].text == "world 2 with 3 members from step 30 (local/2 wants to join)"


def test_members_that_leave_a_stopped_run_are_no_incidents() -> None:
    stop = story_line(1, "UserStopRequested", "run was asked to stop", reason="Ctrl-C")
    left = story_line(2, "MemberLeft", "local/0 has left", member="local/0")
    assert [incident.kind for incident in incidents.digest([stop, left])] == ["stop"]
    assert [incident.kind for incident in incidents.digest([left])] == ["leave"]


def test_routine_kinds_are_shown_when_they_are_named() -> None:
    line = story_line(1, "CheckpointWritten", "wrote the checkpoint")
    assert incidents.digest([line]) == []
    assert [incident.kind for incident in incidents.digest([line], also=["checkpoint"])] == ["checkpoint"]
