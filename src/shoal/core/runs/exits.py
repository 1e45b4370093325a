"""Exits of processes: what the state of a run says about one, before the fleet decides on a restart."""

from __future__ import annotations

from dataclasses import replace

from shoal.core.fleet import events as fe
from shoal.core.membership.state import DONE, REGROUPING, STARTING, TRAINER, TRAINING
from shoal.core.runs.settings import trained_nothing
from shoal.core.runs.spec import Problem
from shoal.core.runs.state import CoordinatorState, RunState


def left_its_loop(run: RunState, event: fe.ProcessExited) -> bool:
    """Return whether a trainer of a world exited with code 0 and could not report that its script left the loop."""
    if event.cause != "done" or run.membership.finished or run.membership.stopping is not None:
        return False
    member = run.membership.members.get(event.member)
    if member is None:
        return event.member in run.membership.lost_from_world
    held = member.status in (TRAINING, REGROUPING) or member.step is not None
    return member.incarnation == event.incarnation and member.status != DONE and held


def problem_of(state: CoordinatorState, run: RunState, event: fe.ProcessExited) -> Problem | None:
    """Return the error of a trainer that reached the end of its script without taking part; None if it did.

    It never connected; or it connected, had nothing to train yet, and no member has committed a step either.
    """
    process = state.fleet.processes.get((run.name, event.member))
    ended_well = event.cause == "done" and not (run.spec.compat or run.membership.finished or run.has_ended)
    if not ended_well or process is None or process.incarnation != event.incarnation or process.role != TRAINER:
        return None
    member = run.membership.members.get(event.member)
    began = member is None or member.incarnation != event.incarnation or member.status != STARTING
    if process.joined and (began or not _before_first_step(run)):
        return None
    return trained_nothing(run.spec, joined=process.joined)


def explain(run: RunState, event: fe.ProcessExited, problem: Problem | None) -> fe.ProcessExited:
    """Return the event with what the run knows and the process does not."""
    text = f"error[{problem.code}] {problem.what}" if problem is not None else ""
    joining = _trains_without(run, event.member)
    return replace(event, before_first_step=_before_first_step(run), trained_nothing=text, joining=joining)


def _trains_without(run: RunState, member: str) -> bool:
    """Return whether a world of at least the minimum of members trains, and this member has no seat in it."""
    world, low = run.membership.world, run.membership.settings.min_members
    return world is not None and world.size >= low and world.rank_of(member) is None


def _before_first_step(run: RunState) -> bool:
    """Return whether no step of a run is known to be committed; an unmodified script does not report its steps."""
    state = run.membership
    return not (run.spec.compat or run.spec.resume or state.step or state.checkpoint_step is not None)
