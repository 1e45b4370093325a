"""`shoal ps`: the runs of all coordinators."""

from __future__ import annotations

import time
from collections.abc import Sequence

import click

from shoal.cli.options import OutputOptions, show_error, with_output_options, with_target_options
from shoal.cli.output import table
from shoal.launch import run_lookup
from shoal.launch.coordinator_target import CoordinatorTarget
from shoal.launch.run_lookup import DamagedCoordinator
from shoal.wire.api import RunView

ENDED_SHOWN = 10
# The columns from this one on are shown only if some run has a value for them.
FIRST_OPTIONAL = 10


@click.command()
@click.option("-a", "--all", "everything", is_flag=True, help="List all ended runs, not only the last ten.")
@with_target_options
@with_output_options
def command(output: OutputOptions, target: CoordinatorTarget, everything: bool) -> None:
    """List runs.

    Active runs come first, then ended ones, the newest first. Coordinators whose directory cannot be read are listed
    below, each with its error.
    """
    pairs, damaged = run_lookup.runs_and_damage(target)
    views = [view for _, view in pairs]
    active = [view for view in views if view.status not in run_lookup.ENDED]
    ended = [view for view in views if view.status in run_lookup.ENDED]
    shown = active + (ended if everything else ended[:ENDED_SHOWN])
    output.result(shown, lambda: text(shown, time.time()) if shown else "no runs yet; start one: shoal run SCRIPT")
    if output.json:
        for coordinator in damaged:
            show_error(coordinator.error, json=True)
    elif damaged:
        click.echo("\n" + damage_text(damaged))


def damage_text(damaged: Sequence[DamagedCoordinator]) -> str:
    """Return a table of coordinators that cannot be read, and what to do about each."""
    rows = [
        (coordinator.directory.name, "damaged", coordinator.error.code, coordinator.error.what)
        for coordinator in damaged
    ]
    remedies = [
        f"{coordinator.directory.name}: {coordinator.error.do}" for coordinator in damaged if coordinator.error.do
    ]
    return "\n".join([table.columns(("coordinator", "status", "error", "what"), rows), *remedies])


def text(views: list[RunView], now: float) -> str:
    """Return a table of runs."""
    rows = [
        (
            view.run,
            view.name,
            f"{view.status}, number {view.queued}" if view.queued else view.status,
            table.count(view.step) + (f"/{table.count(view.total_steps)}" if view.total_steps else ""),
            f"{view.world_size if view.ended is None else 0} ({view.members_min}:{view.members_max})",
            table.moment(view.started, now),
            table.span((view.ended or now) - view.started),
            table.rough(view.forecast.seconds) if view.forecast and view.forecast.seconds is not None else "",
            "" if view.loss is None else f"{view.loss:.4g}",
            view.user or "-",
            f"{view.cost.spent:.2f}" if view.cost is not None and view.cost.spent else "-",
            f"{view.waits_for}, for {table.span(now - view.since)}" if view.queued else "-",
        )
        for view in views
    ]
    head = ("run", "name", "status", "step", "members", "started", "time", "left", "loss", "user", "spent", "waits for")
    shown = [index for index in range(len(head)) if index < FIRST_OPTIONAL or any(row[index] != "-" for row in rows)]
    return table.columns([head[index] for index in shown], [[row[index] for index in shown] for row in rows])
