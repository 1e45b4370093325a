"""`shoal stop`: end a run, with a checkpoint unless told otherwise."""

from __future__ import annotations

import time

import click

from shoal.cli.options import OutputOptions, with_frame, with_place
from shoal.errors import CoordinatorUnreachable
from shoal.launch import run_lookup
from shoal.launch.coordinator_target import CoordinatorTarget
from shoal.wire.api import RunView, StopRequest

EVERY_S = 0.2


@click.command()
@click.argument("run")
@click.option("--now", is_flag=True, help="End it at once, without a checkpoint.")
@click.option("--reason", default="asked by the user", help="What the story will say.")
@click.option("--wait", "wait_s", default=60.0, show_default=True, help="Seconds to wait until it is over; 0 for none.")
@with_place
@with_frame
def command(frame: OutputOptions, place: CoordinatorTarget, run: str, now: bool, reason: str, wait_s: float) -> None:
    """Stop a run after a checkpoint."""
    coordinator, view = run_lookup.find_run(place, run)
    if view.status in run_lookup.OVER:
        frame.answer(view, lambda: f"run {view.run} is over already: {view.status}")
        return
    client = run_lookup.live(coordinator)
    ask = StopRequest(reason, checkpoint=False, grace_s=1.0) if now else StopRequest(reason)
    view = client.stop(view.run, ask)
    deadline = time.monotonic() + wait_s
    while view.status not in run_lookup.OVER and time.monotonic() < deadline:
        time.sleep(EVERY_S)
        try:
            view = client.run(view.run)
        except CoordinatorUnreachable:
            # An embedded coordinator ends right after its run; what it wrote last is on disk.
            view = run_lookup.find_run(place, view.run)[1]
    frame.answer(view, lambda: _text(view))


def _text(view: RunView) -> str:
    if view.status not in run_lookup.OVER:
        return f"run {view.run} is {view.status}"
    saved = f"checkpoint of step {view.checkpoint_step}" if view.checkpoint_step is not None else "no checkpoint"
    again = f"; shoal resume {view.run} goes on" if view.status in ("stopped", "resumable") else ""
    return f"run {view.run} is {view.status} at step {view.step}, {saved}{again}"
