"""`shoal rm`: removal of ended runs."""

from __future__ import annotations

import time
from pathlib import Path

import click

from shoal.cli import completions
from shoal.cli.options import OutputOptions, with_output_options
from shoal.cli.output import table
from shoal.doctor import cleanup
from shoal.doctor.cleanup import EndedDirectory
from shoal.errors import RunStillActive, UsageError
from shoal.launch import run_lookup
from shoal.launch.coordinator_target import CoordinatorTarget, home
from shoal.wire.api import RunView

# A coordinator that was started for one run ends within seconds after it.
ENDS_WITHIN_S = 20.0


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", shell_complete=completions.runs)
@click.option("--dry-run", is_flag=True, help="Print what would be removed, and remove nothing.")
@with_output_options
def command(output: OutputOptions, runs: tuple[str, ...], dry_run: bool) -> None:
    """Remove ended runs with all their files.

    Logs, checkpoints and records are deleted; a removed run cannot be resumed. Stop an active run first with shoal
    stop. Runs of one standing coordinator are removed together, after it has ended.
    """
    chosen = choose(runs)
    deadline = time.monotonic() + ENDS_WITHIN_S
    while any(map(is_ending, chosen)) and time.monotonic() < deadline:
        time.sleep(run_lookup.POLL_S)
        chosen = choose(runs)
    directories = [cleanup.describe(directory) for directory in check(chosen)]
    if not dry_run:
        for ended in directories:
            cleanup.remove(Path(ended.directory))
    output.result(directories, lambda: text(directories, dry_run))


def choose(runs: tuple[str, ...]) -> list[tuple[run_lookup.CoordinatorRef, RunView]]:
    """Return the runs that were named, with their coordinators."""
    pairs = run_lookup.all_runs(CoordinatorTarget(home()))
    return [run_lookup.select_run(pairs, run, where=str(home())) for run in runs]


def is_ending(chosen: tuple[run_lookup.CoordinatorRef, RunView]) -> bool:
    """Return whether a run has ended and its own coordinator, as after `shoal stop`, is about to."""
    coordinator, view = chosen
    supervised = coordinator.directory is not None and run_lookup.is_supervised(coordinator.directory)
    return coordinator.client is not None and supervised and view.status in run_lookup.ENDED


def check(chosen: list[tuple[run_lookup.CoordinatorRef, RunView]]) -> list[Path]:
    """Return the directories of the chosen runs; raise if one is active or holds a run that was not chosen."""
    names = {view.run for _, view in chosen}
    directories: dict[Path, None] = {}
    for coordinator, view in chosen:
        if coordinator.client is not None and view.status not in run_lookup.ENDED:
            raise RunStillActive(f"run {view.run} is {view.status}", do=f"stop it first: shoal stop {view.run}")
        if coordinator.client is not None or coordinator.directory is None:
            raise RunStillActive(
                f"coordinator {coordinator.id} of run {view.run} is still running",
                where=str(coordinator.directory or coordinator.url),
                do="try again after it has ended",
            )
        others = sorted({other.run for other in coordinator.records.runs()} - names)
        if others:
            raise UsageError(
                f"run {view.run} shares a directory with other runs",
                where=str(coordinator.directory),
                why="the runs of one coordinator are removed together",
                do=f"shoal rm {' '.join([*sorted(names), *others])}",
            )
        directories[coordinator.directory] = None
    return list(directories)


def text(directories: list[EndedDirectory], dry_run: bool) -> str:
    """Return one line for each removed directory, and the sum of their sizes."""
    verb = "would remove" if dry_run else "removed"
    lines = [
        f"{verb} {', '.join(ended.runs) or Path(ended.directory).name}  {table.size(ended.size_bytes)}"
        for ended in directories
    ]
    total = table.size(sum(ended.size_bytes for ended in directories))
    return "\n".join([*lines, f"{'would free' if dry_run else 'freed'} {total}"])
