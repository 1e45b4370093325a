"""Site of ssh hosts, with a coordinator in the hub that they are connected to."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from tests.engines.ssh_hosts import HUB, SshNetwork, ssh_network

import shoal
from shoal.engines.ssh.command import SshOptions
from shoal.engines.ssh.engine import Ssh
from shoal.testing.engine_conformance import EngineSite

SOURCES = Path(shoal.__file__).parents[1]


class SshSite(EngineSite):
    host = HUB

    def __init__(self, path: Path, network: SshNetwork, *hosts: str, **options: Any) -> None:
        super().__init__(path)
        self.network = network
        self.options: dict[str, Any] = {
            "hosts": hosts,
            "config": str(network.config),
            "python": sys.executable,
            "connect_timeout_s": 10.0,
        }
        self.options |= {"setup": (f"export PYTHONPATH={SOURCES} OMP_NUM_THREADS=1",), **options}

    def __enter__(self) -> SshSite:
        super().__enter__()
        return self

    def engine(self, **options: Any) -> Ssh:
        return Ssh("lab", SshOptions(**{**self.options, **options}))

    def kill(self, allocation: str) -> None:
        self.process(allocation).kill()

    @contextlib.contextmanager
    def cut(self) -> Iterator[None]:
        for host in self._hosts:
            self.network.stop_sshd(host)
        yield
        for host in self._hosts:
            self.network.start_sshd(host)

    @property
    def _hosts(self) -> list[str]:
        return [text.partition("*")[0] for text in self.options["hosts"]]

    def where(self, allocation: str) -> str:
        """Return the host that runs an allocation."""
        return next(host for host in self._hosts if self.home(host, allocation).exists())

    def home(self, host: str, allocation: str) -> Path:
        return self.network.home(host) / ".shoal" / "allocations" / self.tag / allocation

    def process(self, allocation: str) -> psutil.Process:
        """Return an allocation's agent as a process of this machine."""
        host = self.where(allocation)
        inside = json.loads((self.home(host, allocation) / "process.json").read_text())["pid"]
        return next(one for one in self.network.processes(host) if _number_inside(one.pid) == inside)

    def agents_on(self, host: str) -> list[psutil.Process]:
        """Return the agents of a host, without their warm processes, which may show the same command line."""
        found = self.network.running(host, "shoal.agent")
        return [one for one in found if _parent(one) not in {0, *(other.pid for other in found)}]

    def connections(self) -> list[int]:
        """Return the ssh processes that hold connections of engines; other tests have other namespaces."""
        here = os.stat("/proc/thread-self/ns/net").st_ino
        found = [one.pid for one in psutil.process_iter(["cmdline"]) if "shoal-ssh-" in str(one.info["cmdline"])]
        return [pid for pid in found if _network_of(pid) == here]

    @contextlib.contextmanager
    def held_up(self, host: str) -> Iterator[Path]:
        """Hold the lock under which agents are started on a host; yield its file."""
        allocations = self.network.home(host) / ".shoal" / "allocations"
        allocations.mkdir(parents=True, exist_ok=True)
        with (allocations / f"lock-{host}").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield allocations / f"lock-{host}"


@contextlib.contextmanager
def ssh_site(path: Path, *hosts: str, **options: Any) -> Iterator[SshSite]:
    """Boot hosts and yield a site with a pool of them."""
    names = [text.partition("*")[0] for text in hosts]
    with ssh_network(path / "net", *names) as network, SshSite(path, network, *hosts, **options) as site:
        yield site


# A listed process may have ended since.


def _number_inside(pid: int) -> int:
    """Return the pid of a process on its own host; 0 if it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int(next(line for line in status.splitlines() if line.startswith("NSpid:")).split()[-1])


def _parent(process: psutil.Process) -> int:
    """Return the parent of a process; 0 if it has ended."""
    try:
        return process.ppid()
    except psutil.NoSuchProcess:
        return 0


def _network_of(pid: int) -> int:
    """Return the id of a process's network namespace; 0 if it has ended."""
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino
    except (FileNotFoundError, ProcessLookupError):
        return 0
