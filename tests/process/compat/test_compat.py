"""Unmodified scripts under `shoal run --compat`, which restarts them when members change."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.process.faults.checked_run import CheckedRun

pytestmark = [pytest.mark.process, pytest.mark.faults, pytest.mark.timeout(600)]


class Unmodified(CheckedRun):
    """A script that does not use Shoal, under `shoal run --compat`."""

    def __init__(self, kind: str, script: str, *args: Any, **plan: Any) -> None:
        self.kind = kind
        self.script = Path(__file__).parent / script
        super().__init__(*args, **plan)

    def begin(self, *arguments: str) -> Any:
        return self.start("run", "--compat", self.kind, *arguments)

    def events_of(self, kind: str, restarts: int | None = None) -> list[dict[str, Any]]:
        return [e for e in self.events() if e["event"] == kind and restarts in (None, e.get("restarts"))]


@contextlib.contextmanager
def unmodified(*args: Any, **plan: Any) -> Iterator[Unmodified]:
    stage = Unmodified(*args, **plan)
    try:
        yield stage
    finally:
        stage.close()


def test_torchrun_script_runs_unmodified(tmp_path: Path) -> None:
    with unmodified("torchrun", "ddp.py", tmp_path, "2:3", epochs=3, pause_s=0.0) as run:
        run.finish()
        ready = run.events_of("ready")
        assert sorted((e["rank"], e["local_rank"], e["size"], e["restarts"]) for e in ready) == [
            (i, i, 3, 0) for i in range(3)
        ]
        assert len({e["sum"] for e in run.events_of("done")}) == 1
        assert "local/1 | trained as rank" in run.output


def test_killed_process_restarts_the_group_with_a_reason(tmp_path: Path) -> None:
    with unmodified("torchrun", "ddp.py", tmp_path, "2:3", epochs=12, pause_s=0.25) as run:
        run.until(lambda: len(run.events_of("epoch")) >= 6, "two epochs")
        victim = run.events_of("ready")[1]
        before = {e["pid"] for e in run.events_of("ready")}
        os.kill(victim["pid"], signal.SIGKILL)
        run.finish()
        again = run.events_of("ready", restarts=1)
        assert len(again) == 3
        assert not {e["pid"] for e in again} & before, "a process outlived the restart"
        assert {e["first"] for e in again} != {0}, "the script did not use its own checkpoint"
        assert {e["port"] for e in again} != {victim["port"]}, "the old port may still be in use"
        assert len({e["sum"] for e in run.events_of("done")}) == 1
        assert {e["restarts"] for e in run.events_of("done")} == {1}
        (note,) = restart_notes(run)
        assert "signal 9" in note


def test_script_that_always_fails_is_not_restarted_for_ever(tmp_path: Path) -> None:
    script = tmp_path / "wrong.py"
    script.write_text("import os\nassert os.environ['RANK'] != '1', 'rank one is wrong'\nimport time\ntime.sleep(60)\n")
    settings = ("restarts.user=1", "backoff_s=0.05")
    with unmodified("torchrun", str(script), tmp_path / "stage", "2:2", settings) as run:
        run.finish(exit_code=1)
        assert "rank one is wrong" in run.output
        assert len(restart_notes(run)) == 1


def test_tf_config_script_gets_its_cluster_and_new_ports_after_a_restart(tmp_path: Path) -> None:
    with unmodified("tf", "tf.py", tmp_path, "2:2") as run:
        run.until(lambda: run.output.count("met all 2") == 2, "both workers to connect")
        first = run.events_of("ready")
        check_cluster(first, 2)
        os.kill(first[0]["pid"], signal.SIGKILL)
        run.until(lambda: run.output.count("met all 2") == 4, "both workers to connect again")
        second = run.events_of("ready")[2:]
        check_cluster(second, 2)
        assert not workers_of(first) & workers_of(second), "the old ports may still be in use"
        (run.records / "go").touch()
        run.finish()


def restart_notes(run: CheckedRun) -> list[str]:
    return [line for line in run.output.splitlines() if line.startswith("shoal: all members restart: ")]


def check_cluster(ready: list[dict[str, Any]], size: int) -> None:
    assert sorted(e["config"]["task"]["index"] for e in ready) == list(range(size))
    assert {e["config"]["task"]["type"] for e in ready} == {"worker"}
    assert len({tuple(e["config"]["cluster"]["worker"]) for e in ready}) == 1
    assert len(workers_of(ready)) == size


def workers_of(ready: list[dict[str, Any]]) -> set[str]:
    return {worker for e in ready for worker in e["config"]["cluster"]["worker"]}
