"""Pools that do not work, as a user of `shoal run --on POOL` meets them: one clear error, and nothing left behind.

With a real Slurm and real ssh hosts; what Ray says is in test_engine_ray.
"""

from __future__ import annotations

import re
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.engines import slurm_cluster, ssh_hosts
from tests.engines.slurm_cluster import Cluster
from tests.engines.ssh_hosts import HUB, SshNetwork, ssh_network
from tests.engines.ssh_site import SOURCES

pytestmark = [pytest.mark.engines, pytest.mark.process, pytest.mark.timeout(600)]

if why := slurm_cluster.missing() or ssh_hosts.why_not():
    pytest.skip(f"SKIPPED: {why}", allow_module_level=True)

WITHIN_S = 180.0
LAUNCH, USAGE = 4, 2


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshNetwork]:
    with ssh_network(tmp_path_factory.mktemp("ssh") / "net", "h1", "h2") as network:
        yield network


@pytest.fixture(scope="module")
def slurm(network: SshNetwork) -> Iterator[Cluster]:
    """Start Slurm in the hub, where the tests are too."""
    found = Cluster(Path(tempfile.mkdtemp(prefix="shoal-slurm-")))
    try:
        found.start()
        yield found
    finally:
        found.stop()


class Site:
    """User with a project, a shoal.toml and the clusters."""

    def __init__(self, path: Path, network: SshNetwork, slurm: Cluster) -> None:
        self.path, self.network, self.slurm = path, network, slurm
        self.project, self.home = path / "project", path / "home"
        self.project.mkdir()
        shutil.copy(Path(__file__).with_name("train.py"), self.project)
        (path / "records").mkdir()
        self.tables: list[str] = []
        self.said = ""

    def ssh(self, name: str, *hosts: str, **more: Any) -> None:
        given = {"hosts": list(hosts or ("h1",)), "config": str(self.network.config), "connect_timeout_s": 10}
        setup = [f"export PYTHONPATH={SOURCES} RECORDS={self.path}/records STEPS=20 OMP_NUM_THREADS=1"]
        self.pool(name, "ssh", **{**given, "python": sys.executable, "setup": setup, **more})

    def on_slurm(self, name: str, **more: Any) -> None:
        self.pool(name, "slurm", **{"look_s": 0.2, "directory": str(self.path / "slurm"), **more})

    def pool(self, name: str, engine: str, **more: Any) -> None:
        lines = [f"[pool.{name}]", f'engine = "{engine}"', *(f"{key} = {_toml(value)}" for key, value in more.items())]
        self.tables.append("\n".join(lines))

    def run(self, on: str, *options: str, script: str = "train.py", code: int = LAUNCH) -> str:
        """Return the errors of `shoal run`; assert that it ends in time with this code and leaves nothing behind."""
        (self.project / "shoal.toml").write_text("\n".join(self.tables))
        environ = {**self.slurm.env, "SHOAL_HOME": str(self.home), "RECORDS": f"{self.path}/records", "STEPS": "20"}
        settings = [f"host={HUB}", "start_timeout_s=3", "preload=torch,shoal.torch", "notice.grace_s=3"]
        given = [part for one in settings for part in ("--set", one)]
        argv = [sys.executable, "-m", "shoal.cli.main", "run", "--on", on, *given, *options, script]
        done = subprocess.run(
            argv, cwd=self.project, env=environ, capture_output=True, text=True, timeout=WITHIN_S, check=False
        )
        assert done.returncode == code, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
        assert done.stderr.count("error[") == (1 if code else 0), done.stderr
        self.nothing_is_left()
        self.said = done.stdout
        return done.stderr

    def nothing_is_left(self) -> None:
        # Jobs take their time to complete, and processes to end.
        deadline = time.monotonic() + WITHIN_S
        while left := [*self.slurm.ask("squeue", "--noheader", "--format=%j").stdout.split(), *self._processes()]:
            assert time.monotonic() < deadline, left
            time.sleep(0.1)
        places = [self.path / "slurm", *(self.network.home(host) for host in ("h1", "h2"))]
        assert not [str(file) for place in places for file in place.rglob("token*")], "a token is left"

    def _processes(self) -> list[list[str]]:
        found = [one.info["cmdline"] or [] for one in psutil.process_iter(["cmdline"])]
        mine = (str(self.home), str(self.path / "slurm"), str(self.network.home("h1")), str(self.network.home("h2")))
        return [argv for argv in found if any(part.startswith(mine) for part in argv)]


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value).replace("'", '"')


@pytest.fixture
def site(tmp_path: Path, network: SshNetwork, slurm: Cluster, monkeypatch: pytest.MonkeyPatch) -> Site:
    for host in ("h1", "h2"):
        shutil.rmtree(network.home(host) / ".shoal", ignore_errors=True)
    return Site(tmp_path, network, slurm)


