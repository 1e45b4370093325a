"""What `shoal status` prints."""

from __future__ import annotations

import re

from tests.unit.views import balanced_run, member_view, run_view

from shoal.cli.verbs import status
from shoal.wire.api import CostView


def test_status_shows_shares_and_the_parts_of_a_step() -> None:
    text = status.text(balanced_run(), 100.0, live=True)
    assert "efficiency  batch 64, noise scale 1 310, idle 1.7 % (38 % with equal shares)" in text
    assert "shares      from step 12: local/1 is slow: 51, 13 instead of 32, 32" in text
    assert re.search(r"^MEMBER +SHARE +DATA +COMPUTE +WAIT +EXCHANGE +SAMPLES/S$", text, re.M)
    assert re.search(r"^local/0 +51 +0.3 ms +51 ms +1.2 ms +4.0 ms +400$", text, re.M)
    assert len(re.findall("^local/2", text, re.M)) == 1, "a member without a rank has no share"
    assert max(map(len, text.split("\n\n", 1)[1].splitlines())) <= 80


def test_status_of_a_starting_run_has_no_shares() -> None:
    text = status.text(run_view(members=(member_view("local/0", status="starting"),)), 100.0, live=True)
    assert "efficiency" not in text
    assert "SHARE" not in text


def test_status_shows_the_event_files() -> None:
    where = "/somewhere/train-7f3k/tensorboard"
    assert f"\ntensorboard {where}" in status.text(run_view(tensorboard=where), 110.0, live=True)
    assert "tensorboard" not in status.text(run_view(), 110.0, live=True)


def test_budget_is_shown_with_how_long_it_lasts() -> None:
    view = run_view(cost=CostView(3600.0, 2.0, 0.0), budget=5.0, rate_per_h=2.0)
    assert "budget      5.00, 3.00 left, enough for 1 h 30 min at 2.00 an hour" in status.text(view, 20.0, live=True)
