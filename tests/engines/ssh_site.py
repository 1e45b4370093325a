"""A pool of ssh hosts, with a coordinator in the hub that they are joined to."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

import shoal
from shoal.engines.ssh import Ssh
from shoal.engines.ssh_command import SshOptions
from shoal.testing.engines import Site
from tests.engines.ssh_hosts import HUB, SshNetwork

SOURCES = Path(shoal.__file__).parents[1]


class SshSite(Site):
    host = HUB

    def __init__(self, path: Path, network: SshNetwork, *hosts: str, **options: Any) -> None:
        super().__init__(path)
        self.network = network
        self.options = {"hosts": hosts, "config": str(network.config), "python": sys.executable, "connect_s": 3.0}
        self.options |= {"setup": (f"export PYTHONPATH={SOURCES} OMP_NUM_THREADS=1",), **options}

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
        return self.network.home(host) / ".shoal" / "hires" / self.tag / hire

    def process(self, hire: str) -> psutil.Process:
        """A hire's agent, as this machine sees it."""
        host = self.where(hire)
        inside = json.loads((self.home(host, hire) / "process.json").read_text())["pid"]
        return next(one for one in self.network.processes(host) if _number_inside(one.pid) == inside)


def _number_inside(pid: int) -> int:
    """What a process is called on its own host."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("NSpid:")).split()[-1])
