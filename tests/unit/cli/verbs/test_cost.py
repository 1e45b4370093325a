"""The table of `shoal cost`."""

from __future__ import annotations

import re

from tests.unit.views import run_view

from shoal.cli.verbs import cost
from shoal.wire.api import CostView


def test_pools_of_a_run_are_listed_with_their_sum_and_the_budget() -> None:
    pools = {"spot": CostView(3600.0, 1.0, 2.0, 0.5, 1), "lab": CostView(1800.0, 0.5, 0.0)}
    total = CostView(5400.0, 1.5, 2.0, 0.5, 1)
    view = run_view(cost=total, costs=pools, budget=3.0, rate_per_h=1.5)
    text = cost._run_text(view, cost.run_costs(view))
    assert re.search(r"^lab +0.50 +0.50 +- +- +0$", text, re.M)
    assert re.search(r"^all +1.50 +1.50 +2.00 +0.50 +1$", text, re.M)
    assert "budget  3.00, 1.50 left" in text
    assert text.endswith("now     1.50 an hour")


def test_runs_are_summed_up() -> None:
    costs = [cost.run_costs(run_view(name, cost=CostView(3600.0, 1.0, 0.0))) for name in ("a", "b")]
    assert re.search(r"^all +2.00 +2.00 +- +- +0$", cost._table(costs), re.M)
