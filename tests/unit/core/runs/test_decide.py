"""Decisions of a coordinator: where events go, and what follows from them."""

from __future__ import annotations

from typing import Any

from shoal import exit_codes
from shoal.core.fleet import events as fe
from shoal.core.membership import events as ev
from shoal.core.runs import decide, story
from shoal.core.runs import events as run_events
from shoal.core.runs.spec import RunSpec
from shoal.core.runs.state import CoordinatorState
from shoal.core.world import Address


class TwoMembers:
    """A coordinator with one run, whose two members train on one agent."""

    def __init__(self) -> None:
        self.state, self.now = CoordinatorState(), 1000.0
        self.incarnations: dict[str, str] = {}
        self.apply("r", run_events.RunCreated(RunSpec("t", ("t.py",), "/", (1, 2)), {}))
        self.apply("", fe.AgentConnected("lab", 2, "h"))
        for process in list(self.state.fleet.processes.values()):
            self.incarnations[process.member] = process.incarnation
            self.apply("r", ev.MemberConnected(process.member, process.incarnation, Address("h", 1)))
        for member in self.incarnations:
            self.apply("r", ev.MemberReady(member, "model", None))

    def apply(self, run: str, event: Any) -> list[Any]:
        self.now += 0.1
        self.instructions = decide.apply(self.state, run, event, self.now)
        return [instruction for _, instruction in self.instructions]

    def exit(self, member: str, cause: str, detail: str = "") -> list[Any]:
        return self.apply("r", fe.ProcessExited("r", member, self.incarnations[member], cause, detail, exit_code=1))

    def story(self, event: Any) -> list[str]:
        self.apply("r", event)
        lines = story.tell(1, self.now, "r", event, self.instructions, self.state.runs["r"])
        return [line.text for line in lines]


def kinds(instructions: list[Any]) -> list[type]:
    return [type(instruction) for instruction in instructions]


def test_loss_of_a_member_is_decided_before_its_restart() -> None:
    instructions = kinds(TwoMembers().exit("lab/1", "infrastructure"))
    assert instructions.index(ev.DissolveWorld) < instructions.index(fe.StartProcess)


def test_same_error_of_both_members_fails_the_run_before_its_first_step() -> None:
    coordinator = TwoMembers()
    coordinator.exit("lab/0", "user", "ValueError: no")
    coordinator.exit("lab/1", "user", "ValueError: no")
    run = coordinator.state.runs["r"]
    assert (run.status, run.exit_code) == ("failed", exit_codes.FAILED)
    assert "not restarted: every member failed with the same error before the first step" in run.reason


def test_same_error_of_both_members_is_retried_after_the_first_step() -> None:
    coordinator = TwoMembers()
    coordinator.apply("r", ev.ProgressRecorded(1))
    assert fe.StartProcess in kinds(coordinator.exit("lab/0", "user", "ValueError: no"))
    assert fe.StartProcess in kinds(coordinator.exit("lab/1", "user", "ValueError: no"))


def test_event_of_an_unknown_run_is_ignored() -> None:
    coordinator = TwoMembers()
    assert coordinator.apply("other", ev.MemberReady("lab/0", "model", None)) == []


def test_ended_run_takes_no_member_events_but_a_resume() -> None:
    coordinator = TwoMembers()
    coordinator.apply("r", run_events.UserStopRequested("enough", False, 0.0))
    for member in coordinator.incarnations:
        coordinator.exit(member, "asked")
    run = coordinator.state.runs["r"]
    assert (run.status, run.exit_code) == ("stopped", exit_codes.RESUMABLE)
    assert coordinator.apply("r", ev.MemberReady("lab/0", "model", None)) == []
    assert fe.StartProcess in kinds(coordinator.apply("r", run_events.RunResumed(1, 2)))
    assert not run.has_ended


def test_first_exception_is_blamed_and_its_consequences_are_not() -> None:
    coordinator = TwoMembers()
    coordinator.apply("r", run_events.ExceptionReported("lab/0", "RingBroken", "peer lost", "", "S207"))
    assert coordinator.state.runs["r"].failure is None
    coordinator.apply("r", run_events.ExceptionReported("lab/1", "ValueError", "no such column", ""))
    coordinator.apply("r", run_events.ExceptionReported("lab/0", "KeyError", "later", ""))
    failure = coordinator.state.runs["r"].failure
    assert failure is not None
    assert failure.text == "no such column"


def test_story_tells_a_lost_connection_during_the_training() -> None:
    told = TwoMembers().story(ev.MemberDisconnected("lab/1"))
    assert "lab/1 lost its connection to the coordinator" in told


def test_story_does_not_tell_a_lost_connection_of_a_member_that_finished() -> None:
    coordinator = TwoMembers()
    coordinator.apply("r", ev.MemberDone("lab/0", 9))
    assert not [text for text in coordinator.story(ev.MemberDisconnected("lab/0")) if "lost its connection" in text]


class TwoProcesses(TwoMembers):
    """A coordinator whose run of two to two members has two processes; their scripts have not called Shoal yet."""

    def __init__(self, compat: str = "") -> None:
        self.state, self.now = CoordinatorState(), 1000.0
        self.apply("r", run_events.RunCreated(RunSpec("t", ("t.py",), "/", (2, 2), compat=compat), {}))
        self.apply("", fe.AgentConnected("lab", 2, "h"))
        self.incarnations = {p.member: p.incarnation for p in self.state.fleet.processes.values()}

    def connect(self, member: str) -> None:
        self.apply("r", ev.MemberConnected(member, self.incarnations[member], Address("h", 1)))


def test_script_that_ends_well_without_joining_fails_the_run() -> None:
    coordinator = TwoProcesses()
    coordinator.exit("lab/0", "done")
    run = coordinator.state.runs["r"]
    assert (run.status, run.exit_code) == ("failed", exit_codes.FAILED)
    assert "error[S340] t.py ended without joining the run" in run.reason
    assert run.problem is not None
    assert "shoal.join()" in run.problem.do


def test_script_that_joins_and_ends_before_its_first_batch_fails_the_run() -> None:
    coordinator = TwoProcesses()
    coordinator.connect("lab/0")
    coordinator.exit("lab/0", "done")
    assert "error[S340] t.py joined the run but trained nothing" in coordinator.state.runs["r"].reason


def test_copy_that_never_joins_does_not_harm_those_that_train() -> None:
    coordinator = TwoMembers()
    coordinator.apply("r", ev.ScaleRequested(1, 3))
    coordinator.apply("", fe.AgentConnected("more", 1, "h"))
    coordinator.incarnations["more/0"] = coordinator.state.fleet.processes["r", "more/0"].incarnation
    notes = [i.text for i in coordinator.exit("more/0", "done") if isinstance(i, fe.FleetNote)]
    assert any("more/0 has not trained: error[S340]" in note for note in notes)
    assert not coordinator.state.runs["r"].has_ended


def test_unmodified_script_need_not_join() -> None:
    coordinator = TwoProcesses(compat="torchrun")
    for member in list(coordinator.incarnations):
        coordinator.exit(member, "done")
    assert coordinator.state.runs["r"].status == "done"
