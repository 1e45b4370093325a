"""Unmodified scripts with TensorFlow's own strategies run under `--compat`, and restart after a loss."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.testing.run_under_test import RunUnderTest

pytest.importorskip("tensorflow")
pytestmark = [pytest.mark.keras, pytest.mark.timeout(600)]

TIMEOUT_S = 110.0


class CompatRun(RunUnderTest):
    """Run of a TensorFlow script under `shoal run --compat`."""

    def __init__(self, path: Path, script: str, *options: str, members: str) -> None:
        self._options = options
        super().__init__(
            path,
            Path(__file__).with_name(script),
            members,
            ("backoff_s=0.1",),
            {"TF_CPP_MIN_LOG_LEVEL": "2", "SHOAL_PRELOAD": "json"},
        )

    def begin(self, *arguments: str) -> Any:
        return self.start("run", *self._options, *arguments)

    def restarts(self) -> list[str]:
        """Return the reasons of restarts in the story."""
        story = self.shoal("why", self.name)
        return [line["text"] for line in story if line["text"].startswith("all members restart")]


@contextlib.contextmanager
def compat_run(*args: Any, **more: Any) -> Iterator[CompatRun]:
    run = CompatRun(*args, **more)
    try:
        yield run
    finally:
        run.close()


def test_mirrored_strategy_continues_after_a_killed_worker(tmp_path: Path) -> None:
    with compat_run(tmp_path, "train_mirrored.py", "--compat", "tf", members="2") as run:
        run.until(lambda: len(run.events_of("epoch")) == 6, "three epochs", TIMEOUT_S)
        before = run.events_of("ready")
        assert sorted((e["index"], e["size"]) for e in before) == [(0, 2), (1, 2)]
        os.kill(next(e["pid"] for e in before if e["index"] == 1), signal.SIGKILL)
        run.finish(timeout_s=TIMEOUT_S)
        again = run.events_of("ready")[2:]
        assert sorted((e["index"], e["size"]) for e in again) == [(0, 2), (1, 2)]
        assert min(e["first"] for e in again) > 0, "its own checkpoint was not used"
        assert {e["epoch"] for e in run.events_of("epoch")} == set(range(6))
        (reason,) = run.restarts()
        assert "local/1 ended: killed by signal 9" in reason
        assert reason in run.output, "the reason was not shown while it ran"


def test_parameter_server_strategy_continues_after_a_killed_worker(tmp_path: Path) -> None:
    options = ("--compat", "ps", "--servers", "1")
    with compat_run(tmp_path, "train_parameter_servers.py", *options, members="2") as run:
        run.until(lambda: len(run.events_of("round")) == 3, "three rounds", TIMEOUT_S)
        before = {(e["type"], e["index"]): e["pid"] for e in run.events_of("ready")}
        assert sorted(before) == [("chief", 0), ("ps", 0), ("worker", 0), ("worker", 1)]
        os.kill(before["worker", 1], signal.SIGKILL)
        run.finish(timeout_s=TIMEOUT_S)
        again = run.events_of("ready")[4:]
        assert not {e["pid"] for e in again} & set(before.values()), "a process outlived the restart"
        (chief,) = [e for e in again if e["type"] == "chief"]
        assert chief["first"] > 0, "its own checkpoint was not used"
        assert {e["round"] for e in run.events_of("round")} == set(range(6))
        (reason,) = run.restarts()
        assert "local/1 ended: killed by signal 9" in reason
        assert "trained with 2 workers" in run.output
