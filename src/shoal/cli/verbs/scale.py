"""`shoal scale`: change how many members a run may have."""

from __future__ import annotations

import click

from shoal.cli.options import OutputOptions, with_frame, with_place
from shoal.errors import UsageError
from shoal.launch import run_lookup
from shoal.launch.coordinator_target import CoordinatorTarget
from shoal.launch.launch_plan import check_budget, parse_members
from shoal.wire.api import ScaleRequest


@click.command()
@click.argument("run")
@click.argument("members", metavar="[MIN:MAX]", required=False)
@click.option("--budget", type=float, metavar="AMOUNT", help="What machines may cost in all from now on.")
@with_place
@with_frame
def command(
    frame: OutputOptions, place: CoordinatorTarget, run: str, members: str | None, budget: float | None
) -> None:
    """Change how many members a run may have.

    Or, with --budget, what they may cost. Nobody restarts: joiners come in while the others train, and leavers go at
    the end of a step. Machines of the last of the run's pools are given back first.
    """
    if members is None and budget is None:
        raise UsageError("scale to what?", do=f"shoal scale {run} MIN:MAX, or --budget AMOUNT")
    check_budget(budget, "--budget")
    coordinator, view = run_lookup.find_run(place, run)
    low, high = parse_members(members) if members is not None else (view.members_min, view.members_max)
    if view.status in run_lookup.OVER:
        raise UsageError(f"run {view.run} is over ({view.status})", do=f"shoal resume {view.run} -n {low}:{high}")
    view = run_lookup.live(coordinator).scale(view.run, ScaleRequest(low, high, budget))
    money = f" for {budget:.2f} in all" if budget is not None else ""
    frame.answer(view, lambda: f"run {view.run} may have {low} to {high} members{money}, and has {view.world_size}")
