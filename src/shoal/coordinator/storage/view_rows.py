"""Puts what the journal says into the views, one entry at a time."""

from __future__ import annotations

from typing import Any

from shoal.core.fleet import events as fe
from shoal.core.membership import events as ev
from shoal.core.runs import events as runs_events
from shoal.core.runs.state import Asked, RunState
from shoal.core.runs.story import tell
from shoal.store.journal import JournalEntry
from shoal.store.sqlite_views import MetricRow, SqliteViews, WorldRow
from shoal.wire.api import StoryLine


def put(views: SqliteViews, entry: JournalEntry, event: Any, asked: Asked, run: RunState | None) -> list[StoryLine]:
    """Put all rows of one entry; its story is returned as well."""
    lines = tell(entry.seq, entry.at, entry.run, event, asked)
    views.put_lines(lines)
    _put_event(views, entry, event)
    for name, told in asked:
        if isinstance(told, ev.FormWorld) and len(told.to) == told.world.size:
            _put_world(views, name, told.world.number, told.world.step, entry.at, told)
        elif isinstance(told, ev.ProposeWorld):
            _put_world(views, name, told.world.number, None, entry.at, told)
        elif isinstance(told, ev.DissolveWorld) and run is not None:
            views.end_world(name, told.number, run.membership.step)
    views.reached(entry.seq)
    return lines


def _put_world(
    views: SqliteViews, run: str, number: int, step: int | None, at: float, told: ev.FormWorld | ev.ProposeWorld
) -> None:
    members = tuple(seat.member for seat in told.world.seats)
    views.put_world(run, WorldRow(number, step, None, at, members, told.reason))


def _put_event(views: SqliteViews, entry: JournalEntry, event: Any) -> None:
    run, at = entry.run, entry.at
    match event:
        case ev.MemberConnected(member, incarnation):
            views.put_member(run, member, incarnation, at)
        case ev.MemberLost(member, reason):
            views.end_member(run, member, at, reason)
        case ev.MemberLeft(member):
            views.end_member(run, member, at, "it left")
        case ev.MemberDone(member, step):
            views.end_member(run, member, at, f"done at step {step}")
        case fe.ProcessExited(run=of, member=member, cause=cause, detail=detail):
            views.end_member(of, member, at, detail or cause)
        case ev.WorldEntered(_, world, step):
            views.begin_world(run, world, step)
        case ev.CheckpointWritten(_, step, path):
            views.put_checkpoint(run, step, path, at)
        case runs_events.ProgressMeasured(step=step, loss=loss, samples_per_s=rate):
            views.put_metric(run, MetricRow(at, step, loss, rate))