def parts(said: str) -> dict[str, str]:
    """Return the lines of an error, by their labels."""
    block = said[said.index("error[") :].splitlines()
    found = {"what": block[0]}
    for line in block[1:]:
        match = re.match(r"  (where|why|do|more)\s+(.*)", line)
        if match:
            found[match[1]] = match[2]
    return found


# --- Slurm


def test_unknown_partition_is_named(site: Site) -> None:
    site.on_slurm("batch", partition="nix")
    error = parts(site.run("batch"))
    assert re.fullmatch(r"error\[S470\] pool batch has no machine for run train-\w+", error["what"])
    assert error["where"] == "[pool.batch] partition = 'nix'"
    assert "unknown partition: " in error["why"]
    assert error["do"] == "sinfo lists the partitions"


def test_pool_smaller_than_the_run_needs_is_named(site: Site) -> None:
    site.on_slurm("batch", limit=0)
    site.ssh("lab", "h1", "h2")
    error = parts(site.run("batch,lab", "-n", "3:4"))
    assert "pools batch, lab have no machines" in error["what"]
    assert "batch: its limit is 0, so it provides no machines" in error["why"]
    assert "lab: it provides at most 2 slots, but the run needs at least 3" in error["why"]
    assert "batch: raise its limit; lab: " in error["do"]


def test_python_too_old_for_an_agent_is_named(site: Site, tmp_path: Path) -> None:
    # As every Python before 3.11 says it.
    old = _program(tmp_path / "python3.9", "echo 'Unknown option: -P' >&2; echo 'usage: python3 [option]' >&2; exit 2")
    site.on_slurm("batch", python=str(old), limit=3)
    error = parts(site.run("batch", "-n", "1:3"))
    assert "machines in a row ended before their agents connected" in error["why"]
    assert f"{old} is older than Python 3.11: set python = in its pool to a newer one" in error["why"]


# --- ssh


def test_unreachable_host_is_named(site: Site) -> None:
    site.ssh("lab", "10.91.0.200", connect_timeout_s=2)
    error = parts(site.run("lab"))
    assert "every request failed for 3 s: " in error["why"]
    assert "10.91.0.200 does not answer" in error["why"]
    assert "check that it is up" in error["do"]


def test_each_pool_is_named_with_its_own_cause_and_remedy(site: Site, tmp_path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "other")], check=True)
    config = tmp_path / "config"
    config.write_text(site.network.config.read_text().replace("IdentityFile", "#"))
    site.ssh("key", "h1", config=str(config), identity=str(tmp_path / "other"))
    disk = tmp_path / "disk"
    disk.mkdir()
    site.network.on("h1", "mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk))
    site.network.on("h1", "sh", "-c", f"head -c 100000 /dev/zero >{disk}/fill || true")
    site.ssh("disk", "h1", directory=str(disk))
    site.ssh("old", "h2", python=str(_program(tmp_path / "old", "echo 3.9.2")))
    site.on_slurm("batch", partition="nix")
    error = parts(site.run("key,disk,old,batch", "-n", "1:4"))
    assert "pools key, disk, old, batch have no machines" in error["what"]
    assert re.search(r"key: authentication failed on h1: .*Permission denied \(publickey\)", error["why"])
    assert "disk: no space left on h1: " in error["why"]
    assert re.search(r"old: Python on h2 is too old: .*3\.9\.2", error["why"])
    assert "batch: unknown partition" in error["why"]
    assert "identity in [pool.key]" in error["do"]
    assert "disk: free space around" in error["do"]
    assert site.network.on("h1", "find", str(disk), "-name", "token*") == ""


def test_clock_an_hour_late_is_reported_and_does_no_harm(site: Site, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import time\nright = time.time\ntime.time = lambda: right() - 3600.0\n")
    told = f"PYTHONPATH={tmp_path}:{SOURCES} RECORDS={tmp_path}/records STEPS=20 OMP_NUM_THREADS=1"
    late = _program(tmp_path / "late", f'exec env {told} {sys.executable} "$@"')
    site.ssh("lab", "h1", python=str(late), setup=[])
    site.run("lab", code=0)
    assert re.search(r"lab-1 of pool lab is running: its clock is 3[56]\d\d s behind this machine's: set it", site.said)


# --- here


def test_missing_script_is_named(site: Site) -> None:
    site.on_slurm("batch")
    error = parts(site.run("batch", script="trian.py", code=USAGE))
    assert "no such script: trian.py" in error["what"]
    assert error["do"] == "did you mean train.py?"
    assert not (site.home / "coordinators").exists()


def _program(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path
