"""The clusters to measure on: real ones, started on this machine as the tests do."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import psutil
from tests.engines import ray_cluster, slurm_cluster, ssh_hosts

import shoal
from benchmarks.processes import ROOT

SOURCES = Path(shoal.__file__).parents[1]
UP_S = 60.0


class Site(ABC):
    """A cluster with one member per machine. `pool` is its table in shoal.toml, without the name.

    `survives` says whether the loss of a machine is measured.
    """

    name: ClassVar[str]
    survives: ClassVar[bool] = True
    machines: int

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self.directory = directory
        self.env = {"PYTHONPATH": f"{SOURCES}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1", "TERM": "dumb"}

    @staticmethod
    @abstractmethod
    def why_not() -> str:
        """Return what this machine lacks for the site, or an empty string."""

    @abstractmethod
    def open(self) -> contextlib.AbstractContextManager[Site]:
        """Run the cluster while the context is open; processes started by this thread can reach it."""

    @property
    @abstractmethod
    def pool(self) -> Mapping[str, Any]: ...

    @property
    def settings(self) -> tuple[str, ...]:
        """Return the options of `shoal run` besides the pool."""
        return ()

    @abstractmethod
    def processes(self) -> dict[str, list[psutil.Process]]:
        """Return all processes of each machine."""

    @abstractmethod
    def clear(self) -> None:
        """End all jobs on the cluster, so that all machines are up and free."""

    def training(self, directory: Path) -> list[str]:
        """Return the machines with processes of a job, which have its commit logs open."""
        return [name for name, found in self.processes().items() if any(_writes_to(one, directory) for one in found)]

    def lose(self, machine: str) -> float:
        """Kill everything on a machine at once, as a power failure does; return the time."""
        found = self.processes()[machine]
        at = time.monotonic()
        for one in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        return at


class SlurmSite(Site):
    """Slurm with three nodes, each with its own slurmd on loopback."""

    name = "slurm"
    machines = 3
    nodes = slurm_cluster.NODES[:3]

    why_not = staticmethod(slurm_cluster.missing)

    @contextlib.contextmanager
    def open(self) -> Iterator[SlurmSite]:
        self._cluster = slurm_cluster.Cluster(self.directory / "slurm")
        try:
            self._cluster.start()
            self.env |= {"SLURM_CONF": str(self._cluster.conf), "PATH": slurm_cluster.PATH}
            yield self
        finally:
            self._cluster.stop()

    @property
    def pool(self) -> Mapping[str, Any]:
        return {"engine": "slurm", "partition": "low", "cpus_per_task": 2, "limit": self.machines}

    @property
    def settings(self) -> tuple[str, ...]:
        return ("host=127.0.0.1",)

    def processes(self) -> dict[str, list[psutil.Process]]:
        return {node: list(_with_children(self._cluster.on_node(node))) for node in self.nodes}

    def clear(self) -> None:
        for node in self.nodes:
            if not self._cluster.on_node(node):
                # Slurm would wait for what ran there.
                self._cluster.ask("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=lost")
                self._cluster.start_node(node)
                self._cluster.ask("scontrol", "update", f"NodeName={node}", "State=RESUME")
        self._cluster.clear()


class RaySite(Site):
    """Ray with a head without processors and four nodes with one each: one more than members, to replace a lost one."""

    name = "ray"
    machines = 4
    node: ClassVar[dict[str, Any]] = {"num_cpus": 1}

    @staticmethod
    def why_not() -> str:
        # Without pandas there is no Ray Train.
        absent = [name for name in ("ray", "pandas") if importlib.util.find_spec(name) is None]
        return f"not installed: {', '.join(absent)}; scripts/setup bench" if absent else ray_cluster.why_not()

    @contextlib.contextmanager
    def open(self) -> Iterator[RaySite]:
        # Ray's workers inherit the environment of the process that starts the cluster.
        os.environ.update(self.env)
        # Workers that wait for work, as Ray has them by default.
        settings = {name: value for name, value in ray_cluster.SETTINGS.items() if "prestart" not in name}
        self._cluster = ray_cluster.RayCluster(settings)
        try:
            with self._cluster.network():
                self.env |= {"RAY_TMPDIR": self._cluster.directory, "RAY_ADDRESS": self._cluster.address}
                self.clear()
                yield self
        finally:
            self._cluster.close()

    @property
    def pool(self) -> Mapping[str, Any]:
        where = {"address": self._cluster.address, "directory": str(self.directory / "home")}
        return {"engine": "ray", "python": sys.executable, "cpus": 1, "limit": self.machines, **where}

    def processes(self) -> dict[str, list[psutil.Process]]:
        return {str(one.pid): list(_with_children([one.pid])) for one in self._cluster.raylets()}

    def clear(self) -> None:
        while len(self._cluster.raylets()) < self.machines:
            self._cluster.add(**self.node)
        # A job that has just ended may still hold processors.
        _until(lambda: not self._busy(), "Ray to have ended what it ran")

    def _busy(self) -> bool:
        return any(
            "shoal.agent" in line or "RayTrainWorker" in line
            for found in self.processes().values()
            for line in map(_command, found)
        )


class SshSite(Site):
    """Two hosts with their own network and process namespaces and an sshd."""

    name = "ssh"
    survives = False
    hosts = ("h1", "h2")
    machines = len(hosts)

    why_not = staticmethod(ssh_hosts.why_not)

    @contextlib.contextmanager
    def open(self) -> Iterator[SshSite]:
        with ssh_hosts.ssh_network(self.directory / "net", *self.hosts) as self.network:
            yield self

    @property
    def pool(self) -> Mapping[str, Any]:
        setup = [f"export PYTHONPATH={SOURCES} OMP_NUM_THREADS=1"]
        where = {"hosts": list(self.hosts), "config": str(self.network.config), "python": sys.executable}
        return {"engine": "ssh", "setup": setup, **where}

    @property
    def settings(self) -> tuple[str, ...]:
        return (f"host={ssh_hosts.HUB}",)

    def processes(self) -> dict[str, list[psutil.Process]]:
        return {host: self.network.processes(host) for host in self.hosts}

    def clear(self) -> None:
        for one in [one for found in self.processes().values() for one in found]:
            if any(word in _command(one) for word in ("shoal.agent", "torch.distributed.run", "train_")):
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()


SITES: tuple[type[Site], ...] = (SlurmSite, RaySite, SshSite)


def _with_children(pids: Iterable[int]) -> Iterator[psutil.Process]:
    """Return these processes and all their descendants, without those that have just ended."""
    found: dict[int, psutil.Process] = {}
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            one = psutil.Process(pid)
            found |= {each.pid: each for each in (one, *one.children(recursive=True))}
    return iter(found.values())


def _writes_to(process: psutil.Process, directory: Path) -> bool:
    try:
        links = [os.readlink(entry.path) for entry in os.scandir(f"/proc/{process.pid}/fd")]
    except OSError:
        return False
    return any(link.startswith(f"{directory}/") and link.endswith(".commits") for link in links)


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def _until(ready: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + UP_S
    while not ready():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {UP_S:g} s for {what}")
        time.sleep(0.1)
