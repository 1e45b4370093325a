"""`shoal why`: the story of a run or of one member, with the reasons."""

from __future__ import annotations

import time
from collections.abc import Sequence

import click

from shoal.cli.options import OutputOptions, with_frame, with_place
from shoal.cli.output import table
from shoal.cli.output.lines import SHARES, sentence
from shoal.errors import UsageError
from shoal.launch import run_lookup
from shoal.launch.coordinator_target import CoordinatorTarget
from shoal.launch.run_lookup import RunRecords
from shoal.wire.api import RunView, StoryLine

PAGE = 1000
EVERYBODYS = (SHARES, "BatchDecided")
FOLD_ABOVE, FIRST, LAST = 8, 3, 3


@click.command()
@click.argument("run", required=False)
@click.argument("member", required=False)
@with_place
@with_frame
def command(frame: OutputOptions, place: CoordinatorTarget, run: str | None, member: str | None) -> None:
    """Tell what happened to a run or a member, and why.

    A member looks like local/2; the run may be left out if there is only one.
    """
    if run is not None and member is None and "/" in run:
        run, member = None, run
    coordinator, view = run_lookup.find_run(place, run)
    everything = story(coordinator.records, view.run)
    lines = about(everything, member) if member else everything
    if member and not lines:
        known = sorted({line.member for line in everything if line.member})
        do = f"its members were {', '.join(known)}" if known else ""
        raise UsageError(f"run {view.run} had no member {member}", do=do)
    frame.answer(lines, lambda: text(view, lines))


def story(records: RunRecords, run: str) -> list[StoryLine]:
    """All of a story, page by page."""
    lines: list[StoryLine] = []
    while True:
        page = records.story(run, "", lines[-1].seq if lines else 0, PAGE)
        lines.extend(page)
        if not page:
            return lines


def about(lines: Sequence[StoryLine], member: str) -> list[StoryLine]:
    """The story of one member, with what all decided while it was there."""
    own = [line for line in lines if line.member == member]
    if not own:
        return []
    first, last = own[0].seq, own[-1].seq if own[-1].kind == "ProcessExited" else lines[-1].seq
    return [line for line in lines if line.member == member or (line.kind in EVERYBODYS and first < line.seq <= last)]


def text(view: RunView, lines: list[StoryLine]) -> str:
    """The story for people: when, at which step, what and why."""
    if not lines:
        return f"nothing has happened to {view.run} yet"
    rows = [row for stretch in _stretches(lines) for row in _rows(stretch)]
    now = f"now: {view.status}" + (f", {view.reason}" if view.reason else "")
    return f"{table.columns(('time', 'step', 'what happened'), rows)}\n{now}"


def _stretches(lines: Sequence[StoryLine]) -> list[list[StoryLine]]:
    """Changes of shares with nothing else between them together, all other lines by themselves."""
    found: list[list[StoryLine]] = []
    for line in lines:
        if line.kind == SHARES and found and found[-1][-1].kind == SHARES:
            found[-1].append(line)
        else:
            found.append([line])
    return found


def _rows(stretch: Sequence[StoryLine]) -> list[tuple[str, str, str]]:
    if len(stretch) <= FOLD_ABOVE:
        return [_row(line) for line in stretch]
    folded = f"… {len(stretch) - FIRST - LAST} more changes of shares; shoal why --json tells them all"
    return [*map(_row, stretch[:FIRST]), ("", "", folded), *map(_row, stretch[-LAST:])]


def _row(line: StoryLine) -> tuple[str, str, str]:
    return _moment(line.at), "" if line.step is None else table.count(line.step), sentence(line)


def _moment(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at)) + f".{int(at * 1000) % 1000:03d}"
