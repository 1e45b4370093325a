"""The training loop without a framework: steps, micro-batches, out of memory, and what ends it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.worker.training.small_loop import SmallLoop, small_loop

from shoal.core.step_report import StepReport
from shoal.errors import MembersDiverged
from shoal.worker.training.loop import (
    mentions_out_of_memory,
    report_if_out_of_memory,
    report_smaller_micro_batches,
    step_seed,
)
from shoal.worker.transport.exchange_broken import ExchangeBroken, ExchangeDisagreement


@pytest.fixture
def loop(tmp_path: Path) -> SmallLoop:
    return small_loop(str(tmp_path))


def test_every_step_is_given_out_once_and_committed(loop: SmallLoop) -> None:
    steps = []
    for step in loop.train(loop.feed, "f", seed=7):
        loop.finish_micro_batch()
        steps.append((step, loop.committed))
    assert steps == [(step, True) for step in range(5)]
    assert loop.seeds == [step_seed(7, step, 0) for step in range(5)]
    assert not loop.looping
    assert not loop.feed.open


def test_bounds_that_cannot_be_kept_are_said_before_the_first_step(
    loop: SmallLoop, capsys: pytest.CaptureFixture[str]
) -> None:
    loop.feed.overruled = "shares.max cannot be kept"
    next(loop.train(loop.feed, "f", seed=7))
    assert not loop.committed
    assert "warning[S105] shares.max cannot be kept" in capsys.readouterr().err


def test_body_runs_once_for_every_micro_batch_and_only_the_last_commits(loop: SmallLoop) -> None:
    loop.feed.micro_batch_size = 2
    committed = []
    for _ in loop.train(loop.feed, "f", seed=7):
        loop.finish_micro_batch()
        committed.append(loop.committed)
    assert committed == [False, True] * 5


def test_step_that_ran_out_of_memory_is_repeated_with_smaller_micro_batches(loop: SmallLoop) -> None:
    given = []
    for step in loop.train(loop.feed, "f", seed=7):
        given.append((step, loop.micro_batch_samples))
        if len(given) == 1:
            loop.on_out_of_memory(MemoryError())
        else:
            loop.finish_micro_batch()
    assert given[:3] == [(0, 4), (0, 2), (0, 2)]
    assert len(given) == 11
    assert loop.undone == 1


def test_memory_error_that_no_smaller_micro_batch_can_avoid_is_raised(loop: SmallLoop) -> None:
    loop.feed.micro_batch_size = 1
    error = MemoryError("one sample is too large")
    next(iter(loop.train(loop.feed, "f", seed=7)))
    with pytest.raises(MemoryError, match="one sample"):
        loop.on_out_of_memory(error)


def test_body_that_skips_its_micro_batch_is_an_error(loop: SmallLoop) -> None:
    with pytest.raises(RuntimeError, match="did nothing"):
        for _ in loop.train(loop.feed, "f", seed=7):
            pass
    assert not loop.feed.open


def test_reports_of_different_steps_end_the_training(loop: SmallLoop) -> None:
    for _ in loop.train(loop.feed, "f", seed=7):
        loop.finish_micro_batch()
    assert loop.current is not None
    loop.current.reports = (StepReport(4, 2), StepReport(5, 2))
    with pytest.raises(MembersDiverged):
        loop._check_reports(loop.current)


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (MemoryError(), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (OSError("Cannot allocate memory"), False),
    ],
)
def test_out_of_memory_is_told_from_other_errors(error: Exception, is_memory: bool) -> None:
    assert mentions_out_of_memory(error) == is_memory


class Reporter:
    """A session that keeps the adjustments it reports."""

    me = "local/1"

    def __init__(self) -> None:
        self.adjustments: list[dict[str, int]] = []

    def report_adjustment(self, step: int, what: str, values: dict[str, int], reason: str) -> None:
        assert (step, what) == (7, "memory")
        assert "ran out of memory with" in reason
        self.adjustments.append(values)


def test_script_that_dies_of_its_memory_is_reported_with_what_its_restart_computes() -> None:
    session, error = Reporter(), RuntimeError("CUDA out of memory")
    report_if_out_of_memory(session, 7, 32, error)
    assert session.adjustments == [{"local/1": 8}]
    assert "error[S328] memory ran out with 32 samples at once" in error.__notes__[0]
    report_if_out_of_memory(session, 7, 0, error)
    report_if_out_of_memory(session, 7, 32, RuntimeError("a mistake"))
    assert len(session.adjustments) == len(error.__notes__) == 1


def test_smaller_micro_batches_are_printed_and_reported(capsys: pytest.CaptureFixture[str]) -> None:
    session = Reporter()
    report_smaller_micro_batches(session, 7, 32, 16, "computes its ticket again")
    assert session.adjustments == [{"local/1": 16}]
    assert "it now computes at most 16, and computes its ticket again" in capsys.readouterr().err


def test_members_that_disagree_twice_in_one_step_do_not_try_for_ever(tmp_path: Path) -> None:
    """A member that froze a parameter alone made every world break at the same step, without end."""
    loop = small_loop(str(tmp_path))
    loop._session.fail = lambda broken: None  # type: ignore[method-assign,misc]
    batches = loop.train(loop.feed, "identity", 0)
    next(batches)
    assert loop.current is not None
    loop._on_exchange_broken(loop.current, ExchangeBroken("lost local/1"))
    loop._on_exchange_broken(loop.current, ExchangeDisagreement("it begins operation 3"))
    with pytest.raises(MembersDiverged, match="do not exchange the same tensors"):
        loop._on_exchange_broken(loop.current, ExchangeDisagreement("it begins operation 3"))
