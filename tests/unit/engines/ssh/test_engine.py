"""The ssh engine's choice of a host, on hosts that a table stands for."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from shoal.engines.engine import AllocationRequest
from shoal.engines.ssh import engine as ssh_engine
from shoal.engines.ssh.command import SshOptions
from shoal.engines.ssh.engine import Ssh
from shoal.engines.ssh.errors import HostError, silent
from shoal.engines.ssh.host_connection import HostConnection
from shoal.errors import AllocationRefused, EngineUnreachable, PoolFull
from shoal.wire.credentials import Credentials


class Hosts:
    """Hosts that answer calls from a table of what runs on them; some are silent, or break off during a start."""

    def __init__(self) -> None:
        self.running: dict[str, list[str]] = {}
        self.silent: set[str] = set()
        self.breaks_on_start: set[str] = set()
        self.starts: list[tuple[str, str]] = []

    def call(self, connection: HostConnection, request: dict[str, Any], reply_s: float) -> dict[str, Any]:
        host = connection.host
        if host in self.silent:
            raise HostError(silent("lab", host, reply_s).error)
        match request["do"]:
            case "start":
                self.starts.append((host, request["allocation"]))
                if host in self.breaks_on_start:
                    raise HostError(silent("lab", host, reply_s).error, unsure=True)
                self.running.setdefault(host, []).append(request["allocation"])
                return {"state": "started"}
            case "cancel":
                self.running[host].remove(request["allocation"])
                return {"state": "stopped"}
            case "list":
                remotes = [
                    {"allocation": name, "alive": True, "process": [7, 1], "log": ""}
                    for name in self.running.get(host, [])
                ]
                return {"allocations": remotes, "others": 0}
        return {}


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Hosts:
    hosts = Hosts()
    monkeypatch.setattr(HostConnection, "call", lambda self, request, reply_s: hosts.call(self, request, reply_s))
    return hosts


def engine(tmp_path: Path, *names: str) -> Ssh:
    return Ssh("lab", SshOptions(hosts=names), control=str(tmp_path / "control-x"))


def request(name: str) -> AllocationRequest:
    return AllocationRequest(name, "tag", "https://c:1", Credentials("secret", "PEM"), 1)


def test_consecutive_allocations_go_to_different_hosts_and_a_repeated_one_stays(hosts: Hosts, tmp_path: Path) -> None:
    lab = engine(tmp_path, "gpu1", "gpu2")
    assert lab.submit(request("lab-1")) == "gpu1/tag/lab-1"
    assert lab.submit(request("lab-2")) == "gpu2/tag/lab-2"
    assert lab.submit(request("lab-1")) == "gpu1/tag/lab-1"
    assert hosts.starts == [("gpu1", "lab-1"), ("gpu2", "lab-2")]
    assert {status.allocation for status in lab.watch("tag")} == {"lab-1", "lab-2"}


def test_pool_whose_hosts_are_full_says_so(hosts: Hosts, tmp_path: Path) -> None:
    lab = engine(tmp_path, "gpu1")
    lab.submit(request("lab-1"))
    with pytest.raises(PoolFull, match="no host of pool lab takes lab-2"):
        lab.submit(request("lab-2"))


def test_silent_host_is_skipped(hosts: Hosts, tmp_path: Path) -> None:
    hosts.silent = {"gpu1"}
    assert engine(tmp_path, "gpu1", "gpu2").submit(request("lab-1")) == "gpu2/tag/lab-1"


def test_unconfirmed_start_goes_to_no_other_host(hosts: Hosts, tmp_path: Path) -> None:
    hosts.breaks_on_start = {"gpu1"}
    lab = engine(tmp_path, "gpu1", "gpu2")
    for _ in range(2):
        with pytest.raises(EngineUnreachable):
            lab.submit(request("lab-1"))
    assert hosts.starts == [("gpu1", "lab-1")]
    # The host says that it has it after all.
    hosts.running["gpu1"] = ["lab-1"]
    assert lab.submit(request("lab-1")) == "gpu1/tag/lab-1"
    assert hosts.starts == [("gpu1", "lab-1")]


def test_cancelled_allocation_is_stopped_on_its_host(hosts: Hosts, tmp_path: Path) -> None:
    lab = engine(tmp_path, "gpu1")
    lab.cancel(lab.submit(request("lab-1")))
    assert hosts.running == {"gpu1": []}
    with pytest.raises(AllocationRefused, match="gpu9 is no longer a host of pool lab"):
        lab.cancel("gpu9/tag/lab-1")


def test_pool_without_any_answer_is_unreachable(hosts: Hosts, tmp_path: Path) -> None:
    hosts.silent = {"gpu1", "gpu2"}
    with pytest.raises(EngineUnreachable, match="no host of pool lab answers"):
        engine(tmp_path, "gpu1", "gpu2").watch("tag")


def test_stale_directories_of_sockets_are_removed_unless_in_use(tmp_path: Path) -> None:
    for name in ("x-old", "x-used", "x-new"):
        (tmp_path / name).mkdir()
    (tmp_path / "x-used" / "socket").touch()
    for name in ("x-old", "x-used"):
        os.utime(tmp_path / name, (1.0, 1.0))
    ssh_engine._remove_stale_control_directories(str(tmp_path / "x"))
    assert sorted(os.listdir(tmp_path)) == ["x-new", "x-used"]
