"""`shoal doctor POOL` on real hosts: one of them has a firewall, and all are released."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engines.ssh_hosts import SshNetwork, ssh_network, why_not
from tests.engines.ssh_site import SOURCES
from tests.netns.network import firewall

pytestmark = [pytest.mark.engines, pytest.mark.process, pytest.mark.timeout(600)]

if why := why_not():
    pytest.skip(f"ssh hosts: {why}", allow_module_level=True)

PORTS = "20000-20100"
HOSTS = ("h1", "h2")


@pytest.fixture
def network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SshNetwork]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "home"))
    with ssh_network(tmp_path / "net", *HOSTS) as made:
        (tmp_path / "shoal.toml").write_text(
            f'[run]\nports = "{PORTS}"\n[pool.lab]\nengine = "ssh"\nhosts = {list(HOSTS)}\nconfig = "{made.config}"\n'
            f'python = "{sys.executable}"\nsetup = ["export PYTHONPATH={SOURCES} OMP_NUM_THREADS=1"]\n'
        )
        yield made


def doctor(*words: str) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-m", "shoal.cli.main", "doctor", "lab", *words]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def check_all_is_given_back(network: SshNetwork) -> None:
    for host in HOSTS:
        assert not network.running(host, "shoal.agent"), f"an agent is left on {host}"
        assert not list(network.home(host).rglob("token*"))
    assert not list(Path(os.environ["SHOAL_HOME"], "coordinators").iterdir())


def test_doctor_names_pair_port_and_remedy_and_releases_all_machines(network: SshNetwork) -> None:
    firewall(network.space("h2"), PORTS)
    asked = doctor("--json")
    out, err = asked.communicate(timeout=200)
    assert asked.returncode == 4, err.decode()
    found = json.loads(out)
    hosts = {one["agent"]: one["facts"]["machine"] for one in found["machines"]}
    assert sorted(hosts.values()) == list(HOSTS)
    assert all(one["facts"]["round_trips_s"] and abs(one["skew_s"]) < 60 for one in found["machines"])
    pairs = {(hosts[one["source"]], hosts[one["target"]]): one for one in found["pairs"]}
    assert len(pairs) == 2
    for (here, there), pair in pairs.items():
        causes = {one["cause"] for one in pair["attempts"]}
        assert causes == ({"silent"} if there == "h2" else {""}), f"{here} → {there}: {pair}"
        if there != "h2":
            measured = pair["attempts"][0]
            assert measured["bytes_per_s"] > 0
            assert measured["round_trip_s"] > 0
            assert {one["port"] for one in pair["attempts"]} == {20000, 20050, 20100}
    bad = [one for one in found["verdicts"] if one["verdict"] == "bad"]
    assert {one["what"].partition(" → ")[2] for one in bad} == {agent for agent, host in hosts.items() if host == "h2"}
    assert all(f"open TCP {PORTS} between the machines" in one["do"] for one in bad)
    assert f"{network.address('h2')}:20000" in str(bad)
    check_all_is_given_back(network)


def test_interrupted_doctor_releases_all_machines(network: SshNetwork) -> None:
    asked = doctor()
    deadline = time.monotonic() + 180
    while sum(bool(network.running(host, "shoal.agent")) for host in HOSTS) < 2:
        assert asked.poll() is None, asked.communicate()
        assert time.monotonic() < deadline, "no agents were started"
        time.sleep(0.05)
    asked.send_signal(signal.SIGINT)
    out, err = asked.communicate(timeout=180)
    assert asked.returncode == 130, (out, err)
    check_all_is_given_back(network)
