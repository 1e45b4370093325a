"""Runs a launch in the foreground: display, signals, summary, exit code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click
import msgspec

from shoal import exit_codes
from shoal.cli.follower import Follower, FollowResult
from shoal.cli.options import OutputOptions, interactive, show_error
from shoal.cli.output.lines import Display, JsonLines, PlainOutput, SafeDisplay
from shoal.cli.signals import SignalCounter
from shoal.errors import FetchFailed, UsageError, from_code
from shoal.launch import download
from shoal.launch.api_client import ApiClient, open_client
from shoal.launch.coordinator_target import CoordinatorTarget
from shoal.launch.launch_plan import LaunchPlan
from shoal.launch.supervisor import Supervisor, hand_over
from shoal.wire.api import RunView

PANEL_EVERY_S = 0.4
PLAIN_EVERY_S = 0.8
QUIET_CODES = (exit_codes.OK, exit_codes.RESUMABLE)


def supervise(frame: OutputOptions, launch: LaunchPlan) -> int:
    """Start coordinator, agent and run; follow it to its end; take all down. The exit code."""
    supervisor = Supervisor(launch)
    client, view = supervisor.open()
    in_order = False
    try:
        with SignalCounter() as interrupts:
            seen = watch(frame, client, view, interrupts, supervisor.tend, view.since if launch.resume else 0.0)
            in_order = not seen.abandoned
    finally:
        supervisor.close(client if in_order else None, frame.say)
    code = conclude(frame, seen)
    _say_brought(frame, supervisor.bring_back)
    return code


def submit(frame: OutputOptions, place: CoordinatorTarget, launch: LaunchPlan, *, detach: bool) -> int:
    """Hand the run to a standing coordinator, and follow it unless detached."""
    client, view = hand_in(place, launch)
    if detach:
        frame.answer(view, lambda: f"run {view.run} is accepted; shoal status {view.run}")
        return 0
    with SignalCounter() as interrupts:
        code = conclude(frame, watch(frame, client, view, interrupts, list, view.since if launch.resume else 0.0))
    if launch.spec is not None:
        source, to = download.RemoteRunFolder(client.url, place.token_file, view.run), Path(launch.spec.cwd)
        _say_brought(frame, lambda: download.bring(source, to).names)
    return code


def _say_brought(frame: OutputOptions, bring: Callable[[], tuple[str, ...]]) -> None:
    """Bring back what members elsewhere saved, and say so; what fails costs nothing, as it stays where it is."""
    try:
        names = bring()
    except FetchFailed as error:
        show_error(error, frame.json)
        return
    if names:
        frame.say(f"brought back {', '.join(names)}")


def hand_in(place: CoordinatorTarget, launch: LaunchPlan) -> tuple[ApiClient, RunView]:
    """Submit a run to a standing coordinator, or resume one there."""
    if not place.token_file:
        raise UsageError("--url needs --token-file", why="the coordinator answers only to its token")
    client = open_client(place.url, place.token_file)
    client.check()
    return client, hand_over(client, launch)


def watch(
    frame: OutputOptions,
    client: ApiClient,
    view: RunView,
    interrupts: SignalCounter,
    tend: Callable[[], list[str]],
    since: float = 0.0,
) -> FollowResult:
    """Follow a run on the display that suits where we are."""
    panel = interactive() and not frame.json and not frame.quiet
    display = _display(frame, panel)
    if not panel:
        display.note(f"run {view.run} ({view.name}) in {view.directory or client.url}")
    try:
        follower = Follower(client, view, display, tend, since)
        return follower.follow(interrupts, PANEL_EVERY_S if panel else PLAIN_EVERY_S)
    finally:
        display.close()


def conclude(frame: OutputOptions, seen: FollowResult) -> int:
    """Print the summary; the exit code of the command."""
    # What it knows of takes longer to load than all the rest, and nobody needs it before the end.
    from shoal.cli.output import summary

    facts = summary.of(seen.view, seen.story, abandoned=seen.abandoned)
    try:
        if seen.view.problem is not None:
            show_error(from_code(**msgspec.structs.asdict(seen.view.problem)), frame.json)
            return facts.exit_code
        if frame.json:
            click.echo(msgspec.json.encode({"event": "end", **msgspec.to_builtins(facts)}))
        elif not frame.quiet or facts.exit_code not in QUIET_CODES:
            click.echo(summary.text(facts), err=facts.exit_code not in QUIET_CODES)
    except OSError:
        # The terminal is gone; the run has ended in order all the same.
        return facts.exit_code
    return facts.exit_code


def _display(frame: OutputOptions, panel: bool) -> Display:
    if frame.json:
        return SafeDisplay(JsonLines())
    if panel:
        from shoal.cli.output.live_panel import Panel

        return SafeDisplay(Panel())
    return SafeDisplay(PlainOutput(quiet=frame.quiet))
