"""A loss that is not a finite number is said once, with its step and a code."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.worker.training.loss_monitor import LossMonitor


class Reports:
    def __init__(self) -> None:
        self.made: list[tuple[int, str, bool]] = []

    def report_adjustment(self, step: int, what: str, values: Any, reason: str, *, send: bool = True) -> None:
        del values
        assert what == "loss"
        self.made.append((step, reason, send))


def test_first_bad_loss_is_printed_and_reported(capsys: pytest.CaptureFixture[str]) -> None:
    reports = Reports()
    monitor = LossMonitor(reports)
    for step, loss in enumerate([None, 1.0, float("nan"), float("nan"), float("inf")]):
        monitor.observe(step, loss)
    assert reports.made == [(2, "the loss of step 2 is nan [S325]", True)]
    assert capsys.readouterr().err.startswith("warning[S325] the loss of step 2 is nan\n")


def test_loss_that_keeps_changing_is_reported_a_few_times(capsys: pytest.CaptureFixture[str]) -> None:
    reports = Reports()
    monitor = LossMonitor(reports)
    for step in range(100):
        monitor.observe(step, float("inf") if step % 2 else 1.0, send=False)
    assert [step for step, _, _ in reports.made] == [1, 3, 5]
    assert capsys.readouterr().err == ""
