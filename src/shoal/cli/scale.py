"""`shoal scale`: change how many members a run may have."""

from __future__ import annotations

import click

from shoal.cli.frame import Frame, with_frame, with_place
from shoal.errors import UsageError
from shoal.launch import find
from shoal.launch.place import Place
from shoal.launch.render import parse_members
from shoal.wire.views import ScaleAsk


@click.command()
@click.argument("run")
@click.argument("members", metavar="MIN:MAX")
@with_place
@with_frame
def command(frame: Frame, place: Place, run: str, members: str) -> None:
    """Change how many members a run may have.

    Nobody restarts: joiners come in while the others train, and leavers go at the end of a step.
    """
    low, high = parse_members(members)
    coordinator, view = find.find_run(place, run)
    if view.status in find.OVER:
        raise UsageError(f"run {view.run} is over ({view.status})", do=f"shoal resume {view.run} -n {members}")
    view = find.live(coordinator).scale(view.run, ScaleAsk(low, high))
    frame.answer(view, lambda: f"run {view.run} may have {low} to {high} members, and has {view.world_size}")
