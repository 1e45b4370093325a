"""`shoal why`: the story of a run or of one member, with the reasons."""

from __future__ import annotations

import time
from collections.abc import Sequence

import click

from shoal.cli.options import OutputOptions, with_output_options, with_target_options
from shoal.cli.output import table
from shoal.cli.output.lines import SHARES, sentence
from shoal.cli.verbs.logs import check_member
from shoal.launch import run_lookup
from shoal.launch.coordinator_target import CoordinatorTarget
from shoal.wire.api import RunView, StoryLine

# Decisions of the whole world, which concern each of its members.
COMMON_KINDS = (SHARES, "BatchDecided")
FOLD_ABOVE, FIRST, LAST = 8, 3, 3


@click.command()
@click.argument("run", required=False)
@click.argument("member", required=False)
@with_target_options
@with_output_options
def command(output: OutputOptions, target: CoordinatorTarget, run: str | None, member: str | None) -> None:
    """Show what happened to a run or a member, and why.

    MEMBER is a name such as local/2. RUN may be left out if only one run is active.
    """
    if run is not None and member is None and "/" in run:
        run, member = None, run
    coordinator, view = run_lookup.find_run(target, run)
    if member:
        check_member(coordinator.records, view, member)
    all_lines = run_lookup.whole_story(coordinator.records, view.run)
    lines = member_story(all_lines, member) if member else all_lines
    output.result(lines, lambda: text(view, lines))


def member_story(lines: Sequence[StoryLine], member: str) -> list[StoryLine]:
    """Return the lines about one member, and the common decisions of its time."""
    own = [line for line in lines if line.member == member]
    if not own:
        return []
    first, last = own[0].seq, own[-1].seq if own[-1].kind == "ProcessExited" else lines[-1].seq
    return [line for line in lines if line.member == member or (line.kind in COMMON_KINDS and first < line.seq <= last)]


def text(view: RunView, lines: list[StoryLine]) -> str:
    """Return the story as a table: time, step, and what happened."""
    if not lines:
        return f"nothing has happened to {view.run} yet"
    rows = [row for group in _groups(lines) for row in _rows(group)]
    now = f"now: {view.status}" + (f", {view.reason}" if view.reason else "")
    return f"{table.columns(('time', 'step', 'what happened'), rows)}\n{now}"


def _groups(lines: Sequence[StoryLine]) -> list[list[StoryLine]]:
    """Return consecutive changes of shares as one group, and every other line as a group of its own."""
    groups: list[list[StoryLine]] = []
    for line in lines:
        if line.kind == SHARES and groups and groups[-1][-1].kind == SHARES:
            groups[-1].append(line)
        else:
            groups.append([line])
    return groups


def _rows(group: Sequence[StoryLine]) -> list[tuple[str, str, str]]:
    if len(group) <= FOLD_ABOVE:
        return [_row(line) for line in group]
    folded = f"… {len(group) - FIRST - LAST} more changes of shares; shoal why --json shows them all"
    return [*map(_row, group[:FIRST]), ("", "", folded), *map(_row, group[-LAST:])]


def _row(line: StoryLine) -> tuple[str, str, str]:
    return _moment(line.at), "" if line.step is None else table.count(line.step), sentence(line)


def _moment(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at)) + f".{int(at * 1000) % 1000:03d}"
