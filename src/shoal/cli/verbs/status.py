"""`shoal status`: one run and its members now."""

from __future__ import annotations

import time
from collections.abc import Sequence

import click
import msgspec

from shoal.cli import completions
from shoal.cli.options import OutputOptions, interactive, with_output_options, with_target_options
from shoal.cli.output import table
from shoal.cli.output.lines import (
    STEP_PARTS,
    adjustments,
    budget,
    checkpoint,
    cost,
    efficiency,
    evaluation,
    event_files,
    forecast,
    progress,
    step_times,
)
from shoal.cli.signals import SignalCounter
from shoal.errors import CoordinatorUnreachable
from shoal.launch import run_lookup
from shoal.launch.coordinator_target import CoordinatorTarget
from shoal.launch.run_lookup import CoordinatorRef
from shoal.wire.api import MemberView, RunView

WATCH_EVERY_S = 2.0


@click.command()
@click.argument("run", shell_complete=completions.runs, required=False)
@click.option("--watch", is_flag=True, help="Refresh every two seconds until the run ends or Ctrl-C.")
@with_target_options
@with_output_options
def command(output: OutputOptions, target: CoordinatorTarget, run: str | None, watch: bool) -> None:
    """Show a run and its members.

    RUN is an id, a name, or the beginning of one. Without it, the only active run is shown, or else the newest. The
    settings of a run are shown by shoal config RUN.
    """
    coordinator, view = run_lookup.find_run(target, run)
    if watch:
        follow_view(output, target, coordinator, view)
    else:
        output.result(view, lambda: text(view, time.time(), live=coordinator.client is not None))


def follow_view(output: OutputOptions, target: CoordinatorTarget, coordinator: CoordinatorRef, view: RunView) -> None:
    """Show a run again and again until it has ended or a signal arrives; with --json, one object per line."""
    with SignalCounter() as signals:
        while True:
            if output.json:
                click.echo(msgspec.json.encode(view))
            else:
                if interactive():
                    click.clear()
                click.echo(table.printable(text(view, time.time(), live=coordinator.client is not None)))
            if view.status in run_lookup.ENDED or coordinator.client is None:
                return
            signals.sleep(WATCH_EVERY_S)
            if signals.count:
                return
            try:
                view = coordinator.records.run(view.run)
            except CoordinatorUnreachable:
                # A coordinator of `shoal run` ends right after its run; its last record is on disk.
                coordinator, view = run_lookup.find_run(target, view.run)


def text(view: RunView, now: float, *, live: bool) -> str:
    """Return a run as text; `live` says whether its coordinator answered."""
    active = view.status not in run_lookup.ENDED
    stale = "  (its coordinator is not running; this is its last record)" if active and not live else ""
    lines = [
        f"run         {view.run} ({view.name}), {view.status}{stale}",
        f"script      {' '.join(view.argv)}",
        f"progress    {progress(msgspec.structs.replace(view, reason=''))}",  # its reason is below
        f"started     {table.moment(view.started, now)}",
        f"time        {table.span((view.ended or now) - view.started)}",
        *([f"time left   {left}"] if (left := forecast(view)) and active else []),
        f"members     {view.losses} lost, {view.joins} joined",
    ]
    if view.cost is not None:
        lines.append(f"cost        {cost(view.cost)}")
    if view.budget is not None:
        lines.append(f"budget      {budget(view)}")
    if view.queued:
        lines.append(f"queue       number {view.queued}, waits for {view.waits_for}")
    if phrases := efficiency(view):
        lines.append(f"efficiency  {', '.join(phrases)}")
    if evaluated := evaluation(view):
        lines.append(f"evaluated   {evaluated}")
    if view.evaluation is not None and view.evaluation.export:
        lines.append(f"best model  {view.evaluation.export}")
    lines += [f"{what:<12}{reason}" for what, reason in adjustments(view)]
    if view.uncopied and active:
        lines.append(f"no copy     {view.uncopied}: if that server dies, training goes back to the checkpoint")
    if view.reason:
        lines.append(f"why         {view.reason}")
    if view.last_change and view.last_change != view.reason:
        lines.append(f"last change {view.last_change}")
    if view.checkpoint_step is not None:
        lines.append(f"checkpoint  {checkpoint(view.checkpoint_step, view.checkpoint_path)}")
    if view.exit_code is not None:
        lines.append(f"exit code   {view.exit_code}")
    lines.append(f"directory   {view.directory}")
    if view.tensorboard:
        lines.append(f"tensorboard {event_files(view.tensorboard, view.tensorboard_error)}")
    if view.members and active:
        ordered = sorted(view.members, key=lambda member: (member.rank is None, member.rank or 0, member.member))
        lines += ["", _member_table(ordered)]
        if ranked := [member for member in ordered if member.rank is not None]:
            lines += ["", _step_table(ranked)]
    return "\n".join(lines)


def _member_table(members: Sequence[MemberView]) -> str:
    rows = [
        (
            member.member,
            member.status,
            "" if member.rank is None else str(member.rank),
            "" if member.step is None else table.count(member.step),
            f"{member.phase} for {table.span(member.phase_age_s)}" if member.phase else "",
            str(member.pid),
            member.host,
        )
        for member in members
    ]
    return table.columns(("member", "status", "rank", "step", "phase", "pid", "host"), rows)


def _step_table(members: Sequence[MemberView]) -> str:
    """Return each member's share of a step, and how long the parts of the step take."""
    rows = [
        (member.member, str(member.share), *step_times(member), table.count(member.samples_per_s)) for member in members
    ]
    return table.columns(("member", "share", *STEP_PARTS, "samples/s"), rows)
