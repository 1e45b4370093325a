"""`shoal cost`: what the machines of runs have cost, and what they would have cost elsewhere."""

from __future__ import annotations

import click
import msgspec

from shoal.cli.options import OutputOptions, with_frame, with_place
from shoal.cli.output import table
from shoal.cli.output.lines import budget
from shoal.launch import run_lookup
from shoal.launch.coordinator_target import CoordinatorTarget
from shoal.wire.api import CostView, RunView

NOTHING = CostView(0.0, 0.0, 0.0)


class RunCosts(msgspec.Struct, frozen=True):
    """What a run has cost: in all, and by pool."""

    run: str
    name: str
    user: str
    status: str
    total: CostView
    pools: dict[str, CostView]
    rate_per_h: float
    budget: float | None


@click.command()
@click.argument("run", required=False)
@with_place
@with_frame
def command(frame: OutputOptions, place: CoordinatorTarget, run: str | None) -> None:
    """Show what the machines of runs have cost.

    Without RUN, of all runs that took machines from pools, those that are over included. SAVED is against the price of
    machines that are not preempted (instead of a pool); UNUSED is what was spent while machines started or went, which
    is what each loss costs.
    """
    if run is not None:
        _, view = run_lookup.find_run(place, run)
        bill = bill_of(view)
        frame.answer(bill, lambda: _text(view, bill))
        return
    bills = [bill_of(view) for _, view in run_lookup.all_runs(place) if view.cost is not None]
    frame.answer(bills, lambda: _table(bills) if bills else "no run has taken machines from pools yet")


def bill_of(view: RunView) -> RunCosts:
    """The costs of a run, from what is known of it."""
    whole = view.cost or NOTHING
    return RunCosts(view.run, view.name, view.user, view.status, whole, view.costs, view.rate_per_h, view.budget)


def _text(view: RunView, bill: RunCosts) -> str:
    rows = [(name, *_figures(cost)) for name, cost in sorted(bill.pools.items())]
    rows = [*rows, ("all", *_figures(bill.total))] if len(rows) != 1 else rows
    lines = [table.columns(("pool", *HEAD), rows)]
    if bill.budget is not None:
        lines.append(f"budget  {budget(view)}")
    if bill.rate_per_h and view.ended is None:
        lines.append(f"now     {bill.rate_per_h:.2f} an hour")
    return "\n".join(lines)


HEAD = ("machine hours", "spent", "saved", "unused", "lost")


def _table(bills: list[RunCosts]) -> str:
    rows = [(bill.run, bill.user or "-", bill.status, *_figures(bill.total)) for bill in bills]
    whole = _sum([bill.total for bill in bills])
    rows += [("all", "", "", *_figures(whole))] if len(bills) > 1 else []
    return table.columns(("run", "user", "status", *HEAD), rows)


def _figures(cost: CostView) -> tuple[str, ...]:
    amounts = [f"{amount:.2f}" if amount else "-" for amount in (cost.spent, cost.saved, cost.unused)]
    return f"{cost.machine_s / 3600:.2f}", *amounts, str(cost.lost)


def _sum(costs: list[CostView]) -> CostView:
    fields = (sum(column) for column in zip(*(msgspec.structs.astuple(cost) for cost in costs), strict=True))
    return CostView(*fields)
