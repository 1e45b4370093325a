"""Scripts of TensorFlow's own strategies run as they are: not without a restart, but without a change to them."""

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
pytestmark = [pytest.mark.keras, pytest.mark.timeout(240)]

PATIENCE_S = 110.0


class Unmodified(RunUnderTest):
    """A script of TensorFlow under `shoal run --compat`."""

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

    def told(self) -> list[str]:
        """What the story says of restarts."""
        story = self.shoal("why", self.name)
        return [line["text"] for line in story if line["text"].startswith("all members restart")]


@contextlib.contextmanager
def unmodified(*args: Any, **more: Any) -> Iterator[Unmodified]:
    stage = Unmodified(*args, **more)
    try:
        yield stage
    finally:
        stage.close()


def test_a_mirrored_strategy_goes_on_after_one_of_its_workers_was_killed(tmp_path: Path) -> None:
    with unmodified(tmp_path, "mirrored.py", "--compat", "tf", members="2") as run:
        run.until(lambda: len(run.events_of("epoch")) == 6, "three epochs", PATIENCE_S)
        before = run.events_of("ready")
        assert sorted((e["index"], e["size"]) for e in before) == [(0, 2), (1, 2)]
        os.kill(next(e["pid"] for e in before if e["index"] == 1), signal.SIGKILL)
        run.finish(timeout_s=PATIENCE_S)
        again = run.events_of("ready")[2:]
        assert sorted((e["index"], e["size"]) for e in again) == [(0, 2), (1, 2)]
        assert min(e["first"] for e in again) > 0, "its own checkpoint was not used"
        assert {e["epoch"] for e in run.events_of("epoch")} == set(range(6))
        (reason,) = run.told()
        assert "local/1 ended: killed by signal 9" in reason
        assert reason in run.output, "the reason was not shown while it ran"


def test_parameter_servers_go_on_after_a_worker_was_killed(tmp_path: Path) -> None:
    options = ("--compat", "ps", "--servers", "1")
    with unmodified(tmp_path, "unmodified_ps.py", *options, members="2") as run:
        run.until(lambda: len(run.events_of("round")) == 3, "three rounds", PATIENCE_S)
        before = {(e["type"], e["index"]): e["pid"] for e in run.events_of("ready")}
        assert sorted(before) == [("chief", 0), ("ps", 0), ("worker", 0), ("worker", 1)]
        os.kill(before["worker", 1], signal.SIGKILL)
        run.finish(timeout_s=PATIENCE_S)
        again = run.events_of("ready")[4:]
        assert not {e["pid"] for e in again} & set(before.values()), "a process outlived the restart"
        (chief,) = [e for e in again if e["type"] == "chief"]
        assert chief["first"] > 0, "its own checkpoint was not used"
        assert {e["round"] for e in run.events_of("round")} == set(range(6))
        (reason,) = run.told()
        assert "local/1 ended: killed by signal 9" in reason
        assert "trained with 2 workers" in run.output
