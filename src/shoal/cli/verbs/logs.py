"""`shoal logs`: what the members print."""

from __future__ import annotations

import time

import click

from shoal.cli.options import OutputOptions, with_frame, with_place
from shoal.errors import CoordinatorUnreachable
from shoal.launch import run_lookup
from shoal.launch.coordinator_target import CoordinatorTarget
from shoal.launch.run_lookup import RunRecords

PAGE = 1000
FOLLOW_EVERY_S = 0.5


@click.command()
@click.argument("run", required=False)
@click.option("-f", "--follow", is_flag=True, help="Go on with new lines until the run is over.")
@click.option("--member", default="", help="Only this member's lines.")
@click.option("-n", "--lines", type=click.IntRange(min=1), help="Only the last so many lines.")
@with_place
@with_frame
def command(
    frame: OutputOptions, place: CoordinatorTarget, run: str | None, follow: bool, member: str, lines: int | None
) -> None:
    """Print what the members of a run print."""
    coordinator, view = run_lookup.find_run(place, run)
    after = _print_so_far(frame, coordinator.records, view.run, member, lines)
    while follow and coordinator.client is not None:
        try:
            over = coordinator.records.run(view.run).status in run_lookup.OVER
            page = coordinator.records.logs(view.run, member, after, PAGE)
        except CoordinatorUnreachable:
            # An embedded coordinator ends with its run, and is back in a moment if it was merely killed.
            if run_lookup.find_run(place, view.run)[0].client is None:
                return
            time.sleep(FOLLOW_EVERY_S)
            continue
        _print(frame, page.lines)
        after = page.next
        if not page.lines:
            if over:
                return
            time.sleep(FOLLOW_EVERY_S)


def _print_so_far(frame: OutputOptions, records: RunRecords, run: str, member: str, lines: int | None) -> int:
    after = -lines if lines else 0
    while True:
        page = records.logs(run, member, after, PAGE)
        _print(frame, page.lines)
        if not page.lines:
            return page.next
        after = page.next


def _print(frame: OutputOptions, lines: tuple[tuple[str, str], ...]) -> None:
    import msgspec

    for member, text in lines:
        if frame.json:
            click.echo(msgspec.json.encode({"member": member, "text": text}))
        else:
            click.echo(f"{member} | {text}")
