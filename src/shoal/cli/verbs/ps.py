"""`shoal ps`: the runs of all coordinators."""

from __future__ import annotations

import time

import click

from shoal.cli.options import OutputOptions, with_frame, with_place
from shoal.cli.output import table
from shoal.launch import run_lookup
from shoal.launch.coordinator_target import CoordinatorTarget
from shoal.wire.api import RunView


@click.command()
@click.option("-a", "--all", "everything", is_flag=True, help="Also all runs that are over, not only the last ten.")
@with_place
@with_frame
def command(frame: OutputOptions, place: CoordinatorTarget, everything: bool) -> None:
    """List runs."""
    views = [view for _, view in run_lookup.all_runs(place)]
    going = [view for view in views if view.status not in run_lookup.OVER]
    over = [view for view in views if view.status in run_lookup.OVER]
    shown = going + (over if everything else over[:10])
    frame.answer(
        shown, lambda: _text(shown, time.time()) if shown else "there are no runs; shoal run SCRIPT starts one"
    )


def _text(views: list[RunView], now: float) -> str:
    rows = [
        (
            view.run,
            view.name,
            f"{view.status}, number {view.queued}" if view.queued else view.status,
            table.count(view.step) + (f"/{table.count(view.total_steps)}" if view.total_steps else ""),
            f"{view.world_size} ({view.members_min}:{view.members_max})",
            table.span((view.ended or now) - view.started),
            "" if view.loss is None else f"{view.loss:.4g}",
            view.user or "-",
            f"{view.cost.spent:.2f}" if view.cost is not None and view.cost.spent else "-",
            f"{view.waits_for}, since {table.span(now - view.since)}" if view.queued else "-",
        )
        for view in views
    ]
    head = ("run", "name", "status", "step", "members", "time", "loss", "user", "spent", "waits for")
    shown = [at for at, title in enumerate(head) if at < 8 or any(row[at] != "-" for row in rows)]
    return table.columns([head[at] for at in shown], [[row[at] for at in shown] for row in rows])
