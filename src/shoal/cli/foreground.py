"""A run in the foreground: display, signals, summary and exit code.

Theory of operation
-------------------
`shoal run` stays in the terminal until its run has ended. It never trains itself: it polls the coordinator a few times
a second, prints what is new, restarts a coordinator or agent that died, and translates signals. Children live in
sessions of their own, so a Ctrl-C in the terminal reaches only this process, which decides what it means:

======================  ====================================================================================
signals so far          effect
======================  ====================================================================================
first Ctrl-C            stop request with a checkpoint: members finish their step, save, and leave; exit code 75
second Ctrl-C           stop request without a checkpoint, with one second of grace; waits up to 5 s for the end
third, or 5 s later     abandon: the lifelines are closed, which ends coordinator, agent and members at once
======================  ====================================================================================

SIGTERM and SIGHUP (a closed terminal) count like Ctrl-C, unless they were ignored when the command was started
(`nohup`); signals within a second of each other count once. After SIGHUP nothing can be printed any more; the displays
swallow that error, because the stop with its checkpoint must still happen. While the coordinator does not answer, a
signal stays pending for at most 30 s, which is said; a second one, or the end of that time, abandons the run.

With `--url` the run belongs to a standing coordinator. Signals mean the same, but nothing is started or torn down here.

When the run has ended, machines are released, the services stop, the summary is printed, and files that remote members
saved are copied to where local ones would have saved them. The exit code is the run's own: 0 done, 1 failed,
75 stopped or resumable, or the code that an error prescribes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click
import msgspec

from shoal import exit_codes
from shoal.cli.follower import Follower, FollowResult
from shoal.cli.options import OutputOptions, interactive, show_error
from shoal.cli.output import table
from shoal.cli.output.lines import Display, JsonLines, PlainOutput, SafeDisplay
from shoal.cli.signals import SignalCounter
from shoal.errors import FetchFailed, UsageError, from_code
from shoal.launch.api_client import ApiClient, open_client
from shoal.launch.coordinator_target import CoordinatorTarget
from shoal.launch.download import RemoteRunFolder, download
from shoal.launch.launch_plan import LaunchPlan
from shoal.launch.supervisor import Supervisor, submit_or_resume
from shoal.wire.api import RunView

PANEL_EVERY_S = 0.4
PLAIN_EVERY_S = 0.8
QUIET_CODES = (exit_codes.OK, exit_codes.RESUMABLE)


def supervise(output: OutputOptions, plan: LaunchPlan) -> int:
    """Carry out the plan, follow its run to the end, and stop all processes; return the exit code."""
    supervisor = Supervisor(plan)
    client, view = supervisor.open()
    clean_end = False
    try:
        with SignalCounter() as signals:
            since = view.since if plan.resume else 0.0
            result = follow(output, client, view, signals, supervisor.restart_dead_services, since)
            clean_end = not result.abandoned
    finally:
        supervisor.close(client if clean_end else None, output.note)
    code = conclude(output, result)
    _download_outputs(output, supervisor.download_outputs)
    return code


def submit(output: OutputOptions, target: CoordinatorTarget, plan: LaunchPlan, *, detach: bool) -> int:
    """Submit the run to a standing coordinator and follow it unless detached; return the exit code."""
    client, view = submit_to_standing(target, plan)
    if detach:
        output.result(view, lambda: f"run {view.run} accepted; shoal status {view.run}{target.options}")
        return 0
    with SignalCounter() as signals:
        result = follow(output, client, view, signals, list, view.since if plan.resume else 0.0)
        code = conclude(output, result, target.options)
    if plan.spec is not None:
        source, to = RemoteRunFolder(client.url, target.token_file, view.run), Path(plan.spec.cwd)
        _download_outputs(output, lambda: download(source, to).names)
    return code


def _download_outputs(output: OutputOptions, fetch: Callable[[], tuple[str, ...]]) -> None:
    """Download what remote members saved and say so; a failure is only shown, since the files stay where they are."""
    try:
        names = fetch()
    except FetchFailed as error:
        show_error(error, output.json)
        return
    if names:
        output.note(f"downloaded {', '.join(names)}")


def submit_to_standing(target: CoordinatorTarget, plan: LaunchPlan) -> tuple[ApiClient, RunView]:
    """Submit a run to a standing coordinator, or resume it; return a client and the accepted run."""
    if not target.token_file:
        raise UsageError("--url needs --token-file", why="the coordinator answers only to its token")
    client = open_client(target.url, target.token_file)
    client.check()
    return client, submit_or_resume(client, plan)


def follow(
    output: OutputOptions,
    client: ApiClient,
    view: RunView,
    signals: SignalCounter,
    restart_services: Callable[[], list[str]],
    since: float = 0.0,
) -> FollowResult:
    """Follow a run on a live panel if this is a terminal, else line by line."""
    panel = interactive() and not output.json and not output.quiet
    display = _display(output, panel)
    if not panel:
        directory = Path(view.directory)
        place = directory if view.directory and directory.parent.is_dir() else client.url
        display.note(f"run {view.run} ({view.name}) in {place}")
    try:
        follower = Follower(client, view, display, restart_services, since, collapse=not output.json)
        return follower.follow(signals, PANEL_EVERY_S if panel else PLAIN_EVERY_S)
    finally:
        display.close()


def conclude(output: OutputOptions, result: FollowResult, target_options: str = "") -> int:
    """Print the summary of a run; return the exit code of the command."""
    # Imported late: it loads more than everything else together, and is needed only now.
    from shoal.cli.output import summary

    facts = summary.summarise(
        result.view,
        result.story,
        reached=result.reached,
        abandoned=result.abandoned,
        target_options=target_options,
        traceback_of=result.tracebacks.of,
    )
    try:
        if result.view.problem is not None:
            show_error(from_code(**msgspec.structs.asdict(result.view.problem)), output.json)
            return facts.exit_code
        if output.json:
            click.echo(msgspec.json.encode({"event": "end", **msgspec.to_builtins(facts)}))
        elif not output.quiet or facts.exit_code not in QUIET_CODES:
            click.echo(table.printable(summary.text(facts)), err=facts.exit_code not in QUIET_CODES)
    except OSError:
        # The terminal is gone, but the run has ended cleanly all the same.
        return facts.exit_code
    return facts.exit_code


def _display(output: OutputOptions, panel: bool) -> Display:
    if output.json:
        return SafeDisplay(JsonLines())
    if panel:
        from shoal.cli.output.live_panel import Panel

        return SafeDisplay(Panel())
    return SafeDisplay(PlainOutput(quiet=output.quiet))
