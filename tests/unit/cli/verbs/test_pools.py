"""The tables of `shoal pools`."""

from __future__ import annotations

import re

from shoal.cli.verbs import pools
from shoal.engines.engine import Capacity
from shoal.wire.api import CostView, PoolView


def test_pool_is_shown_with_its_capacity_or_its_problem() -> None:
    spot = pools.PoolListing("spot", "slurm", 8, 2, 1.5, (Capacity("node", 3, cpus=4, memory_bytes=8 << 30),))
    lab = pools.PoolListing("lab", "ssh", 2, 1, 0.0, trouble="gpu1 does not answer")
    text = pools._text([spot, lab], [])
    assert re.search(r"^spot +slurm +1.50 +8 +2 +3 of node \(4 cores, 8.0 GiB\)$", text, re.M)
    assert re.search(r"^lab +ssh +- +2 +1 +gpu1 does not answer$", text, re.M)


def test_pool_in_use_is_shown_with_its_machines_and_cost() -> None:
    view = PoolView("spot", "slurm", 8, 2, 1.5, 3, 1, cost=CostView(7200.0, 3.0, 0.0), leaving=2)
    assert re.search(r"^spot +main +3 +1 +2 +2.00 +3.00 +-$", pools._text([], [("main", view)]), re.M)


def test_no_pool_is_answered_with_how_to_add_one() -> None:
    assert "[pool.NAME]" in pools._text([], [])
