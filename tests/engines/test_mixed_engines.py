"""One run on three clusters, one after the other: each is taken away, and no step is lost."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.engines.all_engines import AllEngines, all_engines, why_not
from tests.engines.ssh_hosts import HUB
from tests.process.faults.checked_run import SCRIPT, CheckedRun

pytest.importorskip("ray", reason="SKIPPED, no Ray here: scripts/setup ray, or pip install 'shoal-train[ray]'")
pytestmark = [pytest.mark.engines, pytest.mark.process, pytest.mark.timeout(600)]

if why := why_not():
    pytest.skip(f"SKIPPED: {why}", allow_module_level=True)

SETTINGS = (f"host={HUB}", "lease_s=8", "notice.grace_s=60", "preload=torch,shoal.torch", "checkpoint.every_s=0")


@pytest.fixture(scope="module")
def clusters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AllEngines]:
    with all_engines(tmp_path_factory.mktemp("all_engines"), rays=2) as found:
        yield found


class Moving(CheckedRun):
    """Run that may use machines of all clusters, in this order: Slurm, Ray, ssh hosts."""

    def __init__(self, path: Path, clusters: AllEngines, on: str = "slurm,rays,lab", **plan: Any) -> None:
        self.clusters, self._on, self._folder = clusters, on, path / "project"
        self._folder.mkdir()
        shutil.copy(SCRIPT, self._folder / "train.py")
        self._exports = {"RECORDS": str(path / "records")}
        self._path = path
        super().__init__(path, "1:2", SETTINGS, **plan)

    def start(self, *arguments: str, where: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
        told = {**self._exports, "FAULTS": self.environ["FAULTS"]}
        (self._folder / "shoal.toml").write_text(self.clusters.pools(self._path, told))
        before = Path.cwd()
        os.chdir(self._folder)
        try:
            return super().start(*arguments, where=where)
        finally:
            os.chdir(before)

    def begin(self, *arguments: str) -> subprocess.Popen[bytes]:
        return super().begin("--on", self._on, *arguments[:-1], "train.py")

    def pools_now(self) -> list[str]:
        """Return the pools of the members that committed the last step."""
        commits = self.commits()
        last = [one for one in commits if one["step"] == commits[-1]["step"]] if commits else []
        return sorted(one["member"].rpartition("-")[0] for one in last)

    def until_on(self, *pools: str) -> None:
        self.until(lambda: self.pools_now() == sorted(pools), f"steps on {' and '.join(pools)}")


def test_ray_nodes_that_cannot_run_an_agent_are_reported_with_the_cause(clusters: AllEngines, tmp_path: Path) -> None:
    (tmp_path / "records").mkdir()
    with_old = clusters.pools(tmp_path, {}).replace(f'"{sys.executable}"', '"/nowhere/python"').replace("= 2", "= 3")
    (tmp_path / "shoal.toml").write_text(with_old)
    shutil.copy(SCRIPT, tmp_path / "train.py")
    environ = {**os.environ, "SHOAL_HOME": str(tmp_path / "home")}
    argv = ["run", "--on", "rays", "-n", "1:3", "--set", f"host={HUB}", "train.py"]
    done = subprocess.run(
        [sys.executable, "-m", "shoal.cli.main", *argv], cwd=tmp_path, env=environ, capture_output=True, timeout=90
    )
    said = done.stderr.decode()
    assert done.returncode == 4, said
    assert "error[S470] pool rays has no machine for run train-" in said
    assert re.search(r"\d machines in a row ended before their agents connected", said)
    assert "/nowhere/python" in said
    assert not clusters.left_in(tmp_path)


@pytest.mark.parametrize("pool", ["slurm", "rays"])
def test_doctor_checks_machines_of_a_cluster(clusters: AllEngines, tmp_path: Path, pool: str) -> None:
    (tmp_path / "shoal.toml").write_text(f'[run]\nhost = "{HUB}"\n' + clusters.pools(tmp_path, {}))
    environ = {**os.environ, "SHOAL_HOME": str(tmp_path / "home")}
    argv = [sys.executable, "-m", "shoal.cli.main", "doctor", pool, "--json"]
    done = subprocess.run(argv, cwd=tmp_path, env=environ, capture_output=True, timeout=150)
    assert done.returncode == 0, done.stderr.decode() + done.stdout.decode()
    found = json.loads(done.stdout)
    assert len(found["machines"]) == 2
    assert {(one["source"], one["target"]) for one in found["pairs"]} == {
        (f"{pool}-1", f"{pool}-2"),
        (f"{pool}-2", f"{pool}-1"),
    }
    assert all(one["attempts"][0]["bytes_per_s"] > 0 for one in found["pairs"])
    assert not clusters.left_in(tmp_path)


def test_slow_link_costs_time_and_a_cut_one_a_member_for_a_while(clusters: AllEngines, tmp_path: Path) -> None:
    run = Moving(tmp_path, clusters, "lab", epochs=40, pause_s=0.05, width=96)
    try:
        run.until_on("lab", "lab")
        with clusters.slow("h1", "3mbit"):
            run.until_step(run.step() + 15)
        assert not run.journal("WorldBroken"), "no member was dropped for being slow"
        clusters.hosts.cut("h2")
        run.until_size(1)
        run.until_step(run.step() + 5)
        clusters.hosts.heal("h2")
        run.until_size(2)
        run.finish()
        run.check_steps(run.order().total_steps)
        assert not clusters.left_in(tmp_path)
    finally:
        run.close()


def test_run_moves_from_slurm_to_ray_to_ssh_without_losing_a_step(clusters: AllEngines, tmp_path: Path) -> None:
    """Take away one pool after the other, the second by its controller; another is dead from the start."""
    run = Moving(tmp_path, clusters, "dead,slurm,rays,lab", epochs=80, pause_s=0.05)
    try:
        run.until_on("slurm", "slurm")
        assert "pool dead is unreachable" in run.output
        clusters.slurm.ask("scontrol", "update", "NodeName=n1,n2,n3", "State=DRAIN", "Reason=taken away")
        clusters.slurm.ask("scancel", f"--user={os.getuid()}")
        run.until_on("rays", "rays")
        clusters.slurm.stop_controller()
        run.until(lambda: "pool slurm is unreachable" in run.output, "the loss of the controller to be seen")
        for left in (1, 0):
            clusters.ray.raylets()[0].kill()
            run.until_on(*left * ["rays"], *(2 - left) * ["lab"])
        clusters.slurm.start_controller()
        run.until(lambda: "pool slurm is reachable again" in run.output, "the controller to be back")
        run.finish()
        run.check()
        assert {one for one in re.findall(r"(\d+) steps? lost", run.output)} == {"0"}
        assert "checkpoint" not in run.output, "the state went from machine to machine"
        assert not clusters.left_in(tmp_path)
    finally:
        run.close()
