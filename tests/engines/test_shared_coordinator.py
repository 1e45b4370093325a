"""Shared coordinator with pools: several users submit from elsewhere and share its machines."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from shoal.testing.scripts.hold import HOLD
from shoal.testing.wait import TIMEOUT_S, until

pytestmark = [pytest.mark.engines, pytest.mark.process, pytest.mark.timeout(600)]

SCRIPT = Path(__file__).with_name("train.py")
POOLS = '[pool.farm]\nengine = "local"\nlimit = 2\nprice = 1.0\n'
# On a busy machine a member may be silent for longer than a usual lease, which would be a loss.
LONG_LEASE = ("--set", "lease_s=60", "--set", "reconnect_s=60")


class Standing:
    """Process of `shoal coordinator` in a folder with pools; its users have folders of their own."""

    def __init__(self, path: Path, home: Path | None = None) -> None:
        self.path, self.directory = path, path / "coordinator"
        self.records = path / "records"
        self.environ = {**os.environ, "OMP_NUM_THREADS": "1", "RECORDS": str(self.records), "STEPS": "60"}
        self.environ |= {"SHOAL_PRELOAD": "torch,shoal.torch", "SHOAL_HOME": str(home or path / "home")}
        self.records.mkdir()
        (path / "shoal.toml").write_text(POOLS)
        argv = ["coordinator", "--dir", str(self.directory)]
        self.process = subprocess.Popen(self._argv(*argv), env=self.environ, cwd=path, stdout=subprocess.DEVNULL)
        self.until(lambda: (self.directory / "url").exists(), "the coordinator")
        self.url = (self.directory / "url").read_text().strip()

    def _argv(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "shoal.cli.main", *arguments]

    def user(self, name: str) -> tuple[str, ...]:
        """Return a user's project folder, and the options that address the coordinator."""
        self.shoal("token", name, "--dir", str(self.directory), where=self.path)
        folder = self.path / name
        folder.mkdir()
        shutil.copy(SCRIPT, folder / "train.py")
        return ("--url", self.url, "--token-file", str(self.directory / "tokens" / name))

    def shoal(self, *arguments: str, where: Path, code: int = 0) -> Any:
        argv = self._argv("--json", *arguments)
        done = subprocess.run(
            argv, env=self.environ, cwd=where, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        assert done.returncode == code, done.stdout + done.stderr
        text = done.stdout if code == 0 else done.stderr
        return json.loads(text) if text.strip() else None

    def until(self, ready: Any, what: str) -> None:
        until(ready, what, details=self._story, poll_s=0.1)

    def _story(self) -> str:
        """Return the ends of the journal and of the agents' logs."""
        logs = [self.directory / "journal.jsonl", *self.path.glob("home/allocations/*/*/agent.log")]
        return "\n".join(f"{log}:\n{log.read_text(errors='replace')[-3000:]}" for log in logs if log.exists())

    def agents(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter(["cmdline"]):
            argv = process.info["cmdline"] or []
            if "shoal.agent" in argv and any(part.startswith(str(self.path)) for part in argv):
                found.append(process)
        return found

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(TIMEOUT_S)
        for process in self.agents():
            for one in (*process.children(recursive=True), process):
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()


@pytest.fixture
def standing(tmp_path: Path) -> Iterator[Standing]:
    found = Standing(tmp_path)
    yield found
    found.close()


def test_two_users_share_machines_of_a_coordinator_and_release_them(standing: Standing) -> None:
    ada, bob = standing.user("ada"), standing.user("bob")
    path = standing.path
    submit = ("run", "--on", "farm", "-n", "1:2", "--detach")
    first = standing.shoal(*submit, *ada, "train.py", where=path / "ada")
    second = standing.shoal(*submit, *bob, "train.py", where=path / "bob")
    assert (first["user"], second["user"]) == ("ada", "bob")
    runs = (first["run"], second["run"])

    def views() -> dict[str, Any]:
        return {one["run"]: one for one in standing.shoal("ps", *ada, where=path)}

    standing.until(lambda: all(views()[run]["status"] == "done" for run in runs), "both runs to end")
    assert len(standing.agents()) <= 2
    standing.until(lambda: not standing.agents(), "the machines to be given back")
    assert all(views()[run]["cost"]["spent"] > 0 for run in runs)
    assert views()[runs[0]]["ended"] <= views()[runs[1]]["ended"] + 60


def test_unknown_pool_of_a_coordinator_is_refused(standing: Standing) -> None:
    ada = standing.user("ada")
    where = standing.path / "ada"
    problem = standing.shoal("run", "--on", "moon", "--detach", *ada, "train.py", where=where, code=3)
    assert problem["code"] == "S140"
    assert "farm" in problem["do"]


def test_machines_survive_a_restart_of_the_coordinator(standing: Standing) -> None:
    ada, run, before = _trained_by_two(standing)
    standing.process.send_signal(signal.SIGTERM)
    standing.process.wait(TIMEOUT_S)
    assert sorted(process.pid for process in standing.agents()) == before
    _start_again(standing)
    standing.until(lambda: _is_trained(standing, run, ada), "training to go on")
    assert sorted(process.pid for process in standing.agents()) == before


def test_machines_of_a_removed_pool_are_used_and_then_released(standing: Standing) -> None:
    path, (ada, run, before) = standing.path, _trained_by_two(standing)
    standing.process.send_signal(signal.SIGTERM)
    standing.process.wait(TIMEOUT_S)
    (path / "shoal.toml").write_text(POOLS.replace("farm", "yard"))
    _start_again(standing)
    standing.until(lambda: _is_trained(standing, run, ada), "training to go on")
    assert sorted(process.pid for process in standing.agents()) == before
    assert '"AgentNotice"' not in (standing.directory / "journal.jsonl").read_text(), (
        "none is released while it is used"
    )
    standing.shoal("stop", run, *ada, where=path)
    standing.until(lambda: not standing.agents(), "the machines to be given back")


def test_coordinators_with_equal_directory_names_spare_each_others_machines(standing: Standing, tmp_path: Path) -> None:
    path, (ada, run, before) = standing.path, _trained_by_two(standing)
    (tmp_path / "elsewhere").mkdir()
    other = Standing(tmp_path / "elsewhere", home=path / "home")
    try:
        bob = other.user("bob")
        second = other.shoal("run", "--on", "farm", "--detach", *bob, "train.py", where=other.path / "bob")["run"]
        seen = ("status", second, *bob)
        other.until(lambda: other.shoal(*seen, where=other.path)["status"] == "done", "the other's run to end")
        assert sorted(process.pid for process in standing.agents() if process.pid in before) == before
        assert _is_trained(standing, run, ada)
    finally:
        other.close()


def _trained_by_two(standing: Standing) -> tuple[tuple[str, ...], str, list[int]]:
    """Return a user, a run that two machines train and hold, and their agents."""
    ada = standing.user("ada")
    (standing.records / HOLD).touch()
    asked = ("run", "--on", "farm", "-n", "2", "--detach", *LONG_LEASE, *ada, "train.py", "2000")
    run = standing.shoal(*asked, where=standing.path / "ada")["run"]
    standing.until(lambda: _is_trained(standing, run, ada), "a world of two")
    return ada, run, sorted(process.pid for process in standing.agents())


def _start_again(standing: Standing) -> None:
    argv = standing._argv("coordinator", "--dir", str(standing.directory))
    standing.process = subprocess.Popen(argv, env=standing.environ, cwd=standing.path, stdout=subprocess.DEVNULL)


def _is_trained(standing: Standing, run: str, who: tuple[str, ...]) -> bool:
    try:
        view = standing.shoal("status", run, *who, where=standing.path)
    except AssertionError:
        return False
    return bool(view["world_size"] == 2 and view["losses"] == 0 and all(one["connected"] for one in view["members"]))
