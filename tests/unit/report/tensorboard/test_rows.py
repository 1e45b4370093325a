"""Rows of event files: which scalars and texts are written, and when."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import pytest

from shoal.core.membership.events import AdjustmentReported, MembershipNote
from shoal.core.runs import story
from shoal.report.tensorboard.rows import LINES_PER_STEP, RunRows, scalars_of, tag_of
from shoal.wire.api import ForecastView, MemberView, RunView, StoryLine


def member(name: str, share: int, step: int | None = 7, **more: Any) -> MemberView:
    values: dict[str, Any] = {
        "incarnation": "1",
        "agent": "",
        "pid": 1,
        "host": "h",
        "phase": "compute",
        "phase_age_s": 0.0,
    }
    values |= {"heartbeat_age_s": 0.0, "samples_per_s": 0.0, "connected": True, "status": "training", "rank": 0}
    return msgspec.convert(values | {"member": name, "share": share, "step": step} | more, MemberView)


def view(step: int = 7, **more: Any) -> RunView:
    values: dict[str, Any] = {
        "run": "r", "name": "t", "status": "training", "reason": "", "since": 0.0, "started": 0.0, "ended": None,
        "exit_code": None, "argv": (), "members_min": 1, "members_max": 2, "world": 3, "world_size": 2, "step": step,
        "total_steps": None, "epoch": 1, "loss": 0.5, "samples_per_s": 100.0, "metrics": {}, "members": (),
        "losses": 1, "joins": 3, "last_change": "", "checkpoint_step": None, "checkpoint_path": "", "directory": "d",
    }  # fmt: skip
    return RunView(**(values | more))


def line(
    text: str, step: int | None = None, kind: str = "MembershipNote", reason: str = "", at: float = 1.0
) -> StoryLine:
    return StoryLine(1, at, "r", kind, "", None, step, text, reason)


def test_scalars_hold_figures_shares_and_metrics() -> None:
    silent, spare = member("m/3", 0, phase=""), member("m/4", 0, status="spare")
    members = (member("m/0", 51), member("m/1", 13), member("m/2", 0), silent, spare)
    run_view = view(batch=64, noise=310.0, idle_before=0.4, idle_now=0.1, metrics={"accuracy": 0.9}, members=members)
    assert scalars_of(run_view, 0.25) == {
        "training/loss": 0.5,
        "training/epoch": 1.0,
        "speed/samples_per_s": 100.0,
        "speed/step_s": 0.25,
        "batch/samples": 64.0,
        "batch/noise_scale": 310.0,
        "idle/now": 0.1,
        "idle/with_equal_shares": 0.4,
        "world/size": 2.0,
        "world/number": 3.0,
        "world/members_lost": 1.0,
        "metrics/accuracy": 0.9,
        "shares/m/0": 51.0,
        "shares/m/1": 13.0,
        "shares/m/2": 0.0,
    }


def test_unknown_values_have_no_scalar() -> None:
    scalars = scalars_of(view(loss=None, world=None, world_size=0, samples_per_s=0.0), 0.0)
    assert scalars == {"training/epoch": 1.0, "world/members_lost": 1.0}


def test_rows_of_scalars_are_at_least_a_second_apart() -> None:
    rows = RunRows(0)
    for i in range(100):
        rows.add_view(view(step=1 + i), 0.1, now=10.0 + 0.1 * i)
    assert [row.step for row in rows.take()] == [1, 11, 21, 31, 41, 51, 61, 71, 81, 91]


def test_old_runs_and_large_runs_have_fewer_rows() -> None:
    for now, members, gap_s in ((35_900.0, (), 10), (10.0, tuple(member(f"m/{i}", 1) for i in range(128)), 4)):
        rows = RunRows(0)
        for i in range(41):
            seated = tuple(msgspec.structs.replace(seat, step=i + 1) for seat in members)
            rows.add_view(view(step=i + 1, members=seated), 0.1, now=now + i)
        steps = [row.step for row in rows.take()]
        assert [b - a for a, b in pairwise(steps)] == [gap_s] * (len(steps) - 1) != []


def test_only_changed_metrics_are_written_while_the_step_is_the_same() -> None:
    rows = RunRows(0)
    rows.add_view(view(), 0.1, now=1.0)
    rows.add_view(view(samples_per_s=1.0), 0.1, now=3.0)
    rows.add_view(view(metrics={"accuracy": 0.9}), 0.1, now=5.0)
    assert [(row.at, row.step, row.scalars) for row in rows.take()][1:] == [(5.0, 7, {"metrics/accuracy": 0.9})]


def test_end_of_a_run_is_written_at_once() -> None:
    rows = RunRows(0)
    rows.add_view(view(), 0.1, now=1.0)
    rows.add_view(view(step=9, loss=0.25, ended=1.1), 0.1, now=1.1)
    assert [(row.step, row.scalars["training/loss"]) for row in rows.take()] == [(7, 0.5), (9, 0.25)]


def test_step_of_a_restored_run_is_that_of_its_members() -> None:
    rows = RunRows(500)
    rows.add_view(view(step=500, members=(member("m/0", 8, 400),)), 0.1, now=1.0)
    assert [row.step for row in rows.take()] == [400]


def test_story_lines_are_split_into_worlds_decisions_and_story() -> None:
    rows = RunRows(0)
    rows.add_line(line("m/0 connected"), 0)
    rows.add_line(line("world 1 started at step 0 with m/0", 0, "FormWorld", "m/0 is ready"), 0)
    rows.add_line(line("shares from step 9 on: m/1 is slow", 9, "SharesDecided", "m/1 is slow"), 5)
    assert [(row.step, row.texts) for row in rows.take()] == [
        (0, {"story": "m/0 connected"}),
        (0, {"worlds": "world 1 started at step 0 with m/0: m/0 is ready"}),
        (9, {"decisions": "shares from step 9 on: m/1 is slow"}),
    ]


@pytest.mark.parametrize("what", ["shares", "batch", "memory"])
def test_adjustment_in_the_story_is_a_decision(what: str) -> None:
    event = AdjustmentReported("m/0", 9, what, {}, "m/1 is slow")
    (story_line,) = story.tell(1, 1.0, "r", event, [("r", MembershipNote("adjusted"))])
    assert tag_of(story_line) == "decisions"


def test_texts_of_one_step_are_combined_and_steps_never_decrease() -> None:
    rows = RunRows(0)
    rows.add_line(line("m/1 lost world 1", 40), 40)
    assert [(row.step, row.texts) for row in rows.take()] == [(40, {"story": "m/1 lost world 1"})]
    rows.add_line(line("m/1 is started again", 38), 40)
    assert [(row.step, row.texts) for row in rows.take()] == [
        (40, {"story": "m/1 lost world 1\n\nm/1 is started again"})
    ]
    rows.add_line(line("m/1 is ready"), 41)
    assert [(row.step, row.texts) for row in rows.take()] == [(41, {"story": "m/1 is ready"})]
    assert rows.take() == []


def test_number_of_lines_of_one_step_is_limited() -> None:
    rows = RunRows(0)
    for i in range(1000):
        rows.add_line(line(f"m/0 is started again, {i}"), 0)
    (row,) = rows.take()
    assert row.texts["story"].count("m/0") == LINES_PER_STEP
    assert row.texts["story"].endswith(", 999")


def test_new_file_does_not_overwrite_texts_of_the_same_step() -> None:
    rows = RunRows(500)
    rows.add_line(line("run resumed"), 500)
    assert [row.step for row in rows.take()] == [501]


def test_markdown_and_html_in_story_lines_are_escaped() -> None:
    rows = RunRows(0)
    rows.add_line(line("m/0 raised ValueError: <b>*x*</b> in __init__"), 0)
    assert rows.take()[0].texts["story"] == r"m/0 raised ValueError: &lt;b&gt;\*x\*&lt;/b&gt; in \_\_init\_\_"


def test_time_left_is_a_scalar_while_it_is_known() -> None:
    known = view(forecast=ForecastView(600.0, 500.0, 700.0, 0.9))
    assert scalars_of(known, 0.25)["speed/seconds_left"] == 600.0
    assert "speed/seconds_left" not in scalars_of(view(forecast=ForecastView(unknown="no step yet")), 0.25)
