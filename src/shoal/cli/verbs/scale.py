"""`shoal scale`: another number of members, or another budget, for a run."""

from __future__ import annotations

import shlex

import click

from shoal.cli import completions
from shoal.cli.options import OutputOptions, with_output_options, with_target_options
from shoal.core.nouns import counted
from shoal.errors import UsageError
from shoal.launch import run_lookup
from shoal.launch.coordinator_target import CoordinatorTarget
from shoal.launch.run_request import check_budget, parse_members
from shoal.wire.api import RunView, ScaleRequest


@click.command()
@click.argument("run", shell_complete=completions.runs)
@click.argument("members", metavar="[MIN:MAX]", required=False)
@click.option("--budget", type=float, metavar="AMOUNT", help="Spending limit, including what was spent so far.")
@with_target_options
@with_output_options
def command(
    output: OutputOptions, target: CoordinatorTarget, run: str, members: str | None, budget: float | None
) -> None:
    """Change the number of members or the budget of a run.

    No member restarts: new ones join while the others train, and leaving ones leave at the end of a step. Machines of
    the last pool in --on are released first.
    """
    if members is None and budget is None:
        raise UsageError("nothing to change", do=f"shoal scale {run} MIN:MAX, or --budget AMOUNT")
    check_budget(budget, "--budget")
    coordinator, view = run_lookup.find_run(target, run)
    low, high = parse_members(members) if members is not None else (view.members_min, view.members_max)
    if view.status in run_lookup.ENDED:
        do = ended_advice(view, f"{low}:{high}", budget, target)
        raise UsageError(f"run {view.run} has ended ({view.status})", do=do)
    view = run_lookup.require_live(coordinator).scale(view.run, ScaleRequest(low, high, budget))
    limit = f" and a budget of {budget:.2f}" if budget is not None else ""
    output.result(
        view, lambda: f"run {view.run} has {counted(view.world_size, 'member')}; allowed are {low} to {high}{limit}"
    )


def ended_advice(view: RunView, members: str, budget: float | None, target: CoordinatorTarget) -> str:
    """Return the command that gives an ended run other members: a new run if it is done, otherwise resume."""
    options = f" -n {members}" + (f" --budget {budget:g}" if budget is not None else "") + target.options
    if view.status != "done":
        return f"shoal resume {view.run}{options}"
    return f"start a new run: shoal run{options} {shlex.join(view.argv)}"
