"""`shoal status`: one run and its members, now."""

from __future__ import annotations

import time
from collections.abc import Sequence

import click

from shoal.cli.options import OutputOptions, with_frame, with_place
from shoal.cli.output import table
from shoal.cli.output.lines import (
    PARTS,
    budget,
    cost,
    decisions,
    efficiency,
    evaluation,
    event_files,
    progress,
    saved,
    spent,
)
from shoal.launch import run_lookup
from shoal.launch.coordinator_target import CoordinatorTarget
from shoal.wire.api import MemberView, RunView


@click.command()
@click.argument("run", required=False)
@with_place
@with_frame
def command(frame: OutputOptions, place: CoordinatorTarget, run: str | None) -> None:
    """Show a run and its members.

    RUN is an id, a name, or the beginning of one; without it, the run that goes on or the newest.
    """
    coordinator, view = run_lookup.find_run(place, run)
    frame.answer(view, lambda: text(view, time.time(), live=coordinator.client is not None))


def text(view: RunView, now: float, *, live: bool) -> str:
    """A run for people."""
    going = view.status not in run_lookup.OVER
    gone = "  (its coordinator is not running; this is what it wrote last)" if going and not live else ""
    lines = [
        f"run         {view.run} ({view.name}), {view.status}{gone}",
        f"script      {' '.join(view.argv)}",
        f"progress    {progress(view)}",
        f"time        {table.span((view.ended or now) - view.started)}",
        f"members     {view.losses} lost, {view.joins} joined",
    ]
    if view.cost is not None:
        lines.append(f"cost        {cost(view.cost)}")
    if view.budget is not None:
        lines.append(f"budget      {budget(view)}")
    if view.queued:
        lines.append(f"queue       number {view.queued}, waits for {view.waits_for}")
    if told := efficiency(view):
        lines.append(f"efficiency  {', '.join(told)}")
    if found := evaluation(view):
        lines.append(f"evaluated   {found}")
    if view.evaluation is not None and view.evaluation.export:
        lines.append(f"best model  {view.evaluation.export}")
    lines += [f"{what:<12}{reason}" for what, reason in decisions(view)]
    if view.reason:
        lines.append(f"why         {view.reason}")
    if view.last_change:
        lines.append(f"last change {view.last_change}")
    if view.checkpoint_step is not None:
        lines.append(f"checkpoint  {saved(view.checkpoint_step, view.checkpoint_path)}")
    if view.exit_code is not None:
        lines.append(f"exit code   {view.exit_code}")
    lines.append(f"directory   {view.directory}")
    if view.tensorboard:
        lines.append(f"tensorboard {event_files(view.tensorboard, view.tensorboard_error)}")
    if view.members and going:
        ordered = sorted(view.members, key=lambda one: (one.rank is None, one.rank or 0, one.member))
        lines += ["", _members(ordered)]
        if seated := [one for one in ordered if one.rank is not None]:
            lines += ["", _steps(seated)]
    return "\n".join(lines)


def _members(members: Sequence[MemberView]) -> str:
    rows = [
        (
            one.member,
            one.status,
            "" if one.rank is None else str(one.rank),
            "" if one.step is None else table.count(one.step),
            f"{one.phase} for {table.span(one.phase_age_s)}" if one.phase else "",
            str(one.pid),
            one.host,
        )
        for one in members
    ]
    return table.columns(("member", "status", "rank", "step", "phase", "pid", "host"), rows)


def _steps(members: Sequence[MemberView]) -> str:
    """Who has how much of a step, and where its time goes."""
    rows = [(one.member, str(one.share), *spent(one), table.count(one.samples_per_s)) for one in members]
    return table.columns(("member", "share", *PARTS, "samples/s"), rows)
