"""`shoal prune`: removal of all ended runs of a certain age."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import click

from shoal.cli.options import OutputOptions, parse_duration, with_output_options
from shoal.cli.verbs import rm
from shoal.doctor import cleanup
from shoal.errors import RunStillActive
from shoal.launch.coordinator_target import home


@click.command()
@click.option("--older-than", required=True, metavar="AGE", help="Least age, such as 12h or 7d, since the run ended.")
@click.option("--dry-run", is_flag=True, help="Print what would be removed, and remove nothing.")
@with_output_options
def command(output: OutputOptions, older_than: str, dry_run: bool) -> None:
    """Remove all ended runs of a certain age.

    Stopped runs count as ended: their checkpoints are deleted too. Runs whose coordinator is still running are kept.
    The setting retain_days does the same at every start of shoal run.
    """
    removed = []
    for old in cleanup.find_old(home(), parse_duration(older_than, "--older-than")):
        # A run that was resumed a moment ago stays.
        with suppress(RunStillActive):
            if not dry_run:
                cleanup.remove(Path(old.directory))
            removed.append(old)
    nothing = f"nothing to remove: no ended run is older than {older_than}"
    output.result(removed, lambda: rm.text(removed, dry_run) if removed else nothing)
