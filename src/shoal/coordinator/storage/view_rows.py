"""Rows of the stored views, derived from one journal entry at a time."""

from __future__ import annotations

from typing import Any

from shoal.core.fleet import events as fe
from shoal.core.membership import events as ev
from shoal.core.runs.decide import Instructions
from shoal.core.runs.spec import StoryLine
from shoal.core.runs.state import RunState
from shoal.core.runs.story import tell
from shoal.store.journal import JournalEntry
from shoal.store.sqlite_views import SqliteViews, WorldRow


def put(
    views: SqliteViews, entry: JournalEntry, event: Any, instructions: Instructions, run: RunState | None
) -> list[StoryLine]:
    """Queue all rows of one entry and return its story lines; `run` is the state after the event."""
    lines = tell(entry.seq, entry.at, entry.run, event, instructions, run)
    views.put_lines(lines)
    _put_event(views, entry, event)
    for name, instruction in instructions:
        match instruction:
            case ev.FormWorld(world, to) if len(to) == world.size:
                views.put_world(name, _world_row(world.number, world.step, entry.at, instruction))
            case ev.ProposeWorld(_, world):
                views.put_world(name, _world_row(world.number, None, entry.at, instruction))
            case ev.DissolveWorld(number) if run is not None:
                views.end_world(name, number, run.membership.step)
    views.mark_seq(entry.seq)
    return lines


def _world_row(number: int, step: int | None, at: float, instruction: ev.FormWorld | ev.ProposeWorld) -> WorldRow:
    members = tuple(seat.member for seat in instruction.world.seats)
    return WorldRow(number, step, None, at, members, instruction.reason)


def _put_event(views: SqliteViews, entry: JournalEntry, event: Any) -> None:
    run, at = entry.run, entry.at
    match event:
        case ev.MemberConnected(member, incarnation):
            views.put_member(run, member, incarnation, at)
        case ev.MemberLost(member, reason):
            views.end_member(run, member, at, reason)
        case ev.MemberLeft(member):
            views.end_member(run, member, at, "left")
        case ev.MemberDone(member, step):
            views.end_member(run, member, at, f"done at step {step}")
        case fe.ProcessExited(run=process_run, member=member, cause=cause, detail=detail):
            views.end_member(process_run, member, at, detail or cause)
        case ev.WorldEntered(_, world, step):
            views.begin_world(run, world, step)
        case ev.CheckpointWritten(_, step, path):
            views.put_checkpoint(run, step, path, at)
