"""`shoal why`: the story of a run or of one member, with the reasons."""

from __future__ import annotations

import difflib
import time
from collections.abc import Sequence
from datetime import datetime
from datetime import time as clock

import click

from shoal.cli import completions
from shoal.cli.options import (
    DURATION_UNITS,
    OutputOptions,
    parse_duration,
    with_output_options,
    with_target_options,
)
from shoal.cli.output import incidents, table
from shoal.cli.output.lines import SHARES, sentence
from shoal.core.nouns import plural
from shoal.errors import UsageError
from shoal.launch import run_lookup
from shoal.launch.coordinator_target import CoordinatorTarget
from shoal.wire.api import RunView, StoryLine

# Decisions of the whole world, which concern each of its members.
COMMON_KINDS = (SHARES, "BatchDecided")
FOLD_ABOVE, FIRST, LAST = 8, 3, 3


@click.command()
@click.argument("run", shell_complete=completions.runs, required=False)
@click.argument("member", required=False)
@click.option("--all", "everything", is_flag=True, help="Show every line, not only incidents.")
@click.option(
    "--since", metavar="TIME", help="Earliest time to show: 14:30, 2026-11-17T14:30, or 10m for ten minutes ago."
)
@click.option("--kind", "kinds", metavar="KINDS", help="Kinds of incidents to show, such as loss,join.")
@with_target_options
@with_output_options
def command(
    output: OutputOptions,
    target: CoordinatorTarget,
    run: str | None,
    member: str | None,
    everything: bool,
    since: str | None,
    kinds: str | None,
) -> None:
    """Show what happened to a run or a member, and why.

    Of a run, incidents are shown: losses, joins, stops, changes of shares, each with its cause and its cost. Of a
    member, and with --all or --json, every line is shown. MEMBER is a name such as local/2. RUN may be left out if only
    one run is active.
    """
    earliest = parse_since(since, time.time()) if since else 0.0
    wanted = parse_kinds(kinds) if kinds else ()
    if run is not None and member is None and "/" in run:
        run, member = None, run
    coordinator, view = run_lookup.find_run(target, run)
    if member:
        run_lookup.check_member(coordinator.records, view, member)
    all_lines = run_lookup.whole_story(coordinator.records, view.run)
    lines = [line for line in (member_story(all_lines, member) if member else all_lines) if line.at >= earliest]
    if everything or member or output.json:
        lines = [line for line in lines if not wanted or incidents.kind_of(line) in wanted]
        output.result(lines, lambda: text(view, lines))
        return
    hidden = [kind for kind in wanted if kind in incidents.HIDDEN]
    shown = [incident for incident in incidents.digest(all_lines, view.step, hidden) if incident.line.at >= earliest]
    incidents_shown = [incident for incident in shown if not wanted or incident.kind in wanted]
    click.echo(table.printable(digest_text(view, incidents_shown)))


def parse_since(given: str, now: float) -> float:
    """Return the time, in seconds since 1970, that a span before now, a time of today or a date means."""
    if given[-1:] in DURATION_UNITS and given[:-1].replace(".", "", 1).isdigit():
        return now - parse_duration(given, "--since")
    try:
        if ":" in given and "-" not in given:
            return datetime.combine(datetime.fromtimestamp(now).date(), clock.fromisoformat(given)).timestamp()
        return datetime.fromisoformat(given).timestamp()
    except ValueError as error:
        raise UsageError(f"--since {given} is not a time", do="write 10m, 2h, 14:30 or '2026-11-17 14:30'") from error


def parse_kinds(given: str) -> tuple[str, ...]:
    """Return the kinds of a comma-separated list; raise UsageError if one does not exist."""
    valid = (*incidents.DIGEST, *incidents.HIDDEN)
    kinds = tuple(kind.strip() for kind in given.split(",") if kind.strip())
    for kind in kinds:
        if kind not in valid:
            near = difflib.get_close_matches(kind, valid, n=1)
            do = f"did you mean {near[0]}?" if near else f"kinds are {', '.join(valid)}"
            raise UsageError(f"--kind {kind} is unknown", do=do)
    return kinds


def digest_text(view: RunView, shown: Sequence[incidents.Incident]) -> str:
    """Return incidents as a table, and how the run is now."""
    rows = [
        (_moment(incident.first_at), _step(incident.line), incident.kind, incident.text.replace("\n", " "))
        for incident in shown
    ]
    listed = table.columns(("time", "step", "incident", "what happened"), rows) if rows else "no incidents"
    return f"{listed}\n{_now(view, listed)}; shoal why {view.run} --all shows every line"


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
    listed = table.columns(("time", "step", "what happened"), rows)
    return f"{listed}\n{_now(view, listed)}"


def _now(view: RunView, listed: str) -> str:
    """Return the status of the run, with its reason unless the lines above say it."""
    reason = view.reason.replace("\n", " ")
    return f"now: {view.status}" + (f", {reason}" if reason and reason not in listed else "")


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
    more = len(group) - FIRST - LAST
    folded = f"… {more} more {plural(more, 'change')} of shares; shoal why --json shows them all"
    return [*map(_row, group[:FIRST]), ("", "", folded), *map(_row, group[-LAST:])]


def _row(line: StoryLine) -> tuple[str, str, str]:
    return _moment(line.at), _step(line), sentence(line)


def _step(line: StoryLine) -> str:
    return "" if line.step is None else table.count(line.step)


def _moment(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at)) + f".{int(at * 1000) % 1000:03d}"
