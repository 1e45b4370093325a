"""Every way in which a training loop ends, with real processes: the run ends for all members, at one step."""

from __future__ import annotations

import signal
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
    path: Path,
    how: str,
    who: str = "",
    members: str = "2:2",
    settings: tuple[str, ...] = (),
    slow: str = "",
    at: int = AT,
) -> Iterator[RunUnderTest]:
    environ = {"HOW": how, "WHO": who, "AT": str(at), "SLOW": slow}
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


def test_member_that_is_told_to_end_does_not_break_the_world_of_a_slower_one(tmp_path: Path) -> None:
    """Told that training ends, the second member left the ring, and the third repeated the step alone."""
    with run_that_ends(tmp_path, "break", "local/0", members="3:3", slow="local/2") as run:
        run.finish()
        check_that_all_end_at_one_step(run, 3, AT)
        check_that_no_step_was_computed_again(run)


def check_that_no_step_was_computed_again(run: RunUnderTest) -> None:
    """Fail unless all members committed each step in one world and have the same parameters after it."""
    results: dict[int, set[tuple[int, str]]] = {}
    for commit in run.commits():
        results.setdefault(commit["step"], set()).add((commit["world"], commit["state"]))
    assert all(len(values) == 1 for values in results.values()), results


@pytest.mark.parametrize("who", ["", "local/0"], ids=["all members", "one member"])
def test_process_that_exits_in_its_loop_ends_only_when_the_slowest_has_applied_the_step(
    tmp_path: Path, who: str
) -> None:
    """Once it did not wait, nor say at which step it left: the other repeated a step, or ended an earlier one."""
    with run_that_ends(tmp_path, "exit", who, slow="local/1") as run:
        run.finish()
        ends = run.events_of("exit") + run.events_of("after")
        assert [end["step"] for end in ends] == [AT, AT], run.output[-3000:]
        assert len({end["state"] for end in ends}) == 1, "members left the loop with different parameters"
        check_that_no_step_was_computed_again(run)


@pytest.mark.parametrize("setting", ["sync=local:2", "batch=auto:16:64", "exact=8"])
def test_slow_member_completes_the_step_at_which_another_left_in_every_mode(tmp_path: Path, setting: str) -> None:
    with run_that_ends(tmp_path, "break", "local/0", settings=(setting,), slow="local/1", at=6) as run:
        run.finish()
        check_that_all_end_at_one_step(run, 2, 6)
        check_that_no_step_was_computed_again(run)


def test_slow_member_completes_the_last_step(tmp_path: Path) -> None:
    with run_that_ends(tmp_path, "never", slow="local/1", at=STEPS) as run:
        run.finish()
        check_that_all_end_at_one_step(run, 2, STEPS)
        check_that_no_step_was_computed_again(run)


def test_slow_member_completes_the_step_after_which_the_run_stops(tmp_path: Path) -> None:
    with run_that_ends(tmp_path, "endless", slow="local/1") as run:
        run.until(lambda: run.events_of("late"), "a step that one member applies later")
        run.shoal("stop", run.name)
        run.finish(exit_code=75)
        check_that_no_step_was_computed_again(run)
        last = {commit["member"]: commit["step"] for commit in run.commits()}
        assert set(last.values()) == {run.step()}, f"members stopped at different steps: {last}"


def test_slow_member_completes_the_step_after_which_another_leaves(tmp_path: Path) -> None:
    with run_that_ends(tmp_path, "endless", members="1:3", slow="local/1") as run:
        run.until(lambda: run.events_of("late"), "a step that one member applies later")
        run.kill("local/0", signal.SIGTERM)
        run.until(lambda: run.journal("MemberLeft"), "that it has left")
        run.shoal("stop", run.name)
        run.finish(exit_code=75)
        check_that_no_step_was_computed_again(run)


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
