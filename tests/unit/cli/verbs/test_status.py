"""What `shoal status` prints."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, cast

import pytest
from tests.unit.views import balanced_run, member_view, run_view

from shoal.cli.options import OutputOptions
from shoal.cli.verbs import status
from shoal.launch.coordinator_target import CoordinatorTarget
from shoal.launch.run_lookup import CoordinatorRef
from shoal.wire.api import CostView, ForecastView, RunView


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


def test_parts_without_a_copy_are_shown_while_the_run_is_active() -> None:
    text = status.text(run_view(uncopied="shard 1 on local/server-0"), 110.0, live=True)
    assert "\nno copy     shard 1 on local/server-0: if that server dies" in text
    assert "no copy" not in status.text(run_view(), 110.0, live=True)


def test_budget_is_shown_with_how_long_it_lasts() -> None:
    view = run_view(cost=CostView(3600.0, 2.0, 0.0), budget=5.0, rate_per_h=2.0)
    assert "budget      5.00, 3.00 left, enough for 1 h 30 min at 2.00 an hour" in status.text(view, 20.0, live=True)


class Records:
    """Records of a coordinator whose run is shown as these views, one after the other."""

    def __init__(self, *views: RunView) -> None:
        self.views = list(views)

    def run(self, run: str) -> RunView:
        del run
        return self.views.pop(0)


@pytest.mark.parametrize("json", [False, True])
def test_watch_shows_a_run_until_it_has_ended(
    json: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(status, "WATCH_EVERY_S", 0.0)
    records = cast(Any, Records(run_view(step=20), run_view(step=30, status="done"), run_view(step=40)))
    coordinator = CoordinatorRef("c", "u", "t", None, records, records)
    status.follow_view(OutputOptions(json=json), CoordinatorTarget(Path("/none")), coordinator, run_view(step=10))
    shown = capsys.readouterr().out
    assert re.findall(r'"step":([1-4]0)\b' if json else r"step ([1-4]0)\b", shown) == ["10", "20", "30"]


def test_watch_shows_a_run_without_a_coordinator_once(capsys: pytest.CaptureFixture[str]) -> None:
    coordinator = CoordinatorRef("c", "u", "t", None, None, cast(Any, Records()))
    status.follow_view(OutputOptions(), CoordinatorTarget(Path("/none")), coordinator, run_view())
    assert capsys.readouterr().out.count("progress") == 1


def test_reason_is_shown_once() -> None:
    reason = "1 of at least 2 members is present"
    view = run_view(status="waiting", reason=reason, last_change=reason)
    assert status.text(view, 100.0, live=True).count(reason) == 1


def test_time_left_is_shown_while_the_run_is_active() -> None:
    left = ForecastView(600.0, 500.0, 700.0, 0.9, "the run's own steps")
    assert "\ntime left   " in status.text(run_view(forecast=left), 110.0, live=True)
    assert "time left" not in status.text(run_view(forecast=left, status="done", ended=105.0), 110.0, live=False)
    assert "time left" not in status.text(run_view(), 110.0, live=True)
