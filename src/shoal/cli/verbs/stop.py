"""`shoal stop`: the end of a run, with a checkpoint or at once."""

from __future__ import annotations

import time

import click

from shoal.cli import completions
from shoal.cli.options import OutputOptions, with_output_options, with_target_options
from shoal.cli.output.lines import resume_advice
from shoal.errors import CoordinatorUnreachable
from shoal.launch import run_lookup
from shoal.launch.coordinator_target import CoordinatorTarget
from shoal.wire.api import RunView, StopRequest

POLL_S = 0.2


@click.command()
@click.argument("run", shell_complete=completions.runs)
@click.option("--now", is_flag=True, help="Stop at once; steps since the last checkpoint are lost.")
@click.option("--reason", default=StopRequest().reason, help="Reason for the story of the run.")
@click.option("--wait", "wait_s", default=60.0, show_default=True, help="Seconds to wait for the end; 0 for none.")
@with_target_options
@with_output_options
def command(output: OutputOptions, target: CoordinatorTarget, run: str, now: bool, reason: str, wait_s: float) -> None:
    """Stop a run after a checkpoint."""
    coordinator, view = run_lookup.find_run(target, run)
    if view.status in run_lookup.ENDED:
        output.result(view, lambda: f"run {view.run} has already ended: {view.status}")
        return
    client = run_lookup.require_live(coordinator)
    request = StopRequest(reason, checkpoint=False, grace_s=1.0) if now else StopRequest(reason)
    view = client.stop(view.run, request)
    deadline = time.monotonic() + wait_s
    while view.status not in run_lookup.ENDED and time.monotonic() < deadline:
        time.sleep(POLL_S)
        try:
            view = client.run(view.run)
        except CoordinatorUnreachable:
            # A coordinator of `shoal run` ends right after its run; its last record is on disk.
            view = run_lookup.find_run(target, view.run)[1]
    output.result(view, lambda: text(view, target.options))


def text(view: RunView, options: str = "") -> str:
    """Return how a run ended, what is kept of it, and where a resumed run would continue."""
    if view.status not in run_lookup.ENDED:
        return f"run {view.run} is {view.status}"
    kept = "no checkpoint" if view.checkpoint_step is None else f"checkpoint of step {view.checkpoint_step}"
    advice = resume_advice(view.run, view.step, view.checkpoint_step, options)
    again = f"\n{advice}" if view.status in ("stopped", "resumable") else ""
    return f"run {view.run} {view.status} at step {view.step}, {kept}{again}"
