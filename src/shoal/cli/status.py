"""`shoal status`: one run and its members, now."""

from __future__ import annotations

import time

import click

from shoal.cli import find, table
from shoal.cli.display import progress
from shoal.cli.frame import Frame, Place, with_frame, with_place
from shoal.wire.views import RunView


@click.command()
@click.argument("run", required=False)
@with_place
@with_frame
def command(frame: Frame, place: Place, run: str | None) -> None:
    """Show a run and its members.

    RUN is an id, a name, or the beginning of one; without it, the run that goes on or the newest.
    """
    coordinator, view = find.find_run(place, run)
    frame.answer(view, lambda: text(view, time.time(), live=coordinator.client is not None))


def text(view: RunView, now: float, *, live: bool) -> str:
    """A run for people."""
    going = view.status not in find.OVER
    gone = "  (its coordinator is not running; this is what it wrote last)" if going and not live else ""
    lines = [
        f"run         {view.run} ({view.name}), {view.status}{gone}",
        f"script      {' '.join(view.argv)}",
        f"progress    {progress(view)}",
        f"time        {table.span((view.ended or now) - view.started)}",
        f"members     {view.losses} lost, {view.joins} joined",
    ]
    if view.reason:
        lines.append(f"why         {view.reason}")
    if view.last_change:
        lines.append(f"last change {view.last_change}")
    if view.checkpoint_step is not None:
        lines.append(f"checkpoint  step {table.count(view.checkpoint_step)}, {view.checkpoint_path}")
    if view.exit_code is not None:
        lines.append(f"exit code   {view.exit_code}")
    lines.append(f"directory   {view.directory}")
    if view.members and going:
        lines += ["", _members(view)]
    return "\n".join(lines)


def _members(view: RunView) -> str:
    rows = [
        (
            one.member,
            one.status,
            "" if one.rank is None else str(one.rank),
            "" if one.step is None else table.count(one.step),
            str(one.share),
            f"{one.phase} for {table.span(one.phase_age_s)}" if one.phase else "",
            table.count(one.samples_per_s),
            str(one.pid),
            one.host,
        )
        for one in sorted(view.members, key=lambda one: (one.rank is None, one.rank or 0, one.member))
    ]
    head = ("member", "status", "rank", "step", "share", "phase", "samples/s", "pid", "host")
    return table.columns(head, rows)
