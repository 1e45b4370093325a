"""`shoal resume`: continuation of a run from its newest checkpoint."""

from __future__ import annotations

import os
import time
from pathlib import Path

import click
import msgspec

from shoal.cli import completions
from shoal.cli.options import OutputOptions, with_output_options, with_target_options
from shoal.cli.verbs.run import start
from shoal.errors import RunAlreadyEnded, RunStillActive
from shoal.launch import launch_plan, run_lookup, run_request, settings_layers
from shoal.launch.coordinator_target import CoordinatorTarget
from shoal.launch.launch_plan import LaunchPlan
from shoal.launch.supervisor import COORDINATOR_LOG, port_if_free
from shoal.wire.api import RunView

# A coordinator that ends releases its machines first.
SHUTDOWN_TIMEOUT_S = 90.0
POLL_S = 0.2


@click.command()
@click.argument("run", shell_complete=completions.runs)
@click.option("-n", "--members", metavar="MIN:MAX", help="Number of members.  [default: as before]")
@click.option("--budget", type=float, metavar="AMOUNT", help="Spending limit, including what was spent before.")
@click.option("--detach", is_flag=True, help="Return when the run is accepted and leave it running.")
@with_target_options
@with_output_options
def command(
    output: OutputOptions,
    target: CoordinatorTarget,
    run: str,
    members: str | None,
    budget: float | None,
    detach: bool,
) -> None:
    """Continue a run from its newest checkpoint.

    The run may have been stopped, have failed, or have lost all its members or its coordinator. It continues at the
    exact step of the checkpoint, also in the middle of an epoch; without a checkpoint it starts over at step 0.
    """
    bounds = run_request.parse_members(members, "-n") if members is not None else None
    run_request.check_budget(budget, "--budget")
    coordinator, view = run_lookup.find_run(target, run)
    deadline = time.monotonic() + SHUTDOWN_TIMEOUT_S
    while _is_shutting_down(coordinator, view) and time.monotonic() < deadline:
        time.sleep(POLL_S)
        coordinator, view = run_lookup.find_run(target, view.run)
    if view.status == "done":
        raise done_error(view, target.options)
    if coordinator.client is not None:
        if view.status not in run_lookup.ENDED:
            raise RunStillActive(f"run {view.run} is {view.status}", do=f"shoal status {view.run}{target.options}")
        standing = CoordinatorTarget(target.home, coordinator.url, coordinator.token_file)
        plan = LaunchPlan(directory="", coordinator=(), agent=(), resume=view.run, members=bounds, budget=budget)
        start(output, standing, plan, detach=detach)
        return
    assert coordinator.directory is not None
    settings = settings_layers.resolve(Path.cwd(), os.environ)
    plan = launch_plan.plan_launch(coordinator.directory, settings, None, port_if_free(coordinator.url))
    start(output, target, msgspec.structs.replace(plan, resume=view.run, members=bounds, budget=budget), detach=detach)


def done_error(view: RunView, options: str = "") -> RunAlreadyEnded:
    """Return the error for a run that has trained to its end."""
    return RunAlreadyEnded(
        f"run {view.run} is done",
        why="there is nothing left to train",
        do=f"to train again, start a new run; shoal status {view.run}{options} shows what this one left",
    )


def _is_shutting_down(coordinator: run_lookup.CoordinatorRef, view: RunView) -> bool:
    """Return whether the coordinator of a `shoal run` is about to end, and would end a resumed run with it."""
    if coordinator.client is None or coordinator.directory is None or view.status not in run_lookup.ENDED:
        return False
    return (coordinator.directory / COORDINATOR_LOG).exists()
