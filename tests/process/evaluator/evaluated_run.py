"""A run with an evaluator under test."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.process.faults.checked_run import CheckedRun

from shoal.testing.run_under_test import read_journal

SCRIPT = Path(__file__).with_name("train.py")
EVALUATOR = "local/evaluator-0"
# Evaluators have the lowest priority, below other tests too.
TIMEOUT_S = 300.0


class EvaluatedRun(CheckedRun):
    """A run with `--evaluator`."""

    script = SCRIPT

    def begin(self, *arguments: str) -> subprocess.Popen[bytes]:
        return super().begin("--evaluator", *arguments)

    def until(self, ready: Callable[[], Any], what: str, timeout_s: float = TIMEOUT_S) -> None:
        super().until(ready, what, timeout_s)

    def finish(self, exit_code: int = 0, timeout_s: float = TIMEOUT_S) -> None:
        super().finish(exit_code, timeout_s)

    def run_id(self) -> str:
        run_id: str = self.shoal("ps", "--all")[0]["run"]
        return run_id

    def evaluations(self) -> list[dict[str, Any]]:
        """Return the evaluations in the journal, oldest first; empty before there is a journal.

        A report whose reply was lost with the connection is repeated, and does not count again.
        """
        journals = self.home.glob("coordinators/*/journal.jsonl")
        reports = [entry["fields"] for file in journals for entry in read_journal(file, "EvaluationReported")]
        return [report for report, before in zip(reports, [None, *reports], strict=False) if report != before]

    def scored(self) -> list[dict[str, Any]]:
        return [event for event in self.events() if event["event"] == "evaluate"]

    def worlds(self) -> set[int]:
        return {commit["world"] for commit in self.commits()}


@contextlib.contextmanager
def evaluated_run(path: Path, members: str = "1", *settings: str, **plan: Any) -> Iterator[EvaluatedRun]:
    run = EvaluatedRun(path, members, settings, **plan)
    try:
        yield run
    finally:
        run.close()
