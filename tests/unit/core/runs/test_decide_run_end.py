"""How runs end: as done only if a member reached the end of the script."""

from __future__ import annotations

from typing import Any

from shoal.core.fleet import events as fe
from shoal.core.membership import events as ev
from shoal.core.runs import events as run_events
from shoal.core.runs.decide import apply
from shoal.core.runs.state import CoordinatorState, RunState
from shoal.core.world import Address
from shoal.wire.api import RunSpec


class Ending:
    """A run of one member on an agent with `slots`; the first member trains, the others are spares."""

    def __init__(self, slots: int = 1) -> None:
        self.state, self.now = CoordinatorState(), 1.0
        self.incarnations: dict[str, str] = {}
        self.tell(run_events.RunCreated(RunSpec("t", ("t.py",), "/", (1, 1), project="p"), {}), "r")
        self.tell(fe.AgentConnected("lab", slots, "h"))
        for member in list(self.incarnations):
            self.tell(ev.MemberConnected(member, self.incarnations[member], Address("h", 1)), "r")
            self.tell(ev.MemberReady(member, "x", None), "r")
            self.tell(ev.TimerFired("regroup"), "r", after_s=1.0)

    @property
    def run(self) -> RunState:
        return self.state.runs["r"]

    def tell(self, event: Any, run: str = "", after_s: float = 0.1) -> None:
        self.now += after_s
        for _, instruction in apply(self.state, run, event, self.now):
            if isinstance(instruction, fe.StartProcess):
                self.incarnations[instruction.member] = instruction.incarnation

    def exit(self, member: str, cause: str) -> None:
        code = {"done": 0, "preempted": 75}.get(cause)
        self.tell(fe.ProcessExited("r", member, self.incarnations[member], cause, exit_code=code), "r")


def test_spare_that_exits_at_the_end_does_not_make_the_run_done() -> None:
    run = Ending(slots=2)
    run.tell(ev.MemberDone("lab/0", 9), "r")
    run.exit("lab/1", "done")
    run.exit("lab/0", "infrastructure")
    assert (run.run.status, run.run.exit_code) == ("resumable", 75)
    assert "no member reached the end of the script: lab/0" in run.run.reason


def test_spare_that_fails_after_the_training_does_not_fail_the_run() -> None:
    run = Ending(slots=2)
    run.tell(ev.MemberDone("lab/0", 9), "r")
    run.exit("lab/1", "user")
    run.exit("lab/0", "done")
    assert (run.run.status, run.run.exit_code) == ("done", 0)


def test_run_stopped_in_its_last_step_is_done_if_its_script_finishes() -> None:
    run = Ending()
    run.tell(ev.StopRequested("all members have notice", checkpoint=True, exit_code=75, until_replaced=True), "r")
    run.tell(ev.MemberDone("lab/0", 9), "r")
    run.exit("lab/0", "done")
    assert (run.run.status, run.run.exit_code) == ("done", 0)


def test_run_stopped_in_its_last_step_is_resumable_if_its_script_is_cut_short() -> None:
    run = Ending()
    run.tell(ev.StopRequested("all members have notice", checkpoint=True, exit_code=75, until_replaced=True), "r")
    run.tell(ev.MemberDone("lab/0", 9), "r")
    run.exit("lab/0", "preempted")
    assert (run.run.status, run.run.exit_code) == ("resumable", 75)


def test_stopped_run_is_not_done_because_one_script_left_its_loop() -> None:
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


def test_project_of_a_run_is_needed_until_the_run_is_done() -> None:
    for cause, status, needed in (("infrastructure", "resumable", ["p"]), ("done", "done", [])):
        run = Ending()
        assert run.state.projects() == ["p"]
        run.tell(ev.MemberDone("lab/0", 9), "r")
        run.exit("lab/0", cause)
        assert (run.run.status, run.state.projects()) == (status, needed)
