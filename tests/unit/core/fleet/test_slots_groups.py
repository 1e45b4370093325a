"""An agent without a limit starts its processes in groups, so that a large run does not block the coordinator."""

from __future__ import annotations

from shoal.core.fleet import events as fe
from shoal.core.fleet.decide import RUNNING, decide
from shoal.core.fleet.restart_policy import RestartLimits
from shoal.core.fleet.state import MAX_STARTING, FleetState


def run_on_one_agent(members: int) -> tuple[FleetState, list[fe.StartProcess]]:
    state, _ = decide(FleetState(), fe.AgentConnected("local", None, "127.0.0.1", ()), 0.0)
    state, instructions = decide(state, fe.RunRequested("r", 1, members, "", RestartLimits()), 1.0)
    return state, [i for i in instructions if isinstance(i, fe.StartProcess)]


def test_small_run_is_started_at_once() -> None:
    _, starts = run_on_one_agent(8)
    assert [start.member for start in starts] == [f"local/{i}" for i in range(8)]


def test_large_run_is_started_group_by_group_until_it_is_complete() -> None:
    state, waiting = run_on_one_agent(1000)
    assert len(waiting) == MAX_STARTING
    started = set[str]()
    while waiting:
        start = waiting.pop(0)
        started.add(start.member)
        event = fe.ProcessStarted("r", start.member, start.incarnation, 1, True)
        state, instructions = decide(state, event, 2.0)
        waiting += [i for i in instructions if isinstance(i, fe.StartProcess)]
        assert len(waiting) <= MAX_STARTING
    assert started == {f"local/{i}" for i in range(1000)}
    assert all(p.status == RUNNING for p in state.processes.values())


def test_process_that_fails_to_start_does_not_hold_up_the_next_group() -> None:
    state, starts = run_on_one_agent(1000)
    more = 0
    for start in starts:
        exited = fe.ProcessExited("r", start.member, start.incarnation, "infrastructure", "killed")
        state, instructions = decide(state, exited, 2.0)
        more += sum(isinstance(i, fe.StartProcess) for i in instructions)
    assert more >= MAX_STARTING
    assert state.processes.starting("local") == MAX_STARTING


def test_agent_with_slots_fills_them_at_once() -> None:
    state, _ = decide(FleetState(), fe.AgentConnected("big", 200, "127.0.0.1", ()), 0.0)
    state, instructions = decide(state, fe.RunRequested("r", 1, 200, "", RestartLimits()), 1.0)
    assert sum(isinstance(i, fe.StartProcess) for i in instructions) == 200
