"""`shoal resume`: go on with a run from its newest checkpoint."""

from __future__ import annotations

import os
import time
from pathlib import Path

import click
import msgspec

from shoal.cli.options import OutputOptions, with_frame, with_place
from shoal.cli.verbs.run import start
from shoal.errors import RunStillActive
from shoal.launch import launch_plan as launching
from shoal.launch import run_lookup, settings_layers
from shoal.launch.coordinator_target import CoordinatorTarget
from shoal.launch.launch_plan import LaunchPlan
from shoal.launch.supervisor import COORDINATOR_LOG, port_if_free
from shoal.wire.api import RunView

# What was hired is given back first.
ENDING_S = 90.0
EVERY_S = 0.2


@click.command()
@click.argument("run")
@click.option("-n", "--members", metavar="MIN:MAX", help="How many members from now on.  [default: as before]")
@click.option("--budget", type=float, metavar="AMOUNT", help="What machines may cost in all, with what they have cost.")
@click.option("--detach", is_flag=True, help="Return when the run is accepted, and leave it running.")
@with_place
@with_frame
def command(
    frame: OutputOptions, place: CoordinatorTarget, run: str, members: str | None, budget: float | None, detach: bool
) -> None:
    """Go on with a run that was stopped or lost all its members.

    It continues at the exact step of its newest checkpoint, in the middle of an epoch if need be.
    """
    bounds = launching.parse_members(members, "-n") if members is not None else None
    launching.check_budget(budget, "--budget")
    coordinator, view = run_lookup.find_run(place, run)
    deadline = time.monotonic() + ENDING_S
    while _about_to_end(coordinator, view) and time.monotonic() < deadline:
        time.sleep(EVERY_S)
        coordinator, view = run_lookup.find_run(place, view.run)
    if coordinator.client is not None:
        if view.status not in run_lookup.OVER:
            raise RunStillActive(f"run {view.run} goes on ({view.status})", do=f"shoal status {view.run}")
        standing = CoordinatorTarget(place.home, coordinator.url, coordinator.token_file)
        again = LaunchPlan(directory="", coordinator=(), agent=(), resume=view.run, members=bounds, budget=budget)
        start(frame, standing, again, detach=detach)
        return
    assert coordinator.directory is not None
    choices = settings_layers.choose(Path.cwd(), os.environ)
    launch = launching.render(coordinator.directory, choices, None, port_if_free(coordinator.url))
    start(frame, place, msgspec.structs.replace(launch, resume=view.run, members=bounds, budget=budget), detach=detach)


def _about_to_end(coordinator: run_lookup.CoordinatorRef, view: RunView) -> bool:
    """An embedded coordinator ends right after its run; a run that it was asked to resume meanwhile would end too."""
    if coordinator.client is None or coordinator.directory is None or view.status not in run_lookup.OVER:
        return False
    return (coordinator.directory / COORDINATOR_LOG).exists()
