"""Runs on machines of pools: several pools at once, with losses, and nothing left behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from shoal.testing.run_under_test import RunUnderTest

pytestmark = [pytest.mark.engines, pytest.mark.process, pytest.mark.timeout(600)]

SCRIPT = Path(__file__).with_name("train.py")


class PoolRun(RunUnderTest):
    """Run that takes its machines from pools."""

    def __init__(
        self, path: Path, on: str, members: str, pools: str, *settings: str, script: str, steps: int, text: str = ""
    ) -> None:
        self._on, self._folder = on, path / "project"
        self._folder.mkdir()
        (self._folder / "shoal.toml").write_text(pools)
        (self._folder / "words.py").write_text("GREETING = 'hello'\n")
        (self._folder / "secret.bin").write_text("not for others")
        (self._folder / ".shoalignore").write_text("*.bin\n")
        (self._folder / "train.py").write_text(text or SCRIPT.read_text())
        given = ("preload=torch,shoal.torch", "notice.grace_s=3", *settings)
        super().__init__(path, Path(script), members, given, {"STEPS": str(steps)})

    def start(self, *arguments: str, where: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
        before = Path.cwd()
        os.chdir(self._folder)
        try:
            return super().start(*arguments, where=where)
        finally:
            os.chdir(before)

    def begin(self, *arguments: str) -> subprocess.Popen[bytes]:
        return super().begin("--on", self._on, *arguments)

    def agents(self) -> dict[str, psutil.Process]:
        """Return the processes of the run's agents, by name."""
        found = {}
        for process in psutil.process_iter(["cmdline"]):
            argv = process.info["cmdline"] or []
            if "shoal.agent" in argv and any(part.startswith(str(self.home)) for part in argv):
                found[argv[argv.index("--name") + 1]] = process
        return found

    def until_agents(self, many: int) -> None:
        self.until(lambda: len(self.agents()) == many, f"{many} agents")

    def pools(self) -> dict[str, Any]:
        return {one["pool"]["pool"]: one["pool"] for one in self.shoal("pools")["in_use"]}

    def check_leftovers(self, within_s: float = 180.0) -> None:
        deadline = time.monotonic() + within_s
        while (left := self.agents()) or self.living():
            assert time.monotonic() < deadline, f"left behind: {left or self.living()}\n{self.output[-3000:]}"
            time.sleep(0.2)

    def living(self) -> list[int]:
        return list(self.pids().values())

    def close(self) -> None:
        try:
            super().close()
        finally:
            for process in self.agents().values():
                for one in (*process.children(recursive=True), process):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        one.kill()


@contextlib.contextmanager
def pool_run(
    path: Path,
    on: str,
    members: str,
    pools: str,
    *settings: str,
    script: str = str(SCRIPT),
    steps: int = 200,
    text: str = "",
) -> Iterator[PoolRun]:
    run = PoolRun(path, on, members, pools, *settings, script=script, steps=steps, text=text)
    try:
        yield run
    finally:
        run.close()


def pool(name: str, limit: int, **more: Any) -> str:
    lines = [f"[pool.{name}]", 'engine = "local"', f"limit = {limit}"]
    lines += [f"{key} = {value!r}".replace("'", '"') for key, value in more.items()]
    return "\n".join(lines) + "\n"


def test_run_uses_several_pools_replaces_losses_and_releases_all(tmp_path: Path) -> None:
    pools = pool("spot", 2, price=1.0, instead=3.0) + pool("lab", 2, price=2.0)
    with pool_run(tmp_path, "spot,lab", "1:3", pools, steps=400) as run:
        run.until_size(3)
        agents = run.agents()
        assert sorted(name.rpartition("-")[0] for name in agents) == ["lab", "spot", "spot"]
        lost = next(name for name in agents if name.startswith("lab"))
        agents[lost].kill()
        run.until(lambda: len(run.agents().keys() - agents.keys()) == 1, "another machine")
        run.until_size(3)
        assert run.pools()["spot"]["cost"]["spent"] > 0
        run.finish(timeout_s=150)
        assert {e["step"] for e in run.events_of("done")} == {400}
        run.check_leftovers()


def test_refusing_pool_does_not_delay_the_run(tmp_path: Path) -> None:
    pools = pool("broken", 2, python="/does/not/exist") + pool("good", 2)
    with pool_run(tmp_path, "broken,good", "2", pools, steps=60) as run:
        run.finish()
        assert "pool broken failed; next request" in run.output
        assert {e["member"].rpartition("-")[0] for e in run.events_of("ready")} == {"good"}
        run.check_leftovers()


