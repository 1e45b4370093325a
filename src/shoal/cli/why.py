"""`shoal why`: the story of a run or of one member, with the reasons."""

from __future__ import annotations

import time

import click

from shoal.cli import find, table
from shoal.cli.display import sentence
from shoal.cli.find import Records
from shoal.cli.frame import Frame, Place, with_frame, with_place
from shoal.errors import UsageError
from shoal.wire.views import RunView, StoryLine

PAGE = 1000


@click.command()
@click.argument("run", required=False)
@click.argument("member", required=False)
@with_place
@with_frame
def command(frame: Frame, place: Place, run: str | None, member: str | None) -> None:
    """Tell what happened to a run or a member, and why.

    A member looks like local/2; the run may be left out if there is only one.
    """
    if run is not None and member is None and "/" in run:
        run, member = None, run
    coordinator, view = find.find_run(place, run)
    lines = story(coordinator.records, view.run, member or "")
    if member and not lines:
        known = sorted({line.member for line in story(coordinator.records, view.run, "") if line.member})
        do = f"its members were {', '.join(known)}" if known else ""
        raise UsageError(f"run {view.run} had no member {member}", do=do)
    frame.answer(lines, lambda: text(view, lines))


def story(records: Records, run: str, member: str) -> list[StoryLine]:
    """All of a story, page by page."""
    lines: list[StoryLine] = []
    while True:
        page = records.story(run, member, lines[-1].seq if lines else 0, PAGE)
        lines.extend(page)
        if not page:
            return lines


def text(view: RunView, lines: list[StoryLine]) -> str:
    """The story for people: when, at which step, what and why."""
    if not lines:
        return f"nothing has happened to {view.run} yet"
    rows = [(_moment(line.at), "" if line.step is None else table.count(line.step), sentence(line)) for line in lines]
    now = f"now: {view.status}" + (f", {view.reason}" if view.reason else "")
    return f"{table.columns(('time', 'step', 'what happened'), rows)}\n{now}"


def _moment(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at)) + f".{int(at * 1000) % 1000:03d}"
