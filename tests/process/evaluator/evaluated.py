"""A run with an evaluator under test."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.process.faults.stage import Stage

SCRIPT = Path(__file__).with_name("train.py")
EVALUATOR = "local/evaluator-0"
# Evaluators give way to everybody, other tests included.
PATIENCE_S = 300.0


class Evaluated(Stage):
    """One run with `--evaluator`."""

    script = SCRIPT

    def begin(self, *arguments: str) -> subprocess.Popen[bytes]:
        return super().begin("--evaluator", *arguments)

    def until(self, ready: Callable[[], Any], what: str, timeout_s: float = PATIENCE_S) -> None:
        super().until(ready, what, timeout_s)

    def finish(self, exit_code: int = 0, timeout_s: float = PATIENCE_S) -> None:
        super().finish(exit_code, timeout_s)

    def run_id(self) -> str:
        found: str = self.shoal("ps", "--all")[0]["run"]
        return found

    def evaluations(self) -> list[dict[str, Any]]:
        """What the journal has of evaluations, oldest first."""
        found = []
        for file in self.home.glob("coordinators/*/journal.jsonl"):
            whole = file.read_text().rpartition("\n")[0]
            found += [
                entry for line in whole.splitlines() if (entry := json.loads(line))["kind"] == "EvaluationReported"
            ]
        return [entry["fields"] for entry in found]

    def scored(self) -> list[dict[str, Any]]:
        return [event for event in self.events() if event["event"] == "evaluate"]

    def worlds(self) -> set[int]:
        return {commit["world"] for commit in self.commits()}


@contextlib.contextmanager
def evaluated(path: Path, members: str = "1", *settings: str, **plan: Any) -> Iterator[Evaluated]:
    stage = Evaluated(path, members, settings, **plan)
    try:
        yield stage
    finally:
        stage.close()
