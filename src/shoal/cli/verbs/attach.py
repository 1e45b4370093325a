"""`shoal attach`: a run that goes on elsewhere, followed as `shoal run` shows its own."""

from __future__ import annotations

import time
from collections.abc import Callable

import click

from shoal.cli import completions
from shoal.cli.options import OutputOptions, with_output_options, with_target_options
from shoal.cli.signals import SignalCounter
from shoal.errors import CoordinatorUnreachable
from shoal.launch import run_lookup
from shoal.launch.coordinator_target import CoordinatorTarget
from shoal.launch.run_lookup import CoordinatorRef
from shoal.wire.api import RunView


class UncaughtSignals(SignalCounter):
    """Signals that are left to Python: Ctrl-C raises KeyboardInterrupt, so that it never becomes a stop request."""

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


@click.command()
@click.argument("run", shell_complete=completions.runs, required=False)
@with_target_options
@with_output_options
def command(output: OutputOptions, target: CoordinatorTarget, run: str | None) -> None:
    """Follow a run until it ends.

    Shows what shoal run shows in the foreground, from now on, and exits with the run's exit code. Ctrl-C detaches; the
    run continues. RUN may be left out if only one run is active.
    """
    coordinator, view = run_lookup.find_run(target, run)
    try:
        code = attach(output, target, coordinator, view)
    except KeyboardInterrupt:
        options = target.options
        output.note(
            f"detached; run {view.run} continues (shoal attach {view.run}{options}, shoal stop {view.run}{options})"
        )
        return
    click.get_current_context().exit(code)


def attach(output: OutputOptions, target: CoordinatorTarget, coordinator: CoordinatorRef, view: RunView) -> int:
    """Follow a run and print its summary; return its exit code. An ended run is only summarised."""
    from shoal.cli import foreground
    from shoal.cli.follower import FollowResult

    result = FollowResult(view)
    if coordinator.client is not None:
        try:
            check = end_check(coordinator)
            result = foreground.follow(output, coordinator.client, view, UncaughtSignals(), check, time.time())
        except CoordinatorUnreachable:
            # A coordinator of `shoal run` ends right after its run; its last record is on disk.
            coordinator, result.view = run_lookup.find_run(target, view.run)
            if coordinator.client is not None and result.view.status not in run_lookup.ENDED:
                raise
    # The follower has only seen what happened since it was attached.
    try:
        result.story = run_lookup.whole_story(coordinator.records, view.run)
    except CoordinatorUnreachable:
        result.story = run_lookup.whole_story(run_lookup.find_run(target, view.run)[0].records, view.run)
    return foreground.conclude(output, result, target.options)


def end_check(coordinator: CoordinatorRef) -> Callable[[], list[str]]:
    """Return a function that raises CoordinatorUnreachable once the coordinator has ended for good.

    Without it, the follower would take the end for a restart, and wait for it. It restarts nothing: that is the task of
    the run's own supervisor.
    """
    directory = coordinator.directory

    def check() -> list[str]:
        if directory is not None and not run_lookup.is_supervised(directory):
            pid = run_lookup.read_text(directory / "pid")
            if not (pid.isdigit() and run_lookup.process_exists(int(pid))):
                raise CoordinatorUnreachable(f"coordinator {coordinator.id} has ended", where=str(directory))
        return []

    return check
