"""Run on ssh hosts, one of which loses power and returns."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.engines.ssh_hosts import HUB, SshNetwork, ssh_network, why_not
from tests.engines.ssh_site import SOURCES

from shoal.store import checkpoint
from shoal.store.blob_store import open_store
from shoal.testing.run_under_test import RunUnderTest

pytestmark = [pytest.mark.engines, pytest.mark.process, pytest.mark.timeout(600)]

if why := why_not():
    pytest.skip(f"ssh hosts: {why}", allow_module_level=True)

SETTINGS = (f"host={HUB}", "lease_s=2", "notice.grace_s=3", "preload=torch,shoal.torch", "checkpoint.every_steps=100")


class OnHosts(RunUnderTest):
    """Run on a pool of ssh hosts; the project is sent to them."""

    def __init__(self, path: Path, network: SshNetwork, members: str, steps: int) -> None:
        project = path / "project"
        project.mkdir()
        shutil.copy(Path(__file__).with_name("train.py"), project)
        records = path / "records"
        exports = {"PYTHONPATH": SOURCES, "RECORDS": records, "STEPS": steps, "OMP_NUM_THREADS": 1}
        setup = " ".join(f"{name}={value}" for name, value in exports.items())
        hosts = [f"h{number}" for number in (1, 2)]
        (project / "shoal.toml").write_text(
            f'[pool.lab]\nengine = "ssh"\nhosts = {hosts}\nconfig = "{network.config}"\nconnect_timeout_s = 2\n'
            f'lost_after_s = 5\npython = "{sys.executable}"\nsetup = ["export {setup}"]\n'
        )
        os.chdir(project)
        super().__init__(path, Path("train.py"), members, SETTINGS)

    def begin(self, *arguments: str) -> subprocess.Popen[bytes]:
        return super().begin("--on", "lab", *arguments)


def test_run_continues_when_a_host_loses_power_and_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with ssh_network(tmp_path / "net", "h1", "h2") as network:
        run = OnHosts(tmp_path, network, "1:2", steps=600)
        try:
            run.until_size(2)
            network.power_off("h2")
            run.until_size(1)
            alone = run.step()
            run.until_step(alone + 10)
            network.boot("h2")
            network.heal("h2")
            run.until_size(2)
            run.finish(timeout_s=200)
            assert {one["step"] for one in run.events_of("done")} == {600}
            (kept,) = run.home.glob("coordinators/*/runs/*/checkpoints")
            entries = checkpoint.entries(open_store(str(kept)))
            assert entries, "hosts send their checkpoints to the coordinator"
            assert entries[0].step >= 500
            for host in ("h1", "h2"):
                assert not network.running(host, "shoal.agent")
                assert not list(network.home(host).rglob("token*"))
        finally:
            run.close()
