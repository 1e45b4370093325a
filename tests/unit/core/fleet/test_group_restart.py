"""Groups of unmodified scripts: when all processes start, restart and end together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shoal import exit_codes
from shoal.core.fleet import events as fe
from shoal.core.fleet import group_restart
from shoal.core.fleet.draft import FleetDraft
from shoal.core.fleet.restart_policy import PastExit, RestartLimits
from shoal.core.fleet.state import (
    DONE,
    ENDING,
    FINISHING,
    RUNNING,
    STOPPING,
    AgentState,
    DesiredRun,
    FleetState,
    ProcessState,
    ProcessTable,
)

LIMITS = RestartLimits(user=1, infrastructure=2, backoff_s=2.0)
NOW = 500.0


def draft_of(*members: str, slots: int = 2, compat: str = "torchrun", **run: Any) -> FleetDraft:
    """Return a draft of run r, of two to four processes, with these on agent lab."""
    desired = DesiredRun("r", 2, 4, compat, LIMITS, **run)
    processes = ProcessTable({("r", name): ProcessState("r", name, "1", "lab", RUNNING, 0) for name in members})
    agents = {"lab": AgentState("lab", slots, "h", 0)}
    return FleetDraft(FleetState(agents=agents, runs={"r": desired}, processes=processes, salt="s"), NOW)


def align(draft: FleetDraft) -> FleetDraft:
    group_restart.align(draft, draft.runs["r"])
    return draft


def starts(draft: FleetDraft) -> list[fe.StartProcess]:
    return [i for i in draft.instructions if isinstance(i, fe.StartProcess)]


def stopped(draft: FleetDraft) -> list[str]:
    return [i.member for i in draft.instructions if isinstance(i, fe.StopProcess)]


def test_group_starts_when_the_minimum_of_slots_is_there() -> None:
    assert starts(align(draft_of(slots=1))) == []
    draft = align(draft_of(slots=2))
    assert [start.member for start in starts(draft)] == ["lab/0", "lab/1"]
    assert [dict(start.env)["RANK"] for start in starts(draft)] == ["0", "1"]
    assert {dict(start.env)["WORLD_SIZE"] for start in starts(draft)} == {"2"}
    assert draft.runs["r"].generation == 1


def test_group_takes_at_most_its_maximum() -> None:
    assert len(starts(align(draft_of(slots=9)))) == 4


def test_slots_of_other_runs_are_not_taken() -> None:
    draft = draft_of(slots=4)
    draft.processes["other", "lab/0"] = ProcessState("other", "lab/0", "1", "lab", RUNNING, 0)
    assert len(starts(align(draft))) == 3


def test_more_slots_restart_the_whole_group() -> None:
    draft = align(draft_of("lab/0", "lab/1", slots=3))
    assert stopped(draft) == ["lab/0", "lab/1"]
    assert starts(draft) == [], "it starts when the last process has ended"
    assert draft.runs["r"].restart_reason == "the agents now offer 3 slots instead of 2"


def test_group_stays_if_nothing_changed_or_its_agent_may_reconnect() -> None:
    assert align(draft_of("lab/0", "lab/1")).instructions == []
    draft = draft_of("lab/0", "lab/1", slots=3)
    draft.agents["lab"] = replace(draft.agents["lab"], disconnected_since=1.0)
    assert align(draft).instructions == []


def test_group_of_which_one_is_done_is_not_restarted() -> None:
    draft = draft_of("lab/0", "lab/1", slots=3)
    draft.update(draft.processes["r", "lab/0"], status=DONE)
    assert align(draft).instructions == []


def test_exit_of_one_stops_the_others_and_the_next_group_waits_its_pause() -> None:
    draft = draft_of("lab/0", "lab/1", losses={"": (PastExit(NOW - 1.0, "infrastructure"),)})
    group_restart.on_exit(draft, draft.runs["r"], draft.processes["r", "lab/0"], "infrastructure", "signal 9")
    assert stopped(draft) == ["lab/1"]
    assert draft.processes["r", "lab/1"].status == ENDING
    assert (draft.runs["r"].restart_reason, draft.runs["r"].restart_at) == ("lab/0 ended: signal 9", NOW + 2.0)
    draft.remove(draft.processes["r", "lab/1"])
    assert starts(align(draft)) == []
    draft.now += 2.0
    assert [start.reason for start in starts(align(draft))] == ["the group is complete"] * 2


def test_exits_during_a_restart_or_a_stop_change_nothing_more() -> None:
    for run in ({"restart_reason": "x"}, {"status": STOPPING}):
        draft = draft_of("lab/0", "lab/1", **run)
        group_restart.on_exit(draft, draft.runs["r"], draft.processes["r", "lab/0"], "user", "boom")
        assert (draft.instructions, list(draft.processes.of_run("r"))) == ([], ["lab/1"])


def test_run_fails_when_the_restarts_are_used_up() -> None:
    for cause, code in (("user", exit_codes.FAILED), ("infrastructure", exit_codes.MEMBERS_LOST)):
        draft = draft_of("lab/0", "lab/1", losses={"": (PastExit(NOW - 1.0, cause),) * 2})
        group_restart.on_exit(draft, draft.runs["r"], draft.processes["r", "lab/0"], cause, "boom")
        (failed,) = [i for i in draft.instructions if isinstance(i, fe.MarkRunFailed)]
        assert failed.exit_code == code
        assert failed.reason.startswith("lab/0: boom (")


def test_chief_that_is_done_ends_the_others() -> None:
    draft = draft_of("lab/chief-0", "lab/server-0", "lab/0", compat="ps", servers=1)
    draft.update(draft.processes["r", "lab/chief-0"], status=DONE)
    group_restart.on_chief_done(draft, draft.runs["r"])
    assert stopped(draft) == ["lab/server-0", "lab/0"]
    assert draft.runs["r"].status == FINISHING
