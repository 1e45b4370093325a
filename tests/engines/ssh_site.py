"""A pool of ssh hosts, with a coordinator in the hub that they are joined to."""

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

    def kill(self, hire: str) -> None:
        self.process(hire).kill()

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

    def where(self, hire: str) -> str:
        """The host that a hire was started on."""
        return next(host for host in self._hosts if self.home(host, hire).exists())

    def home(self, host: str, hire: str) -> Path:
        return self.network.home(host) / ".shoal" / "allocations" / self.tag / hire

    def process(self, hire: str) -> psutil.Process:
        """A hire's agent, as this machine sees it."""
        host = self.where(hire)
        inside = json.loads((self.home(host, hire) / "process.json").read_text())["pid"]
        return next(one for one in self.network.processes(host) if _number_inside(one.pid) == inside)

    def agents_on(self, host: str) -> list[psutil.Process]:
        """The agents of a host; their warm processes are forked from them and show the same command line."""
        found = self.network.running(host, "shoal.agent")
        return [one for one in found if _parent(one) not in {0, *(other.pid for other in found)}]

    def connections(self) -> list[int]:
        """The processes of ssh that keep connections for engines; those of other tests are in other namespaces."""
        here = os.stat("/proc/thread-self/ns/net").st_ino
        found = [one.pid for one in psutil.process_iter(["cmdline"]) if "shoal-ssh-" in str(one.info["cmdline"])]
        return [pid for pid in found if _network_of(pid) == here]

    @contextlib.contextmanager
    def held_up(self, host: str) -> Iterator[Path]:
        """While it is entered, nothing can be started on a host; the file for whose lock all wait."""
        hires = self.network.home(host) / ".shoal" / "allocations"
        hires.mkdir(parents=True, exist_ok=True)
        with (hires / f"lock-{host}").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield hires / f"lock-{host}"


@contextlib.contextmanager
def ssh_site(path: Path, *hosts: str, **options: Any) -> Iterator[SshSite]:
    """Hosts that are up, and a pool of them."""
    names = [text.partition("*")[0] for text in hosts]
    with ssh_network(path / "net", *names) as network, SshSite(path, network, *hosts, **options) as site:
        yield site


# Whoever was listed may have ended since.


def _number_inside(pid: int) -> int:
    """What a process is called on its own host; 0 if it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int(next(line for line in status.splitlines() if line.startswith("NSpid:")).split()[-1])


def _parent(process: psutil.Process) -> int:
    """The parent of a process; 0 if it has ended."""
    try:
        return process.ppid()
    except psutil.NoSuchProcess:
        return 0


def _network_of(pid: int) -> int:
    """The number of the network that a process is in; 0 if it has ended."""
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino
    except (FileNotFoundError, ProcessLookupError):
        return 0
