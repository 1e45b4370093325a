"""`shoal logs`: the output of a run's members."""

from __future__ import annotations

import time

import click

from shoal.cli import completions
from shoal.cli.options import OutputOptions, with_output_options, with_target_options
from shoal.errors import CoordinatorUnreachable
from shoal.launch import run_lookup
from shoal.launch.coordinator_target import CoordinatorTarget
from shoal.launch.run_lookup import RunRecords
from shoal.wire.api import RunView

PAGE = 1000
FOLLOW_EVERY_S = 0.5


@click.command()
@click.argument("run", shell_complete=completions.runs, required=False)
@click.option("-f", "--follow", is_flag=True, help="Follow new lines until the run ends.")
@click.option("--member", default="", help="Print the lines of this member only, such as local/2.")
@click.option("-n", "--lines", type=click.IntRange(min=1), help="Print the last N lines only.", metavar="N")
@with_target_options
@with_output_options
def command(
    output: OutputOptions, target: CoordinatorTarget, run: str | None, follow: bool, member: str, lines: int | None
) -> None:
    """Print the output of a run's members."""
    coordinator, view = run_lookup.find_run(target, run)
    if member:
        run_lookup.check_member(coordinator.records, view, member)
    after, printed = _print_existing(output, coordinator.records, view.run, member, lines)
    if not printed:
        click.echo(f"shoal: {_why_nothing(view, member, follow=follow)}", err=True)
    while follow and coordinator.client is not None:
        try:
            has_ended = coordinator.records.run(view.run).status in run_lookup.ENDED
            page = coordinator.records.logs(view.run, member, after, PAGE)
        except CoordinatorUnreachable:
            # A coordinator of `shoal run` ends with its run; one that was killed is back in a moment.
            if run_lookup.find_run(target, view.run)[0].client is None:
                return
            time.sleep(FOLLOW_EVERY_S)
            continue
        _print(output, page.lines)
        after = page.next
        if not page.lines:
            if has_ended:
                return
            time.sleep(FOLLOW_EVERY_S)


def _why_nothing(view: RunView, member: str, *, follow: bool) -> str:
    """Return why no line was printed."""
    subject = f"{member} has" if member else f"the members of {view.run} have"
    more = " yet; waiting for lines" if follow else "" if view.status in run_lookup.ENDED else " yet"
    return f"{subject} printed nothing{more}"


def _print_existing(
    output: OutputOptions, records: RunRecords, run: str, member: str, lines: int | None
) -> tuple[int, bool]:
    """Print the lines so far, or the last ones; return the position after them, and whether there were any."""
    after, printed = -lines if lines else 0, False
    while True:
        page = records.logs(run, member, after, PAGE)
        _print(output, page.lines)
        if not page.lines:
            return page.next, printed
        after, printed = page.next, True


def _print(output: OutputOptions, lines: tuple[tuple[str, str], ...]) -> None:
    import msgspec

    for member, text in lines:
        if output.json:
            click.echo(msgspec.json.encode({"member": member, "text": text}))
        else:
            click.echo(f"{member} | {text}")
