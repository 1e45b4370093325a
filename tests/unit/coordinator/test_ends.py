"""How runs end: as done only if somebody came to the end of the script."""

from __future__ import annotations

from typing import Any

from shoal.core.fleet import events as fe
from shoal.core.membership import events as ev
from shoal.core.runs import events as runs_events
from shoal.core.runs.state import CoordinatorState, RunState
from shoal.core.world import Address
from shoal.wire.api import RunSpec


class Ending:
    """A run of one member on an agent that may have places for more; its first member trains, the others are spares."""

    def __init__(self, slots: int = 1) -> None:
        self.runs, self.now = CoordinatorState(), 1.0
        self.incarnations: dict[str, str] = {}
        self.tell(runs_events.RunCreated(RunSpec("t", ("t.py",), "/", (1, 1), project="p"), {}), "r")
        self.tell(fe.AgentConnected("lab", slots, "h"))
        for member in list(self.incarnations):
            self.tell(ev.MemberConnected(member, self.incarnations[member], Address("h", 1)), "r")
            self.tell(ev.MemberReady(member, "x", None), "r")
            self.tell(ev.TimerFired("regroup"), "r", after_s=1.0)

    @property
    def run(self) -> RunState:
        return self.runs.runs["r"]

    def tell(self, event: Any, run: str = "", after_s: float = 0.1) -> None:
        self.now += after_s
        for _, asked in self.runs.apply(run, event, self.now):
            if isinstance(asked, fe.StartProcess):
                self.incarnations[asked.member] = asked.incarnation

    def exit(self, member: str, cause: str) -> None:
        code = {"done": 0, "preempted": 75}.get(cause)
        self.tell(fe.ProcessExited("r", member, self.incarnations[member], cause, exit_code=code), "r")


def test_a_spare_that_is_told_of_the_end_has_not_come_to_the_end_of_the_script() -> None:
    run = Ending(slots=2)
    run.tell(ev.MemberDone("lab/0", 9), "r")
    run.exit("lab/1", "done")
    run.exit("lab/0", "infrastructure")
    assert (run.run.status, run.run.exit_code) == ("resumable", 75)
    assert "no member reached the end of the script: lab/0" in run.run.reason


def test_a_spare_that_fails_when_others_have_trained_to_the_end_fails_nobody() -> None:
    run = Ending(slots=2)
    run.tell(ev.MemberDone("lab/0", 9), "r")
    run.exit("lab/1", "user")
    run.exit("lab/0", "done")
    assert (run.run.status, run.run.exit_code) == ("done", 0)


def test_a_run_that_is_told_to_stop_in_its_last_step_and_comes_to_its_end_is_done() -> None:
    run = Ending()
    run.tell(ev.StopRequested("all members have notice", checkpoint=True, exit_code=75, until_replaced=True), "r")
    run.tell(ev.MemberDone("lab/0", 9), "r")
    run.exit("lab/0", "done")
    assert (run.run.status, run.run.exit_code) == ("done", 0)


def test_a_run_that_is_told_to_stop_in_its_last_step_and_has_no_time_for_the_end_of_its_script_is_not_done() -> None:
    run = Ending()
    run.tell(ev.StopRequested("all members have notice", checkpoint=True, exit_code=75, until_replaced=True), "r")
    run.tell(ev.MemberDone("lab/0", 9), "r")
    run.exit("lab/0", "preempted")
    assert (run.run.status, run.run.exit_code) == ("resumable", 75)


def test_a_run_that_stops_is_not_done_because_the_script_of_one_left_the_loop() -> None:
    run = Ending(slots=2)
    run.tell(ev.ScaleRequested(1, 2), "r")
    run.tell(ev.WorldEntered("lab/1", 2, 4), "r")
    run.tell(ev.MemberDone("lab/0", 5, early=True), "r")
    run.exit("lab/0", "done")
    run.tell(ev.MemberLost("lab/0", "lease expired"), "r")
    run.tell(ev.StopRequested("asked", checkpoint=True, exit_code=75), "r")
    run.tell(ev.MemberLeft("lab/1", 6), "r")
    run.exit("lab/1", "preempted")
    assert (run.run.status, run.run.exit_code) == ("resumable", 75)


def test_the_project_of_a_run_is_needed_until_it_is_done() -> None:
    for cause, status, needed in (("infrastructure", "resumable", ["p"]), ("done", "done", [])):
        run = Ending()
        assert run.runs.projects() == ["p"]
        run.tell(ev.MemberDone("lab/0", 9), "r")
        run.exit("lab/0", cause)
        assert (run.run.status, run.runs.projects()) == (status, needed)
