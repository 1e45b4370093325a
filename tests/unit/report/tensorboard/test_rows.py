"""What of a run is worth a row."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec

from shoal.report.tensorboard.rows import LINES_PER_STEP, RunRows, scalars_of
from shoal.wire.api import MemberView, RunView, StoryLine


def member(name: str, share: int, step: int | None = 7, **more: Any) -> MemberView:
    known: dict[str, Any] = {
        "incarnation": "1",
        "agent": "",
        "pid": 1,
        "host": "h",
        "phase": "compute",
        "phase_age_s": 0.0,
    }
    known |= {"heartbeat_age_s": 0.0, "samples_per_s": 0.0, "connected": True, "status": "training", "rank": 0}
    return msgspec.convert(known | {"member": name, "share": share, "step": step} | more, MemberView)


def view(step: int = 7, **more: Any) -> RunView:
    known: dict[str, Any] = {
        "run": "r", "name": "t", "status": "training", "reason": "", "since": 0.0, "started": 0.0, "ended": None,
        "exit_code": None, "argv": (), "members_min": 1, "members_max": 2, "world": 3, "world_size": 2, "step": step,
        "total_steps": None, "epoch": 1, "loss": 0.5, "samples_per_s": 100.0, "metrics": {}, "members": (),
        "losses": 1, "joins": 3, "last_change": "", "checkpoint_step": None, "checkpoint_path": "", "directory": "d",
    }  # fmt: skip
    return RunView(**(known | more))


def line(
    text: str, step: int | None = None, kind: str = "MembershipNote", reason: str = "", at: float = 1.0
) -> StoryLine:
    return StoryLine(1, at, "r", kind, "", None, step, text, reason)


def test_a_row_has_the_figures_of_the_run_the_shares_and_what_the_script_says() -> None:
    silent, spare = member("m/3", 0, phase=""), member("m/4", 0, status="spare")
    members = (member("m/0", 51), member("m/1", 13), member("m/2", 0), silent, spare)
    told = view(batch=64, noise=310.0, idle_before=0.4, idle_now=0.1, metrics={"accuracy": 0.9}, members=members)
    assert scalars_of(told, 0.25) == {
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


def test_what_is_not_known_is_no_figure() -> None:
    found = scalars_of(view(loss=None, world=None, world_size=0, samples_per_s=0.0), 0.0)
    assert found == {"training/epoch": 1.0, "world/members_lost": 1.0}


def test_there_is_at_most_one_row_a_second() -> None:
    board = RunRows(0)
    for i in range(100):
        board.add_view(view(step=1 + i), 0.1, now=10.0 + 0.1 * i)
    assert [row.step for row in board.take()] == [1, 11, 21, 31, 41, 51, 61, 71, 81, 91]


def test_an_old_run_and_one_of_many_members_have_rows_less_often() -> None:
    for now, members, gap_s in ((35_900.0, (), 10), (10.0, tuple(member(f"m/{i}", 1) for i in range(128)), 4)):
        board = RunRows(0)
        for i in range(41):
            seated = tuple(msgspec.structs.replace(one, step=i + 1) for one in members)
            board.add_view(view(step=i + 1, members=seated), 0.1, now=now + i)
        steps = [row.step for row in board.take()]
        assert [b - a for a, b in pairwise(steps)] == [gap_s] * (len(steps) - 1) != []


def test_no_step_is_no_news_but_what_the_script_says_is() -> None:
    board = RunRows(0)
    board.add_view(view(), 0.1, now=1.0)
    board.add_view(view(samples_per_s=1.0), 0.1, now=3.0)
    board.add_view(view(metrics={"accuracy": 0.9}), 0.1, now=5.0)
    assert [(row.at, row.step, row.scalars) for row in board.take()][1:] == [(5.0, 7, {"metrics/accuracy": 0.9})]


def test_the_end_of_a_run_is_shown_however_soon_it_comes() -> None:
    board = RunRows(0)
    board.add_view(view(), 0.1, now=1.0)
    board.add_view(view(step=9, loss=0.25, ended=1.1), 0.1, now=1.1)
    assert [(row.step, row.scalars["training/loss"]) for row in board.take()] == [(7, 0.5), (9, 0.25)]


def test_a_run_that_was_set_back_is_shown_where_its_members_are() -> None:
    board = RunRows(500)
    board.add_view(view(step=500, members=(member("m/0", 8, 400),)), 0.1, now=1.0)
    assert [row.step for row in board.take()] == [400]


def test_worlds_decisions_and_all_else_are_told_apart() -> None:
    board = RunRows(0)
    board.add_line(line("m/0 connected"), 0)
    board.add_line(line("world 1 started at step 0 with m/0", 0, "FormWorld", "m/0 is ready"), 0)
    board.add_line(line("shares from step 9 on: m/1 is slow", 9, "SharesDecided", "m/1 is slow"), 5)
    assert [(row.step, row.texts) for row in board.take()] == [
        (0, {"story": "m/0 connected"}),
        (0, {"worlds": "world 1 started at step 0 with m/0: m/0 is ready"}),
        (9, {"decisions": "shares from step 9 on: m/1 is slow"}),
    ]


def test_what_is_told_of_one_step_is_told_together_and_steps_never_go_back() -> None:
    board = RunRows(0)
    board.add_line(line("m/1 lost world 1", 40), 40)
    assert [(row.step, row.texts) for row in board.take()] == [(40, {"story": "m/1 lost world 1"})]
    board.add_line(line("m/1 is started again", 38), 40)
    assert [(row.step, row.texts) for row in board.take()] == [
        (40, {"story": "m/1 lost world 1\n\nm/1 is started again"})
    ]
    board.add_line(line("m/1 is ready"), 41)
    assert [(row.step, row.texts) for row in board.take()] == [(41, {"story": "m/1 is ready"})]
    assert board.take() == []


def test_a_run_that_tells_much_of_one_step_is_cut_short() -> None:
    board = RunRows(0)
    for i in range(1000):
        board.add_line(line(f"m/0 is started again, {i}"), 0)
    (row,) = board.take()
    assert row.texts["story"].count("m/0") == LINES_PER_STEP
    assert row.texts["story"].endswith(", 999")


def test_another_file_does_not_overwrite_what_was_told_of_the_same_step() -> None:
    board = RunRows(500)
    board.add_line(line("run resumed"), 500)
    assert [row.step for row in board.take()] == [501]


def test_words_of_the_script_are_not_taken_for_markdown() -> None:
    board = RunRows(0)
    board.add_line(line("m/0 raised ValueError: <b>*x*</b> in __init__"), 0)
    assert board.take()[0].texts["story"] == r"m/0 raised ValueError: &lt;b&gt;\*x\*&lt;/b&gt; in \_\_init\_\_"
