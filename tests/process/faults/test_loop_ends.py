"""Every way in which a training loop ends, with real processes: the run ends for all members, at one step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shoal.testing.run_under_test import RunUnderTest, closing

pytestmark = [pytest.mark.process, pytest.mark.faults, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).with_name("end_loop.py")
AT, STEPS = 12, 24


@contextmanager
def run_that_ends(
    path: Path, how: str, who: str = "", members: str = "2:2", settings: tuple[str, ...] = (), slow: str = ""
) -> Iterator[RunUnderTest]:
    environ = {"HOW": how, "WHO": who, "AT": str(AT), "SLOW": slow}
    with closing(RunUnderTest(path, SCRIPT, members, settings, environ)) as run:
        yield run


def check_that_all_end_at_one_step(run: RunUnderTest, members: int, step: int) -> None:
    ends = run.events_of("after")
    assert [end["step"] for end in ends] == [step] * members, run.output[-3000:]
    assert len({end["state"] for end in ends}) == 1, "members left the loop with different parameters"
    assert (run.records / "model.pt").exists()


@pytest.mark.parametrize("how", ["break", "return", "caught"])
def test_all_scripts_leave_their_loops_at_the_same_step(tmp_path: Path, how: str) -> None:
    """Once the first one to leave closed the ring, another went back one step, and waited for the minimum for ever."""
    with run_that_ends(tmp_path, how) as run:
        run.finish()
        check_that_all_end_at_one_step(run, 2, AT)


@pytest.mark.parametrize("who", ["", "local/0"], ids=["all members", "one member"])
def test_process_that_left_its_loop_ends_only_when_the_slowest_has_applied_the_step(tmp_path: Path, who: str) -> None:
    """Its end once broke the world of a member that had yet to apply the sum: that one repeated the step alone."""
    with run_that_ends(tmp_path, "break", who, slow="local/1") as run:
        run.finish()
        check_that_all_end_at_one_step(run, 2, AT)
        assert {commit["world"] for commit in run.commits()} == {1}, "a step was computed again"


def test_all_scripts_exit_with_code_0_in_their_loops(tmp_path: Path) -> None:
    with run_that_ends(tmp_path, "exit") as run:
        run.finish()
        assert run.step() == AT
        assert not run.events_of("after")


def test_script_of_one_member_leaves_its_loop_and_training_ends_for_all(tmp_path: Path) -> None:
    with run_that_ends(tmp_path, "break", "local/1", members="3:3") as run:
        run.finish()
        check_that_all_end_at_one_step(run, 3, AT)
        assert f"its script left the training loop at step {AT}; training ends there for all members" in run.output


def test_script_of_one_member_exits_with_code_0_and_training_ends_for_all(tmp_path: Path) -> None:
    with run_that_ends(tmp_path, "exit", "local/0") as run:
        run.finish()
        assert run.step() == AT
        assert [end["member"] for end in run.events_of("after")] == ["local/1"]


@pytest.mark.parametrize("who", ["", "local/1"], ids=["all members", "one member"])
def test_error_in_the_loop_is_no_end_of_the_training(tmp_path: Path, who: str) -> None:
    """It was once taken for a break: the run failed at once although the restart policy allowed two more tries."""
    with run_that_ends(tmp_path, "raise", who, settings=("checkpoint.every_steps=5",)) as run:
        run.finish()
        check_that_all_end_at_one_step(run, 2, STEPS)
        assert "left the training loop" not in run.output


def test_error_in_the_loop_of_the_only_member_is_tried_again(tmp_path: Path) -> None:
    with run_that_ends(tmp_path, "raise", members="1:1", settings=("checkpoint.every_steps=5",)) as run:
        run.finish()
        check_that_all_end_at_one_step(run, 1, STEPS)
