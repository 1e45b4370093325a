"""`shoal status`: one run and its members now."""

from __future__ import annotations

import time
from collections.abc import Sequence

import click

from shoal.cli.options import OutputOptions, with_output_options, with_target_options
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
    progress,
    step_times,
)
from shoal.launch import run_lookup
from shoal.launch.coordinator_target import CoordinatorTarget
from shoal.wire.api import MemberView, RunView


@click.command()
@click.argument("run", required=False)
@with_target_options
@with_output_options
def command(output: OutputOptions, target: CoordinatorTarget, run: str | None) -> None:
    """Show a run and its members.

    RUN is an id, a name, or the beginning of one. Without it, the only active run is shown, or else the newest. The
    settings of a run are shown by shoal config RUN.
    """
    coordinator, view = run_lookup.find_run(target, run)
    output.result(view, lambda: text(view, time.time(), live=coordinator.client is not None))


def text(view: RunView, now: float, *, live: bool) -> str:
    """Return a run as text; `live` says whether its coordinator answered."""
    active = view.status not in run_lookup.ENDED
    stale = "  (its coordinator is not running; this is its last record)" if active and not live else ""
    lines = [
        f"run         {view.run} ({view.name}), {view.status}{stale}",
        f"script      {' '.join(view.argv)}",
        f"progress    {progress(view)}",
        f"started     {table.moment(view.started, now)}",
        f"time        {table.span((view.ended or now) - view.started)}",
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
    if view.reason:
        lines.append(f"why         {view.reason}")
    if view.last_change:
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
