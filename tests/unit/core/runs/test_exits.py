from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shoal.core.fleet import events as fe
from shoal.core.fleet.state import RUNNING, FleetState, ProcessState, ProcessTable
from shoal.core.membership import events as ev
from shoal.core.membership.state import (
    DONE,
    REGROUPING,
    STARTING,
    TRAINING,
    WAITING,
    MembershipSettings,
    MembershipState,
    MemberState,
)
from shoal.core.runs import exits
from shoal.core.runs.spec import Problem, RunSpec
from shoal.core.runs.state import CoordinatorState, RunState
from shoal.core.world import Address, Seat, World

AT = Address("h", 1)
EXITED = fe.ProcessExited("r", "lab/0", "1", "done")
STOP = ev.StopRequested("enough", True, 75)


def run_of(status: str = TRAINING, holds: int | None = None, spec: RunSpec | None = None, **changes: Any) -> RunState:
    """Return a run with member lab/0 of incarnation 1."""
    member = MemberState("lab/0", "1", AT, status, 1, 0.0, step=holds)
    state = MembershipState(MembershipSettings(1, 2), members={"lab/0": member})
    return RunState("r", spec or RunSpec("t", ("t.py",), "/", (1, 2)), {}, replace(state, **changes), 0.0, 0.0)


def world(*names: str) -> World:
    return World(1, tuple(Seat(name, "1", AT) for name in names), 0)


@pytest.mark.parametrize(
    ("run", "left"),
    [
        (run_of(TRAINING), True),
        (run_of(REGROUPING), True),
        (run_of(WAITING, holds=3), True),
        (run_of(WAITING), False),
        (run_of(DONE, holds=3), False),
        (run_of(TRAINING, finished=True), False),
        (run_of(TRAINING, stopping=STOP), False),
        (run_of(members={}), False),
        (run_of(members={}, lost_from_world=("lab/0",)), True),
    ],
)
def test_member_that_held_state_and_exited_well_has_left_its_loop(run: RunState, left: bool) -> None:
    assert exits.left_its_loop(run, EXITED) is left


@pytest.mark.parametrize("change", [{"cause": "user"}, {"incarnation": "2"}])
def test_exit_by_an_error_or_of_an_older_process_leaves_no_loop(change: dict[str, str]) -> None:
    assert not exits.left_its_loop(run_of(TRAINING), replace(EXITED, **change))


def problem(run: RunState, member: str = "lab/0", *, joined: bool = False, **changes: Any) -> Problem | None:
    process = ProcessState("r", member, "1", "lab", RUNNING, 0, joined=joined)
    fleet = FleetState(processes=ProcessTable({("r", member): process}))
    return exits.problem_of(CoordinatorState(fleet=fleet), run, replace(EXITED, member=member, **changes))


def test_script_that_never_joined_or_never_trained_has_a_problem() -> None:
    never_joined, never_trained = problem(run_of(members={})), problem(run_of(STARTING), joined=True)
    assert "without joining" in getattr(never_joined, "what", "")
    assert "trained nothing" in getattr(never_trained, "what", "")


def test_member_that_took_part_has_no_problem() -> None:
    assert problem(run_of(TRAINING), joined=True) is None
    assert problem(run_of(STARTING, checkpoint_step=4), joined=True) is None, "others have trained"


def test_exit_that_is_no_end_of_a_script_has_no_problem() -> None:
    run = run_of(members={})
    assert problem(run, cause="user") is None
    assert problem(run, incarnation="2") is None
    assert problem(run, "lab/server-0") is None
    assert problem(run_of(members={}, finished=True)) is None
    assert problem(run_of(members={}, spec=RunSpec("t", ("t.py",), "/", (1, 2), compat="torchrun"))) is None


def test_exit_is_explained_by_what_the_run_knows() -> None:
    nothing = Problem("S999", "trained nothing")
    early = exits.explain(run_of(), EXITED, nothing)
    assert (early.before_first_step, early.joining) == (True, False)
    assert early.trained_nothing == "error[S999] trained nothing"
    late = exits.explain(run_of(members={}, step=7, world=world("lab/1")), EXITED, None)
    assert (late.before_first_step, late.trained_nothing, late.joining) == (False, "", True)


def test_member_of_the_world_does_not_join_it() -> None:
    assert not exits.explain(run_of(world=world("lab/0", "lab/1")), EXITED, None).joining
    too_small = run_of(world=world("lab/1"), settings=MembershipSettings(2, 2))
    assert not exits.explain(too_small, EXITED, None).joining
