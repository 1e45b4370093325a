from __future__ import annotations

from typing import Any

import pytest

from shoal import exit_codes
from shoal.core.fleet import events as fe
from shoal.core.fleet import run_end
from shoal.core.fleet.draft import FleetDraft
from shoal.core.fleet.requirements import MachineRequirements
from shoal.core.fleet.restart_policy import RestartLimits
from shoal.core.fleet.state import (
    ACTIVE,
    BACKOFF,
    DONE,
    ENDED,
    FINISHING,
    RUNNING,
    STOPPING,
    AgentState,
    DesiredRun,
    FleetState,
    ProcessState,
    ProcessTable,
)
from shoal.core.membership.state import TRAINER

AGENT = AgentState("lab", None, "h", 0)


def draft_of(statuses: dict[str, str], *agents: AgentState, **run: Any) -> FleetDraft:
    """Return a draft of run r with processes of these statuses, by member, at time 50."""
    desired = DesiredRun("r", 1, 4, "", RestartLimits(), **{"seen": True, **run})
    processes = ProcessTable(
        {("r", name): ProcessState("r", name, "1", "lab", status, 0) for name, status in statuses.items()}
    )
    fleet = FleetState(agents={agent.name: agent for agent in agents}, runs={"r": desired}, processes=processes)
    return FleetDraft(fleet, 50.0)


def ended(draft: FleetDraft) -> list[tuple[str, int]]:
    run_end.end_if_over(draft, "r")
    return [(i.reason, i.exit_code) for i in draft.instructions if isinstance(i, fe.MarkRunEnded)]


def test_run_ends_when_all_its_processes_are_done() -> None:
    draft = draft_of({"lab/0": DONE, "lab/1": DONE}, AGENT)
    assert ended(draft) == [run_end.ALL_DONE]
    assert draft.runs["r"].status == ENDED
    assert draft.of_run("r") == [], "processes that are not alive are forgotten"


@pytest.mark.parametrize("waits_for", [RUNNING, BACKOFF])
def test_active_run_waits_for_a_process_that_runs_or_will_be_restarted(waits_for: str) -> None:
    assert ended(draft_of({"lab/0": DONE, "lab/1": waits_for}, AGENT)) == []


def test_run_with_unmanaged_members_does_not_end() -> None:
    assert ended(draft_of({"lab/0": DONE}, AGENT, unmanaged=("laptop/0",))) == []


def test_stopped_run_ends_with_the_reason_and_exit_code_of_the_stop() -> None:
    draft = draft_of({}, AGENT, status=STOPPING, reason="enough", exit_code=exit_codes.RESUMABLE)
    assert ended(draft) == [("enough", exit_codes.RESUMABLE)]


def test_run_stopped_in_its_last_step_is_done_if_a_trainer_reached_the_end() -> None:
    draft = draft_of({"lab/0": DONE}, AGENT, status=STOPPING, finished=True, reason="enough", exit_code=75)
    assert ended(draft) == [run_end.ALL_DONE]


def test_run_whose_trainers_died_after_the_last_step_is_resumable() -> None:
    draft = draft_of({}, AGENT, status=FINISHING, died_after_training="lab/0 was killed")
    ((reason, exit_code),) = ended(draft)
    assert "no member reached the end of the script: lab/0 was killed" in reason
    assert exit_code == exit_codes.RESUMABLE


def test_finished_run_waits_for_its_evaluator_and_says_so_once() -> None:
    draft = draft_of({"lab/0": DONE, "lab/evaluator-0": RUNNING}, AGENT, status=FINISHING)
    assert ended(draft) == []
    assert ended(draft) == []
    assert draft.instructions == [fe.MarkTrainingFinished("r")]


def test_run_without_agents_starts_its_timer_unless_pools_provide_machines() -> None:
    draft = draft_of({})
    assert ended(draft) == []
    assert draft.runs["r"].no_agents_since == 50.0
    pooled = draft_of({}, requirements={TRAINER: MachineRequirements(pools=("spot",))})
    assert ended(pooled) == []
    assert pooled.runs["r"].no_agents_since is None


def test_failed_run_stops_what_is_alive() -> None:
    draft = draft_of({"lab/0": RUNNING, "lab/1": BACKOFF}, AGENT, status=ACTIVE)
    run_end.fail(draft, "r", "too many restarts", 1)
    assert [i.member for i in draft.instructions if isinstance(i, fe.StopProcess)] == ["lab/0"]
    assert draft.instructions[-1] == fe.MarkRunFailed("r", "too many restarts", 1)
    assert [p.member for p in draft.of_run("r")] == ["lab/0"]
