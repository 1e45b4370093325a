"""Hosts with nothing but Python: a run brings its environment, which is built there once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engines.ssh_hosts import HUB, SshNetwork, ssh_network, why_not

from shoal.testing import wheelhouse
from shoal.testing.run_under_test import RunUnderTest

pytestmark = [pytest.mark.engines, pytest.mark.process, pytest.mark.timeout(600)]

if why := why_not():
    pytest.skip(f"ssh hosts: {why}", allow_module_level=True)

# The one that our own environment was made with: it has no Shoal.
BARE = os.path.realpath(sys.executable)
SETTINGS = (f"host={HUB}", "lease_s=2", "notice.grace_s=3", "preload=torch,shoal.torch")
POOL = """
[pool.lab]
engine = "ssh"
hosts = ["h1*2"]
config = "{config}"
connect_timeout_s = 2
python = "{python}"
setup = ["export RECORDS={records} STEPS={steps} OMP_NUM_THREADS=1 PIP_NO_COMPILE=0"]
environment = "requirements.txt"
{more}
"""


class Bare(RunUnderTest):
    """Run on hosts without Shoal."""

    def __init__(self, path: Path, network: SshNetwork, requirements: str, steps: int = 40, more: str = "") -> None:
        project = path / "project"
        project.mkdir(parents=True)
        shutil.copy(Path(__file__).with_name("train.py"), project)
        (project / "requirements.txt").write_text(requirements)
        about = {"config": network.config, "python": BARE, "records": path / "records", "steps": steps, "more": more}
        (project / "shoal.toml").write_text(POOL.format(**about))
        os.chdir(project)
        super().__init__(path, Path("train.py"), "2:2", SETTINGS)

    def begin(self, *arguments: str) -> subprocess.Popen[bytes]:
        return super().begin("--on", "lab", *arguments)


@pytest.fixture
def network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SshNetwork]:
    monkeypatch.chdir(tmp_path)
    with ssh_network(tmp_path / "net", "h1") as network:
        yield network


def environments(network: SshNetwork) -> Path:
    return network.home("h1") / ".shoal" / "environments"


def folders(network: SshNetwork) -> list[str]:
    return [one.name for one in environments(network).iterdir() if one.is_dir()]


def check_leftovers(network: SshNetwork) -> None:
    assert not network.running("h1", "shoal.agent")
    assert not network.those("h1", lambda one: "first.py" in " ".join(one.cmdline()))
    assert not list((network.home("h1") / ".shoal" / "allocations").rglob("token*"))


def test_run_trains_on_hosts_with_nothing_but_python(network: SshNetwork, tmp_path: Path) -> None:
    wheels = wheelhouse.fill(tmp_path / "wheels", "torch")
    index = f"--no-index\n--find-links {wheels}\n"
    run = Bare(tmp_path / "first", network, f"{index}torch\n")
    try:
        run.finish(timeout_s=150)
        assert {one["step"] for one in run.events_of("done")} == {40}
        assert len(run.events_of("ready")) == 2
        assert "builds its environment from requirements.txt" in run.output
        assert len(folders(network)) == 1, "two agents at once build one"
        check_leftovers(network)
    finally:
        run.close()
    before = folders(network)
    run = Bare(tmp_path / "second", network, f"{index}torch\n")
    try:
        run.finish(timeout_s=100)
        assert len(run.events_of("done")) == 2
        assert "builds" not in run.output
        assert folders(network) == before, "it was found there"
        check_leftovers(network)
    finally:
        run.close()


def test_environment_that_cannot_be_built_ends_the_run_with_its_cause(network: SshNetwork, tmp_path: Path) -> None:
    run = Bare(tmp_path / "bad", network, f"--no-index\n--find-links {tmp_path}\nno-such-thing==9\n")
    try:
        run.finish(exit_code=4, timeout_s=100)
        told = run.output[run.output.index("error[S470] pool lab has no machine") :]
        assert "where  h1:" in told
        assert "requirements.txt cannot be installed on h1: ERROR:" in told
        assert "No matching distribution found for no-such-thing==9" in told
        assert "correct requirements.txt (shoal explain S441)" in told
        assert folders(network) == []
        check_leftovers(network)
    finally:
        run.close()


def test_full_disk_is_named(network: SshNetwork, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    network.on("h1", "mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk))
    wheels = wheelhouse.fill(tmp_path / "wheels", "torch")
    more = f'directory = "{disk}"'
    run = Bare(tmp_path / "full", network, f"--no-index\n--find-links {wheels}\ntorch\n", more=more)
    try:
        run.until(lambda: "no space is left on h1 for the environment" in run.output, "the error")
        run.process.terminate()
        run.process.wait(180)
        assert not network.on("h1", "find", str(disk), "-name", "token*")
        assert not network.on("h1", "find", f"{disk}/environments", "-mindepth", "1", "-type", "d")
    finally:
        run.close()