def test_run_without_machines_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    with pool_run(tmp_path, "spot", "1", pool("spot", 1), "checkpoint.every_s=0", steps=120) as run:
        run.until_step(20)
        (agent,) = run.agents().values()
        agent.terminate()
        run.finish()
        assert "waiting for replacement machines" in run.output
        assert len({e["member"] for e in run.events_of("ready")}) == 2
        assert [e["step"] for e in run.commits()] == list(range(1, 121)), "a step was lost, or done twice"
        run.check_leftovers()


def test_run_with_servers_resumes_after_losing_all_machines_at_once(tmp_path: Path) -> None:
    settings = ("sync=stale:2", "servers=2", "checkpoint.every_s=0")
    with pool_run(tmp_path, "spot", "2", pool("spot", 8), *settings, steps=120) as run:
        run.until_step(20)
        before = run.agents()
        assert len(before) == 4
        for agent in before.values():
            agent.terminate()
        run.finish()
        left = max(int(step) for step in re.findall(r"wrote the checkpoint of step (\d+)", run.output))
        assert f"restored the checkpoint of step {left}" in run.output
        assert {e["step"] for e in run.events_of("done")} == {120}
        run.check_leftovers()


def test_machines_are_allocated_and_released_as_the_run_is_scaled(tmp_path: Path) -> None:
    with pool_run(tmp_path, "spot", "1:1", pool("spot", 3), steps=600) as run:
        run.until_size(1)
        run.shoal("scale", run.name, "1:3")
        run.until_size(3)
        run.shoal("scale", run.name, "1:1")
        run.until_agents(1)
        run.until_size(1)
        step = run.step()
        run.until_step(step + 5)
        run.shoal("stop", run.name)
        run.check_leftovers()


def test_killed_coordinator_adopts_its_allocations(tmp_path: Path) -> None:
    with pool_run(tmp_path, "spot", "1:2", pool("spot", 4), steps=400) as run:
        run.until_size(2)
        before = {name: process.pid for name, process in run.agents().items()}
        run.service_process("coordinator").kill()
        step = run.step()
        run.until_step(step + 30)
        run.until(lambda: run.pools()["spot"]["running"] == 2, "both to be known again")
        assert {name: process.pid for name, process in run.agents().items()} == before
        run.kill(next(iter(run.pids())))
        run.until_step(run.step() + 10)
        run.finish(timeout_s=150)
        run.check_leftovers()


def test_coordinator_killed_during_a_submission_leaves_nothing_unseen(tmp_path: Path) -> None:
    with pool_run(tmp_path, "spot", "1:3", pool("spot", 4), steps=300) as run:
        run.until(lambda: len(run.agents()) >= 1, "the first machine")
        run.service_process("coordinator").kill()
        run.until_size(3)
        assert len(run.agents()) == 3
        run.finish(timeout_s=150)
        run.check_leftovers()


def test_machines_without_the_shared_disk_get_the_project_only(tmp_path: Path) -> None:
    folder = tmp_path / "project"
    pools = pool("far", 2, shared=False).replace("False", "false")
    with pool_run(tmp_path, "far", "2", pools, "preload=torch,shoal.torch", script="train.py", steps=40) as run:
        run.finish()
        where = {Path(e["cwd"]) for e in run.events_of("ready")}
        assert len(where) == 2, "each machine has a copy of its own"
        assert not any(path.is_relative_to(folder) for path in where)
        assert all((path / "words.py").exists() and not (path / "secret.bin").exists() for path in where)
        assert run.output.count("sending ") == 1
        assert "words.py" in run.output
        run.check_leftovers()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_machines_are_released_when_the_command_ends(tmp_path: Path, number: int) -> None:
    with pool_run(tmp_path, "spot", "1:2", pool("spot", 4), steps=2000) as run:
        run.until_size(2)
        run.process.send_signal(number)
        run.check_leftovers()


def test_machines_end_without_command_and_coordinator(tmp_path: Path) -> None:
    with pool_run(tmp_path, "spot", "1:2", pool("spot", 4), "orphan_timeout_s=3", steps=5000) as run:
        run.until_size(2)
        coordinator = run.service_process("coordinator")
        run.process.kill()
        coordinator.kill()
        run.check_leftovers()
