"""`shoal submit`: a run handed to a standing coordinator."""

from __future__ import annotations

import time
from typing import Any

import click

from shoal.cli.options import OutputOptions, with_output_options, with_target_options
from shoal.cli.verbs.run import plan_from_options, with_run_options
from shoal.errors import UsageError
from shoal.launch.coordinator_target import CoordinatorTarget
from shoal.wire.api import RunView

QUEUED_WITHIN_S = 0.3


@click.command(context_settings={"allow_interspersed_args": False})
@with_run_options
@with_target_options
@with_output_options
def command(output: OutputOptions, target: CoordinatorTarget, **options: Any) -> None:
    """Submit a run to a standing coordinator and return.

    Prints the id of the run and its place in the queue as soon as it is accepted. The coordinator is the one of --url
    and --token-file, or of SHOAL_URL and SHOAL_TOKEN_FILE; with the same options, ps, status, logs, why, scale and stop
    find the run there from any machine.
    """
    if not target.url:
        raise UsageError(
            "no coordinator given",
            do="add --url and --token-file, or set SHOAL_URL and SHOAL_TOKEN_FILE; shoal run needs neither",
        )
    plan = plan_from_options(output, target, **options)
    if plan is None:
        return
    from shoal.cli.foreground import submit_to_standing

    client, view = submit_to_standing(target, plan)
    # Whether the run has to wait is mostly known a moment later.
    time.sleep(QUEUED_WITHIN_S)
    view = client.run(view.run)
    output.result(view, lambda: text(view, target.options))


def text(view: RunView, options: str = "") -> str:
    """Return what became of the run so far, and the commands for it; `options` address its coordinator."""
    user = f" as a run of {view.user}" if view.user else ""
    lines = [f"run {view.run} accepted{user}"]
    if view.queued:
        lines.append(f"queue   number {view.queued}, waits for {view.waits_for}")
    verbs = {"status": "shoal status", "logs": "shoal logs -f", "stop": "shoal stop"}
    return "\n".join([*lines, *(f"{name:<8}{verb} {view.run}{options}" for name, verb in verbs.items())])
