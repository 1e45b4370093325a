"""What follows from one exit, by its cause; how exits add up is tested in `test_restart_policy`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shoal import exit_codes
from shoal.core.fleet import events as fe
from shoal.core.fleet import restarts
from shoal.core.fleet.draft import FleetDraft
from shoal.core.fleet.restart_policy import PastExit, RestartLimits, StopRestarting
from shoal.core.fleet.state import (
    ACTIVE,
    BACKOFF,
    FINISHING,
    GIVEN_UP,
    RUNNING,
    STARTING,
    AgentState,
    DesiredRun,
    FleetState,
    ProcessState,
    ProcessTable,
)

LIMITS = RestartLimits(user=1, infrastructure=1, backoff_s=2.0)
AGENT = AgentState("lab", None, "h", 0)
NOW = 500.0


def draft_of(*members: str, agent: AgentState | None = AGENT, least: int = 1, **run: Any) -> FleetDraft:
    """Return a draft of run r with these running members on one agent."""
    desired = DesiredRun("r", least, 4, "", LIMITS, **run)
    processes = ProcessTable({("r", name): ProcessState("r", name, "1", "lab", RUNNING, 0) for name in members})
    agents = {"lab": agent} if agent is not None else {}
    return FleetDraft(FleetState(agents=agents, runs={"r": desired}, processes=processes, salt="s"), NOW)


def end(draft: FleetDraft, cause: str, detail: str = "boom", member: str = "lab/0", **exited: Any) -> FleetDraft:
    event = fe.ProcessExited("r", member, "1", cause, detail, **exited)
    restarts.on_unplanned_exit(draft, draft.processes["r", member], event)
    return draft


def status(draft: FleetDraft, member: str = "lab/0") -> str:
    p = draft.processes.get(("r", member))
    return p.status if p is not None else "forgotten"


def failures(draft: FleetDraft) -> list[tuple[str, int]]:
    return [(i.reason, i.exit_code) for i in draft.instructions if isinstance(i, fe.MarkRunFailed)]


def test_first_crash_restarts_at_once_as_a_new_incarnation() -> None:
    draft = end(draft_of("lab/0"), "infrastructure")
    (start,) = [i for i in draft.instructions if isinstance(i, fe.StartProcess)]
    assert (start.member, start.restart, start.incarnation != "1") == ("lab/0", True, True)
    assert status(draft) == STARTING
    assert draft.runs["r"].losses["lab/0"] == (PastExit(NOW, "infrastructure", "boom"),)


@pytest.mark.parametrize(
    "agent", [None, replace(AGENT, disconnected_since=1.0), replace(AGENT, notice="spot", notice_until=NOW)]
)
def test_restart_waits_for_an_agent_that_is_not_usable(agent: AgentState | None) -> None:
    draft = end(draft_of("lab/0", agent=agent), "infrastructure")
    assert status(draft) == BACKOFF
    assert draft.instructions == []


def test_second_crash_in_a_row_waits_and_says_so() -> None:
    limits = replace(LIMITS, infrastructure=9)
    draft = draft_of("lab/0", losses={"lab/0": (PastExit(NOW - 1.0, "infrastructure"),)})
    draft.set_run("r", restarts=limits)
    end(draft, "infrastructure")
    assert draft.processes["r", "lab/0"].until == NOW + 2.0
    (note,) = [i.text for i in draft.instructions if isinstance(i, fe.FleetNote)]
    assert note.startswith("lab/0 restarts in 2.0 s: ")


def test_preempted_process_is_forgotten_and_remembered_as_such() -> None:
    draft = end(draft_of("lab/0", agent=replace(AGENT, notice="spot")), "preempted")
    assert status(draft) == "forgotten"
    assert draft.runs["r"].preempted
    assert not end(draft_of("lab/evaluator-0", agent=None), "preempted", member="lab/evaluator-0").runs["r"].preempted


def test_refused_member_is_given_up_and_the_others_go_on() -> None:
    draft = end(draft_of("lab/0", "lab/1"), "refused")
    assert (status(draft), status(draft, "lab/1"), failures(draft)) == (GIVEN_UP, RUNNING, [])


@pytest.mark.parametrize(
    ("cause", "code"), [("refused", exit_codes.FAILED), ("infrastructure", exit_codes.MEMBERS_LOST)]
)
def test_run_fails_if_fewer_than_its_minimum_are_left(cause: str, code: int) -> None:
    draft = draft_of("lab/0", "lab/1", least=2, losses={"lab/0": (PastExit(NOW - 1.0, "infrastructure"),) * 2})
    ((reason, exit_code),) = failures(end(draft, cause))
    assert exit_code == code
    assert "; fewer than 2 members" in reason


def test_unmanaged_members_count_as_left() -> None:
    assert failures(end(draft_of("lab/0", least=1, unmanaged=("laptop/0",)), "refused")) == []


def test_only_server_that_is_given_up_fails_the_run() -> None:
    losses = {"lab/server-0": (PastExit(NOW - 1.0, "infrastructure"),) * 2}
    draft = end(draft_of("lab/server-0", "lab/0", losses=losses), "infrastructure", member="lab/server-0")
    assert "; fewer than 1 server" in failures(draft)[0][0]


def test_error_of_the_script_that_no_restart_cures_fails_the_run_at_once() -> None:
    ((reason, code),) = failures(
        end(draft_of("lab/0", "lab/1"), "user", "error[S102] too large", before_first_step=True)
    )
    assert code == exit_codes.FAILED
    assert reason.startswith("lab/0: error[S102] too large (not restarted")


def test_joining_member_that_fails_does_not_fail_the_run() -> None:
    draft = draft_of("lab/0", "lab/1", losses={"lab/0": (PastExit(NOW - 1.0, "user"),)})
    assert failures(end(draft, "user", joining=True)) == []
    assert status(draft) == GIVEN_UP


def test_evaluator_is_given_up_for_good_after_an_error_and_for_a_while_after_crashes() -> None:
    name = "lab/evaluator-0"
    for cause, forever in (("user", True), ("infrastructure", False)):
        draft = draft_of(name, "lab/0", losses={name: (PastExit(NOW - 1.0, cause),) * 2})
        end(draft, cause, member=name)
        assert failures(draft) == []
        assert (draft.processes["r", name].until == float("inf")) is forever


def test_trainer_that_dies_after_the_last_step_is_remembered_and_an_error_fails_the_run() -> None:
    draft = end(draft_of("lab/0", status=FINISHING), "infrastructure")
    assert draft.runs["r"].died_after_training == "lab/0: boom"
    assert status(draft) == "forgotten"
    assert failures(end(draft_of("lab/0", status=FINISHING), "user")) == [("lab/0: boom", exit_codes.FAILED)]


def test_only_member_of_a_larger_run_is_compared_with_those_that_may_come() -> None:
    draft = draft_of("lab/0", status=ACTIVE)
    decision = restarts.judge_early(draft, draft.runs["r"], "lab/0", "ValueError")
    assert not isinstance(decision, StopRestarting)


def test_number_of_remembered_exits_is_bounded() -> None:
    draft = draft_of("lab/0", losses={"lab/0": (PastExit(0.0, "user"),) * restarts.KEPT_EXITS})
    restarts.judge(draft, draft.runs["r"], "lab/0", "preempted")
    kept = draft.runs["r"].losses["lab/0"]
    assert (len(kept), kept[-1].cause) == (restarts.KEPT_EXITS, "preempted")
