"""`shoal submit`: hand a run to a standing coordinator, and leave it there."""

from __future__ import annotations

import time
from typing import Any

import click

from shoal.cli.options import OutputOptions, with_frame, with_place
from shoal.cli.verbs.run import launch_of, with_run
from shoal.errors import UsageError
from shoal.launch.coordinator_target import CoordinatorTarget
from shoal.wire.api import RunView

SETTLED_S = 0.3


@click.command(context_settings={"allow_interspersed_args": False})
@with_run
@with_place
@with_frame
def command(frame: OutputOptions, place: CoordinatorTarget, **asked: Any) -> None:
    """Hand a run to a standing coordinator, and leave it there.

    Returns as soon as it is accepted, with the name of the run and its place in the queue. The coordinator is that of
    --url and --token-file, or of SHOAL_URL and SHOAL_TOKEN_FILE. ps, status, logs, why, scale and stop find it there,
    from any machine.
    """
    if not place.url:
        raise UsageError(
            "submit to which coordinator?",
            do="name it with --url and --token-file, or set SHOAL_URL and SHOAL_TOKEN_FILE; shoal run needs none",
        )
    launch = launch_of(frame, place, **asked)
    if launch is None:
        return
    from shoal.cli.foreground import hand_in

    client, view = hand_in(place, launch)
    # Whether it has to wait is mostly known a moment later.
    time.sleep(SETTLED_S)
    view = client.run(view.run)
    frame.answer(view, lambda: text(view))


def text(view: RunView) -> str:
    """What became of it so far, and how to ask."""
    whose = f" as a run of {view.user}" if view.user else ""
    lines = [f"run {view.run} is accepted{whose}"]
    if view.queued:
        lines.append(f"queue   number {view.queued}, waits for {view.waits_for}")
    verbs = {"status": "shoal status", "logs": "shoal logs -f", "stop": "shoal stop"}
    return "\n".join([*lines, *(f"{name:<8}{verb} {view.run}" for name, verb in verbs.items())])
