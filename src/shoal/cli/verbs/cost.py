"""`shoal cost`: the cost of the machines of runs, and what they would have cost without preemption."""

from __future__ import annotations

import click
import msgspec

from shoal.cli import completions
from shoal.cli.options import OutputOptions, with_output_options, with_target_options
from shoal.cli.output import table
from shoal.cli.output.lines import budget
from shoal.launch import run_lookup
from shoal.launch.coordinator_target import CoordinatorTarget
from shoal.wire.api import CostView, RunView

NO_COST = CostView(0.0, 0.0, 0.0)
HEAD = ("machine hours", "spent", "saved", "unused", "lost")


class RunCosts(msgspec.Struct, frozen=True):
    """The cost of a run, in total and by pool."""

    run: str
    name: str
    user: str
    status: str
    total: CostView
    pools: dict[str, CostView]
    rate_per_h: float
    budget: float | None


@click.command()
@click.argument("run", shell_complete=completions.runs, required=False)
@with_target_options
@with_output_options
def command(output: OutputOptions, target: CoordinatorTarget, run: str | None) -> None:
    """Show the cost of the machines of runs.

    Without RUN, all runs that took machines from pools are listed, ended ones included. SAVED is the difference to the
    price of machines that are not preempted (instead in a pool). UNUSED is what was spent while machines started or
    shut down, which is the price of each lost machine.
    """
    if run is not None:
        _, view = run_lookup.find_run(target, run)
        costs = run_costs(view)
        output.result(costs, lambda: _run_text(view, costs))
        return
    all_costs = [run_costs(view) for _, view in run_lookup.all_runs(target) if view.cost is not None]
    output.result(all_costs, lambda: _table(all_costs) if all_costs else "no run has taken machines from pools yet")


def run_costs(view: RunView) -> RunCosts:
    total = view.cost or NO_COST
    return RunCosts(view.run, view.name, view.user, view.status, total, view.costs, view.rate_per_h, view.budget)


def _run_text(view: RunView, costs: RunCosts) -> str:
    rows = [(name, *_figures(cost)) for name, cost in sorted(costs.pools.items())]
    rows = [*rows, ("all", *_figures(costs.total))] if len(rows) != 1 else rows
    lines = [table.columns(("pool", *HEAD), rows)]
    if costs.budget is not None:
        lines.append(f"budget  {budget(view)}")
    if costs.rate_per_h and view.ended is None:
        lines.append(f"now     {costs.rate_per_h:.2f} an hour")
    return "\n".join(lines)


def _table(all_costs: list[RunCosts]) -> str:
    rows = [(costs.run, costs.user or "-", costs.status, *_figures(costs.total)) for costs in all_costs]
    total = _sum([costs.total for costs in all_costs])
    rows += [("all", "", "", *_figures(total))] if len(all_costs) > 1 else []
    return table.columns(("run", "user", "status", *HEAD), rows)


def _figures(cost: CostView) -> tuple[str, ...]:
    amounts = [f"{amount:.2f}" if amount else "-" for amount in (cost.spent, cost.saved, cost.unused)]
    return f"{cost.machine_s / 3600:.2f}", *amounts, str(cost.lost)


def _sum(costs: list[CostView]) -> CostView:
    fields = (sum(column) for column in zip(*(msgspec.structs.astuple(cost) for cost in costs), strict=True))
    return CostView(*fields)
